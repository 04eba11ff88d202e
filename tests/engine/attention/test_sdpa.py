from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from cacheslide_agents.engine.attention import row_runs, select_attention
from cacheslide_agents.engine.attention.flash import FlashAttention
from cacheslide_agents.engine.attention.groups import groups_for
from cacheslide_agents.engine.attention.interface import Attention
from cacheslide_agents.engine.attention.kernels import kernel_for, plain
from cacheslide_agents.engine.attention.products import attend_by_products, products_pay
from cacheslide_agents.engine.attention.sdpa import SdpaAttention
from cacheslide_agents.engine.slide.block_table import BlockTable
from tests.reference.dense_attention import dense_attention, dense_lse
from tests.reference.flash_varlen import flash_attn_varlen_func

CPU = torch.device("cpu")


class ProductAttention(SdpaAttention):
    """Matrix products for any dtype and number of rows."""

    def attend(self, query, kv, layout, *, scale, window, lse=None):
        groups = groups_for(layout, window, query.dtype, query.device)
        keys, first_key = self._reader.read(kv, layout, groups.first_key)
        return attend_by_products(query, keys, groups, first_key, scale, lse)


CONTIGUOUS = list(range(3, 53))
SCATTERED = np.random.default_rng(5).permutation(60)[:50].tolist()
PAGES = {"contiguous": CONTIGUOUS, "scattered": SCATTERED}
BACKENDS: dict[str, Callable[[], Attention]] = {
    "sdpa": lambda: SdpaAttention(CPU),
    "plain kernel": lambda: SdpaAttention(CPU, plain),
    "products": lambda: ProductAttention(CPU),
}
ROWS = {
    "all rows": np.arange(700),
    "one row": np.array([431]),
    "first row": np.array([0]),
    "few last rows": np.arange(690, 700),
    "a long run after old keys": np.arange(200, 700),
    "two long runs": np.concatenate((np.arange(100, 300), np.arange(500, 640))),
    "scattered rows": np.sort(np.random.default_rng(1).permutation(700)[:200]),
    "scattered rows from the start": np.arange(0, 700, 3),
    "a long run among scattered rows": np.concatenate(
        (np.arange(5, 90, 4), np.arange(150, 400), np.arange(401, 700, 7))
    ),
}


def pool(heads: int = 4, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of 60 pages, and a query row for each of 700 tokens."""
    random = torch.Generator().manual_seed(0)
    kv = torch.randn(60 * 16, 4, 16, generator=random).to(dtype)
    query = torch.randn(700, heads, 16, generator=random).to(dtype) * 2
    return kv, query


def attend(attention: Attention, query, kv, pages, tokens, window=None, lse=None):
    layout = attention.layout(BlockTable(pages), tokens)
    return attention.attend(query[tokens], kv, layout, scale=0.25, window=window, lse=lse)


@cache
def seen_by_all(rows: str, window: int | None, pages: str) -> torch.Tensor:
    """The oracle, once for all backends."""
    kv, query = pool()
    return dense_attention(query[ROWS[rows]], kv, BlockTable(PAGES[pages]), ROWS[rows], 0.25, window)


@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("window", [None, 700, 160, 33, 1])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_see_what_dense_attention_sees_when_keys_are_paged(backend, rows, window, pages):
    kv, query = pool()
    out = attend(BACKENDS[backend](), query, kv, PAGES[pages], ROWS[rows], window)
    torch.testing.assert_close(out.double(), seen_by_all(rows, window, pages), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_see_what_dense_attention_sees_when_flash_runs_them_as_sequences(rows, window, pages):
    kv, query = pool()
    out = attend(FlashAttention(CPU, flash_attn_varlen_func), query, kv, PAGES[pages], ROWS[rows], window)
    torch.testing.assert_close(out.double(), seen_by_all(rows, window, pages), atol=1e-5, rtol=1e-5)


GAPS = np.array([[37, 5], [200, 20], [431, 21]])
TABLES = {
    "few runs": BlockTable([*range(10, 30), *range(40, 60), *range(10)]),
    "few runs with gaps": BlockTable([*range(10, 30), *range(40, 60), *range(10)], GAPS),
    "many runs with gaps": BlockTable(SCATTERED, GAPS),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("rows", ["all rows", "one row", "scattered rows", "few last rows"])
@pytest.mark.parametrize("backend", [*BACKENDS, "flash"])
def test_rows_see_what_dense_attention_sees_when_slots_are_left_out(backend, rows, window, table):
    kv, query = pool()
    tokens = ROWS[rows]
    owned = np.zeros(len(kv), dtype=np.bool_)
    owned[TABLES[table].slots(np.arange(700))] = True
    kv[torch.from_numpy(~owned)] = torch.nan
    attention = BACKENDS.get(backend, lambda: FlashAttention(CPU, flash_attn_varlen_func))()
    layout = attention.layout(TABLES[table], tokens)
    out = attention.attend(query[tokens], kv, layout, scale=0.25, window=window)
    expected = dense_attention(query[tokens], kv, TABLES[table], tokens, 0.25, window)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("window", [None, 160, 33, 1])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("backend", [*BACKENDS, "flash"])
def test_sums_of_exponentials_are_told_when_they_are_asked_for(backend, rows, window, pages):
    kv, query = pool()
    make = BACKENDS.get(backend, lambda: FlashAttention(CPU, flash_attn_varlen_func))
    tokens, table = ROWS[rows], BlockTable(PAGES[pages])
    lse = torch.full((len(tokens), 4), torch.nan)
    out = attend(make(), query, kv, PAGES[pages], tokens, window, lse)
    expected = dense_lse(query[tokens], kv, table, tokens, 0.25, window)
    torch.testing.assert_close(lse.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(out, attend(make(), query, kv, PAGES[pages], tokens, window)), "asking changes no answer"


@pytest.mark.parametrize("shared", [0.0, 20.0])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads", [2, 4, 6])
@pytest.mark.parametrize("backend", ["sdpa", "products"])
def test_sums_of_exponentials_are_close_when_bfloat16(backend, heads, rows, window, shared):
    kv, query = pool(heads, torch.bfloat16)
    kv[:, :2] += shared
    kernel = None if backend == "products" else kernel_for(CPU)
    attention = ProductAttention(CPU) if kernel is None else SdpaAttention(CPU, kernel)
    tokens = ROWS[rows]
    lse = torch.full((len(tokens), heads), torch.nan)
    attend(attention, query, kv, SCATTERED, tokens, window, lse)
    expected = dense_lse(query[tokens], kv, BlockTable(SCATTERED), tokens, 0.25, window)
    torch.testing.assert_close(lse.double(), expected, atol=0.05, rtol=1e-3)


@pytest.mark.parametrize("heads", [2, 4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_groups_of_heads_share_keys_when_there_are_fewer_key_heads(heads, dtype):
    kv, query = pool(heads, dtype)
    for tokens in ROWS.values():
        out = attend(SdpaAttention(CPU), query, kv, SCATTERED, tokens)
        expected = dense_attention(query[tokens], kv, BlockTable(SCATTERED), tokens, 0.25, None)
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", ROWS)
def test_products_are_as_close_as_the_flash_kernel_when_bfloat16(rows):
    kv, query = pool(4, torch.bfloat16)
    kv[:, :2] += 20.0  # keys with a large part in common, as a bias makes them
    tokens = ROWS[rows]
    expected = dense_attention(query[tokens], kv, BlockTable(SCATTERED), tokens, 0.25, None)
    errors = [
        (attend(attention, query, kv, SCATTERED, tokens).double() - expected).square().mean().sqrt()
        for attention in (SdpaAttention(CPU, kernel_for(CPU)), ProductAttention(CPU))
    ]
    assert errors[1] < max(0.01, 2 * errors[0])


def test_products_are_taken_when_the_processor_has_them(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert products_pay(CPU)
    assert not products_pay(torch.device("cuda"))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert not products_pay(CPU)


def test_layout_serves_all_layers_when_windows_differ():
    kv, query = pool()
    attention = SdpaAttention(CPU)
    tokens = ROWS["a long run among scattered rows"]
    layout = attention.layout(BlockTable(SCATTERED), tokens)
    for window in (None, 50, None, 50, 300):
        out = attention.attend(query[tokens], kv, layout, scale=0.25, window=window)
        expected = dense_attention(query[tokens], kv, BlockTable(SCATTERED), tokens, 0.25, window)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_buffer_grows_when_a_longer_sequence_follows_inside_and_outside_inference_mode():
    kv, query = pool()
    attention = SdpaAttention(CPU)
    for length, inference in itertools.product((40, 700, 100), (True, False)):
        tokens = np.arange(length - 20, length)
        with torch.inference_mode(inference):
            out = attend(attention, query, kv, SCATTERED, tokens)
            expected = dense_attention(query[tokens], kv, BlockTable(SCATTERED), tokens, 0.25, None)
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_fused_queries_are_taken_when_rows_are_views():
    kv, query = pool()
    fused = torch.cat((query, torch.randn(700, 4, 16, generator=torch.Generator().manual_seed(3))), dim=1)
    for tokens in ROWS.values():
        table = BlockTable(CONTIGUOUS)
        attention = SdpaAttention(CPU)
        rows = torch.from_numpy(tokens)
        out = attention.attend(fused[rows][:, :4], kv, attention.layout(table, tokens), scale=0.25, window=None)
        expected = dense_attention(query[tokens], kv, table, tokens, 0.25, None)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_kernel_agrees_with_its_definition_when_torch_has_one():
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 50, 16, generator=random) for heads in (6, 3, 3))
    mask = torch.zeros(50, 50).masked_fill_(torch.rand(50, 50, generator=random) > 0.5, -torch.inf).fill_diagonal_(0)
    for causal, bias in ((False, None), (True, None), (False, mask)):
        out, lse = kernel_for(CPU)(query, key, value, causal, bias, 0.3)
        expected, expected_lse = plain(query, key, value, causal, bias, 0.3)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
        assert lse.dtype == torch.float32


def test_plain_kernel_is_taken_when_torch_lacks_its_own(monkeypatch):
    monkeypatch.setattr(torch.ops, "aten", object())
    assert kernel_for(CPU) is plain


def test_runs_are_split_where_tokens_are_no_neighbours():
    runs = row_runs(np.array([0, 1, 2, 5, 9, 10]))
    assert [tuple(run) for run in runs] == [(0, 3, 0), (3, 4, 5), (4, 6, 9)]
    assert [run.token_stop for run in runs] == [3, 6, 11]


def test_old_keys_need_no_mask_when_a_run_follows_them():
    attention = SdpaAttention(CPU)
    layout = attention.layout(BlockTable(CONTIGUOUS), np.arange(200, 700))
    kv, query = pool()
    attention.attend(query[200:], kv, layout, scale=0.25, window=None)
    (group,) = layout.prepared[None].groups
    assert [tuple(block) for block in group.blocks] == [(0, 200, False, None), (200, 700, True, None)]


def test_keys_are_a_view_when_pages_are_contiguous():
    kv, query = pool()
    attention = SdpaAttention(CPU)
    attend(attention, query, kv, CONTIGUOUS, np.arange(700))
    assert attention._reader._buffer is None
    assert isinstance(select_attention("auto", CPU, torch.bfloat16), SdpaAttention)
