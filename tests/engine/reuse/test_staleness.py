"""Attention mass from stored queries, against full softmaxes in float64 over the model's own queries and keys."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from cacheslide_agents.engine.attention import select_attention
from cacheslide_agents.engine.model.decoder import Decoder
from cacheslide_agents.engine.reuse import staleness
from cacheslide_agents.engine.reuse.staleness import Asking, Keys, attention_mass, demand
from cacheslide_agents.engine.run.forward import Forward
from cacheslide_agents.engine.slide.block_table import BlockTable
from cacheslide_agents.engine.slide.pages import PagePool
from cacheslide_agents.engine.slide.queries import StoredQueries
from cacheslide_agents.engine.slide.slots import Slots
from tests.reference.dense_pass import DensePass
from tests.tiny import VOCAB_SIZE, tiny_model

CPU = torch.device("cpu")
MODELS = {
    "llama": ("llama", {}),
    "all heads apart": ("llama", {"num_key_value_heads": 4}),
    "head norms": ("qwen3", {}),
    "biases": ("qwen2", {}),
    "window": ("mistral", {"sliding_window": 24}),
}


class Texts:
    """A tiny model with texts in scattered pages."""

    def __init__(self, model: str = "llama") -> None:
        family, overrides = MODELS[model]
        self.decoder = Decoder.from_transformers(tiny_model(family, num_hidden_layers=8, **overrides))
        self.pool = PagePool(self.decoder.spec, 64, torch.float32, CPU)
        self.queries = StoredQueries(self.decoder.spec, 64 * 16, torch.float32, CPU)
        attention = select_attention("sdpa", CPU, torch.float32)
        self.forward = Forward(self.decoder, self.pool, self.queries, attention)
        self.rng = np.random.default_rng(7)

    def ids(self, num_tokens: int) -> np.ndarray:
        return self.rng.integers(11, VOCAB_SIZE, num_tokens)

    @torch.inference_mode()
    def computed(self, token_ids: np.ndarray) -> BlockTable:
        tokens = np.arange(len(token_ids))
        table = BlockTable(self.rng.permutation(self.pool.allocate(-(-len(tokens) // 16))).tolist())
        self.forward.rows(token_ids, tokens, tokens, table, wanted=0)
        return table

    @torch.inference_mode()
    def mass(
        self, table: BlockTable, rows: np.ndarray, turn: int, tokens: np.ndarray, keys: Keys, *, bounded: bool
    ) -> torch.Tensor:
        asking = Asking(tokens, torch.from_numpy(table.slots(rows)), np.full(len(rows), turn))
        return attention_mass(self.pool, self.queries, self.decoder.spec, asking, keys, bounded=bounded)

    @torch.inference_mode()
    def demand(self, table: BlockTable, rows: np.ndarray, keys: Keys) -> torch.Tensor:
        asking = Asking(rows, torch.from_numpy(table.slots(rows)), np.zeros(len(rows), dtype=np.int64))
        return demand(self.pool, self.queries, self.decoder.spec, asking, keys)


def close(mass: torch.Tensor, expected: torch.Tensor) -> None:
    """Queries of eight bits keep a mass within 2 %."""
    assert expected.max() > 0.05
    torch.testing.assert_close(mass.double(), expected, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("model", MODELS)
def test_gone_mass_is_what_was_paid_when_keys_lie_anywhere_before_and_behind(model: str) -> None:
    texts = Texts(model)
    assert len(texts.queries.layers) >= 3
    ids, every = texts.ids(100), np.arange(100)
    table = texts.computed(ids)
    gone = np.concatenate((np.arange(5, 30), np.arange(61, 75)))
    mass = texts.mass(table, every, 0, every, Keys(gone, table, CPU), bounded=False)
    expected = DensePass(texts.decoder, ids).mass(texts.queries.layers, gone)
    own = torch.zeros(100, dtype=torch.bool)
    own[gone] = True  # a gone key also pays to itself, which nobody asks about
    close(mass[~own], expected[~own])
    assert not mass[:6].any(), "nothing was gone before them"
    if model == "window":
        assert not mass[[55, 99]].any(), "the window saw none of it"


@pytest.mark.parametrize("turn", [0, 17, -9])
@pytest.mark.parametrize("model", MODELS)
def test_new_mass_is_that_of_one_softmax_over_old_and_new_when_queries_are_turned(model: str, turn: int) -> None:
    texts = Texts(model)
    head, old, new, tail = (texts.ids(count) for count in (20, 25, 25 + turn, 30))
    before, after = np.concatenate((head, old, tail)), np.concatenate((head, new, tail))
    stored, table = texts.computed(before), texts.computed(after[: 20 + len(new)])
    rows = np.arange(45, 75)
    keys = np.arange(20, 20 + len(new))
    mass = texts.mass(stored, rows, turn, rows + turn, Keys(keys, table, CPU), bounded=True)
    seen, coming = DensePass(texts.decoder, before), DensePass(texts.decoder, after)
    close(mass, seen.new_mass(texts.queries.layers, rows, turn, rows + turn, coming, keys))


def test_new_mass_is_bounded_by_what_is_added_when_keys_are_asked_about_twice() -> None:
    """Of keys already paid for, e is the mass m itself, so e / (1 + e) is m / (1 + m)."""
    texts = Texts("all heads apart")
    ids, rows, keys = texts.ids(60), np.arange(40, 60), np.arange(10, 30)
    table = texts.computed(ids)
    bounded = texts.mass(table, rows, 0, rows, Keys(keys, table, CPU), bounded=True)
    dense = DensePass(texts.decoder, ids)
    paid = torch.stack([dense.scores(layer).softmax(-1)[:, 40:, 10:30].sum(-1) for layer in texts.queries.layers])
    close(bounded, (paid / (1 + paid)).mean((0, 1)))


def test_mass_is_the_same_when_rows_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Texts("window")
    ids, every = texts.ids(70), np.arange(70)
    table = texts.computed(ids)
    keys = Keys(np.arange(3, 50, 2), table, CPU)
    whole = texts.mass(table, every, 5, every, keys, bounded=True)
    monkeypatch.setattr(staleness, "CHUNK_SCORES", 7 * 4 * len(keys.tokens))
    torch.testing.assert_close(texts.mass(table, every, 5, every, keys, bounded=True), whole)


def test_no_mask_of_all_rows_and_keys_is_made_when_both_are_many() -> None:
    texts = Texts()
    page = texts.computed(texts.ids(16)).pages
    table, tokens = BlockTable(page * 125), np.arange(2000)
    keys = Keys(tokens, table, CPU)
    tracemalloc.start()
    texts.mass(table, tokens, 0, tokens, keys, bounded=True)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000 < len(tokens) ** 2


@pytest.mark.parametrize("bounded", [False, True])
def test_mass_is_one_when_a_score_is_too_large_to_be_a_number(bounded: bool) -> None:
    texts = Texts()
    table = texts.computed(texts.ids(32))
    slots = table.slots(np.arange(20, 24))
    for layer_idx in texts.queries.layers:
        query, lse = texts.queries.read(layer_idx, torch.from_numpy(slots))
        texts.queries.write(layer_idx, Slots(slots, CPU), query, lse - 1_000)
    rows = np.arange(20, 24)
    mass = texts.mass(table, rows, 0, rows, Keys(np.arange(8), table, CPU), bounded=bounded)
    torch.testing.assert_close(mass, torch.ones(4))


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(("num_rows", "num_keys"), [(0, 5), (3, 0), (0, 0)])
def test_mass_is_nothing_when_nobody_asks_or_nothing_is_asked_about(
    num_rows: int, num_keys: int, bounded: bool
) -> None:
    texts = Texts()
    table = texts.computed(texts.ids(20))
    rows = np.arange(10, 10 + num_rows)
    mass = texts.mass(table, rows, 0, rows, Keys(np.arange(num_keys), table, CPU), bounded=bounded)
    assert mass.dtype == torch.float32 and mass.tolist() == [0.0] * num_rows


def test_mass_is_nothing_when_every_key_lies_behind_its_query() -> None:
    texts = Texts()
    table = texts.computed(texts.ids(40))
    rows = np.arange(10)
    for bounded in (False, True):
        assert not texts.mass(table, rows, 0, rows, Keys(np.arange(9, 40), table, CPU), bounded=bounded).any()


@pytest.mark.parametrize("model", MODELS)
def test_demand_is_the_mean_attention_that_keys_get_when_they_lie_anywhere(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = Texts(model)
    ids, rows, keys = texts.ids(90), np.arange(70, 90), np.concatenate((np.arange(3, 40), np.arange(52, 78)))
    table = texts.computed(ids)
    dense = DensePass(texts.decoder, ids)
    paid = torch.stack([dense.scores(layer).softmax(-1)[:, 70:, keys] for layer in texts.queries.layers])
    own = torch.from_numpy(keys[None, :] == rows[:, None])
    expected = paid.masked_fill(own, 0).mean((0, 1, 2))  # a token is in no demand with itself
    got = texts.demand(table, rows, Keys(keys, table, CPU))
    assert expected.sum() > 0.05, "some is in demand"
    torch.testing.assert_close(got.double(), expected, rtol=0.03, atol=1e-4)
    monkeypatch.setattr(staleness, "CHUNK_SCORES", 7 * 4 * len(keys))
    torch.testing.assert_close(texts.demand(table, rows, Keys(keys, table, CPU)), got)


def test_demand_is_nothing_when_nobody_asks_or_nothing_is_asked_about() -> None:
    texts = Texts()
    table = texts.computed(texts.ids(20))
    assert texts.demand(table, np.arange(10, 10), Keys(np.arange(5), table, CPU)).tolist() == [0.0] * 5
    assert texts.demand(table, np.arange(10, 12), Keys(np.arange(0), table, CPU)).tolist() == []
