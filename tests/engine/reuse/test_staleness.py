"""Staleness and demand from stored queries, against full softmaxes in float64 over the model's own attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cacheslide_agents.engine.attention import select_attention
from cacheslide_agents.engine.model.decoder import Decoder
from cacheslide_agents.engine.reuse import staleness
from cacheslide_agents.engine.reuse.staleness import Asking, Keys, attention_change, demand
from cacheslide_agents.engine.run.forward import Forward
from cacheslide_agents.engine.slide.block_table import BlockTable
from cacheslide_agents.engine.slide.pages import PagePool
from cacheslide_agents.engine.slide.queries import StoredQueries
from cacheslide_agents.engine.slide.slots import Slots
from tests.reference.dense_pass import DensePass
from tests.tiny import VOCAB_SIZE, tiny_model

CPU = torch.device("cpu")
NONE = np.arange(0)
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
    def change(
        self,
        table: BlockTable,
        rows: np.ndarray,
        gone: np.ndarray,
        turn: int = 0,
        other: BlockTable | None = None,
        new: np.ndarray = NONE,
    ) -> torch.Tensor:
        """Of `rows` of one text when its tokens `gone` go and tokens `new` of another come, `turn` tokens earlier."""
        slots = torch.from_numpy(table.slots(rows))
        left = Asking(Keys(gone, table, CPU), rows, np.zeros_like(rows))
        came = Asking(Keys(new, other or table, CPU), rows + turn, np.full_like(rows, turn))
        return attention_change(self.pool, self.queries, self.decoder.spec, slots, left, came)

    @torch.inference_mode()
    def demand(self, table: BlockTable, rows: np.ndarray, keys: Keys) -> torch.Tensor:
        asking = Asking(keys, rows, np.zeros(len(rows), dtype=np.int64))
        slots = torch.from_numpy(table.slots(rows))
        return demand(self.pool, self.queries, self.decoder.spec, slots, asking)


def close(change: torch.Tensor, expected: torch.Tensor) -> None:
    """Queries of eight bits keep a change within 3 %."""
    assert expected.max() > 0.05
    torch.testing.assert_close(change.double(), expected, rtol=0.03, atol=3e-3)


@pytest.mark.parametrize("model", MODELS)
def test_change_is_what_gone_values_gave_when_nothing_comes_and_keys_lie_anywhere(model: str) -> None:
    texts = Texts(model)
    assert len(texts.queries.layers) >= 3
    ids, every = texts.ids(100), np.arange(100)
    table = texts.computed(ids)
    gone = np.concatenate((np.arange(5, 30), np.arange(61, 75)))
    change = texts.change(table, every, gone)
    dense = DensePass(texts.decoder, ids)
    expected = dense.change(texts.queries.layers, every, gone, 0, every, dense, NONE)
    own = torch.zeros(100, dtype=torch.bool)
    own[gone] = True  # a gone key also pays to itself, which nobody asks about
    close(change[~own], expected[~own])
    assert not change[:6].any(), "nothing was gone before them"
    if model == "window":
        assert not change[[55, 99]].any(), "the window saw none of it"


@pytest.mark.parametrize("turn", [0, 17, -9])
@pytest.mark.parametrize("model", MODELS)
def test_change_is_that_of_one_softmax_over_old_and_new_when_text_is_replaced(model: str, turn: int) -> None:
    texts = Texts(model)
    head, old, new, tail = (texts.ids(count) for count in (20, 25, 25 + turn, 30))
    before, after = np.concatenate((head, old, tail)), np.concatenate((head, new, tail))
    stored, table = texts.computed(before), texts.computed(after[: 20 + len(new)])
    rows, gone, keys = np.arange(45, 75), np.arange(20, 45), np.arange(20, 20 + len(new))
    change = texts.change(stored, rows, gone, turn, table, keys)
    seen, coming = DensePass(texts.decoder, before), DensePass(texts.decoder, after)
    close(change, seen.change(texts.queries.layers, rows, gone, turn, rows + turn, coming, keys))


def test_change_is_small_when_what_comes_says_what_went() -> None:
    """The text is as before, but all of its start counts as gone and as new: much mass, and hardly a change.

    Of keys that were paid for, e is the mass m itself, so that e / (1 + e) differs from m by the square of m.
    """
    texts = Texts("all heads apart")
    ids, rows, keys = texts.ids(60), np.arange(40, 60), np.arange(20, 24)
    table = texts.computed(ids)
    gone, both = texts.change(table, rows, keys), texts.change(table, rows, keys, 0, table, keys)
    assert gone.min() > 0.01
    assert (both < 0.35 * gone).all()


def test_change_is_the_same_when_rows_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Texts("window")
    table, other = texts.computed(texts.ids(70)), texts.computed(texts.ids(80))
    rows, gone, new = np.arange(30, 70), np.arange(3, 30, 2), np.arange(3, 33)
    whole = texts.change(table, rows, gone, 5, other, new)
    monkeypatch.setattr(staleness, "CHUNK_SCORES", 7 * 4 * (len(gone) + len(new)))
    torch.testing.assert_close(texts.change(table, rows, gone, 5, other, new), whole)


def test_no_mask_of_all_rows_and_keys_is_made_when_both_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Texts()
    page = texts.computed(texts.ids(16)).pages
    table, tokens = BlockTable(page * 125), np.arange(2000)
    make, sizes = staleness._Side._hidden, []

    def watched(side: staleness._Side, part: slice) -> torch.Tensor:
        sizes.append((hidden := make(side, part)).numel())
        return hidden

    monkeypatch.setattr(staleness._Side, "_hidden", watched)
    texts.change(table, tokens, tokens)
    assert 0 < max(sizes) <= staleness.CHUNK_SCORES // texts.decoder.spec.num_heads < len(tokens) ** 2


@pytest.mark.parametrize("side", ["gone", "new"])
def test_change_is_the_value_itself_when_a_score_is_too_large_to_be_a_number(side: str) -> None:
    texts = Texts()
    table = texts.computed(texts.ids(32))
    rows, key = np.arange(20, 24), np.array([3])
    for layer_idx in texts.queries.layers:
        query, lse = texts.queries.read(layer_idx, torch.from_numpy(table.slots(rows)))
        texts.queries.write(layer_idx, Slots(table.slots(rows), CPU), query, lse - 1_000)
    gone, new = (key, NONE) if side == "gone" else (NONE, key)
    torch.testing.assert_close(texts.change(table, rows, gone, 0, table, new), torch.ones(4))


@pytest.mark.parametrize(("num_rows", "num_gone", "num_new"), [(0, 5, 3), (3, 0, 0), (0, 0, 0)])
def test_nothing_changes_when_nobody_asks_or_nothing_goes_or_comes(num_rows: int, num_gone: int, num_new: int) -> None:
    texts = Texts()
    table = texts.computed(texts.ids(20))
    rows = np.arange(10, 10 + num_rows)
    change = texts.change(table, rows, np.arange(num_gone), 0, table, np.arange(num_new))
    assert change.dtype == torch.float32 and change.tolist() == [0.0] * num_rows


def test_nothing_changes_when_every_key_lies_behind_its_query() -> None:
    texts = Texts()
    table = texts.computed(texts.ids(40))
    behind = np.arange(9, 40)
    assert not texts.change(table, np.arange(10), behind, 0, table, behind).any()


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
