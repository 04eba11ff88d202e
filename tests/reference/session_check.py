"""Watches an engine's turns: each token's K and V is compared with what its treatment promises, by another way.

Exact tokens must be the donor's bit for bit, slid ones the donor's moved by complex numbers in float64, computed ones
what their layer gives over the K and V stored before them (dense attention), and the untainted prefix what a prefill
of nothing else gives. Stored queries must be those that a token had when it was computed, and only tokens that slid
without correction may be stale. Repair, a step at a time, may change nothing but the tokens that it computes again.
Slots that nobody owns are filled with NaN, so that reading one shows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.engine import Engine, Prompt, SamplingParams
from cacheslide_agents.engine.config import PAGE_TOKENS
from cacheslide_agents.engine.reuse.index import CachedSequence
from cacheslide_agents.engine.reuse.plan import assert_valid
from cacheslide_agents.engine.reuse.rules import ByStaleness
from cacheslide_agents.engine.reuse.spans import Plan, Span
from cacheslide_agents.engine.run.prepared import Prepared
from cacheslide_agents.engine.run.request import Output
from cacheslide_agents.engine.run.scheduler import InterruptedStepError
from cacheslide_agents.engine.run.sequence import RunningSequence
from cacheslide_agents.engine.slide.block_table import BlockTable
from tests.reference.complex_rope import rotate_directly
from tests.reference.dense_attention import dense_attention, dense_lse
from tests.reference.dense_pass import DensePass

Asked = dict[int, tuple[Tensor, Tensor]]
"""By probe layer: queries (tokens, heads, head_dim) and their log-sum-exps (tokens, heads)."""


@dataclass
class _Held:
    """What a cached sequence held before a turn: K and V (layers, tokens, 2 * kv_heads, head_dim) and beside them."""

    token_ids: np.ndarray
    kv: Tensor
    asked: Asked
    positions: np.ndarray
    hops: np.ndarray
    query_positions: np.ndarray
    staleness: np.ndarray


def _last_place(positions: np.ndarray) -> int:
    """The last token's place among its pages' slots: gaps in the positions leave slots out, but no whole page."""
    place = 0
    for before, position in pairwise(positions.tolist()):
        place += 1 + (position - before - 1) % PAGE_TOKENS
    return place


def _same_before(sequence: RunningSequence, donor: _Held, span: Span) -> bool:
    """Whether all tokens before a reused span, and its first one, are the donor's in their places."""
    stop = span.start + 1
    return (
        span.start == span.source_start
        and np.array_equal(sequence.token_ids[:stop], donor.token_ids[:stop])
        and np.array_equal(sequence.positions[:stop], donor.positions[:stop])
    )


class WatchedEngine:
    """An idle engine in float32 with one caller, whose turns are checked token by token."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._runner: Any = engine._runner
        self._plan: Plan | None = None
        self._computed: tuple[RunningSequence, Tensor, Asked] | None = None
        preparation = self._runner.preparation
        prefill, remember = preparation.prefill, self._runner._remember

        def noting_prefill(prepared: Prepared, *args: Any, **kwargs: Any) -> Tensor:
            logits: Tensor = prefill(prepared, *args, **kwargs)
            self._plan = prepared.plan
            return logits

        def noting_remember(request: Any, header: Any, sequence: RunningSequence, answer: Any) -> Any:
            table, num_tokens = sequence.table, sequence.num_tokens
            self._computed = (sequence, self._kv(table, num_tokens), self._asked(table, num_tokens))
            return remember(request, header, sequence, answer)

        for owner, name, noting in (
            (preparation, "prefill", noting_prefill),
            (self._runner, "_remember", noting_remember),
        ):
            setattr(owner, name, noting)

    def turn(self, prompt: Prompt, params: SamplingParams, **call: Any) -> Output:
        """A turn, everything about it checked."""
        before = {each.id: self._held(each) for each in self._sequences()}
        self.poison()
        output = self.engine.generate(prompt, params, **call)
        self._check_receipt(output)
        self._check_computed(before)
        self._check_answer(output)
        self.check_kept(before)
        self.check_pages()
        return output

    def logits(self, prompt: Prompt, continuation: str, **call: Any) -> Tensor:
        """Logits by a policy; checks that nothing cached changed, except that donors may have been evicted."""
        before = {each.id: self._held(each) for each in self._sequences()}
        self.poison()
        logits = self.engine.logits(prompt, continuation, **call)
        assert logits.isfinite().all(), "unwritten slots were read"
        assert {each.id for each in self._sequences()} <= set(before), "a comparison was stored"
        self.check_kept(before)
        self.check_pages()
        return logits

    def repair(self, max_steps: int, stop_after_layers: int | None = None) -> int:
        """Steps of repair, everything about them checked; returns how many were done.

        Args:
            max_steps: At most so many.
            stop_after_layers: If given, each step is first stopped after that many layers, which must leave no trace.
        """
        for number in range(max_steps):
            if stop_after_layers is not None:
                self._step_of_repair(stop_after_layers)
            if not self._step_of_repair(None):
                return number
        return max_steps

    def _step_of_repair(self, stop_after_layers: int | None) -> bool:
        sequences = {each.id: each for each in self._sequences()}
        before = {each.id: self._held(each) for each in sequences.values()}
        exact = {each.id: each.exact_tokens for each in sequences.values()}
        tables = {each.id: list(each.table.pages) for each in sequences.values()}
        self.poison()
        layers = iter(range(stop_after_layers if stop_after_layers is not None else 10**6))

        def check() -> None:
            if next(layers, None) is None:
                raise InterruptedStepError

        goes_on: bool = self.engine._scheduler.call(lambda: self._runner.idle_work.repair.step(check))
        changed = {
            each
            for each, sequence in sequences.items()
            if (tables[each], exact[each]) != (sequence.table.pages, sequence.exact_tokens)
        }
        assert len(changed) == (goes_on and stop_after_layers is None), "one sequence is repaired at a time"
        for each in changed:
            self._check_repaired(sequences[each], before.pop(each), exact[each])
        for sequence_id, held in before.items():
            sequence = sequences[sequence_id]
            for name in ("hops", "query_positions", "staleness"):
                assert np.array_equal(getattr(sequence, name), getattr(held, name)), f"{name} changed"
        self.check_kept(before)
        for sequence_id in before.keys() - {each.id for each in self._sequences()}:
            assert self._is_superfluous(sequences[sequence_id]), "a sequence is gone that nothing else holds"
        self.check_pages()
        return goes_on

    def _check_repaired(self, sequence: CachedSequence, held: _Held, exact_tokens: int) -> None:
        """What a step computed is what its layer gives over the rest, and the rest is as it was, be it elsewhere."""
        if sequence.id not in {each.id for each in self._sequences()}:
            assert self._is_superfluous(sequence)
            return
        num_tokens = len(sequence)
        kv, asked = self._kv(sequence.table, num_tokens), self._asked(sequence.table, num_tokens)
        assert kv.isfinite().all(), "unwritten slots were read"
        assert sequence.exact_tokens >= exact_tokens
        settled = (sequence.hops == 0) & (sequence.query_positions == sequence.positions) & (sequence.staleness == 0.0)
        assert settled[: sequence.exact_tokens].all()
        differs = (kv != held.kv).flatten(2).any(-1).any(0).numpy()
        differs |= sequence.staleness != held.staleness
        differs[exact_tokens : sequence.exact_tokens] = True
        computed = np.flatnonzero(differs)
        assert len(computed) and computed[0] >= exact_tokens and settled[computed].all()
        for layer_idx, stored in asked.items():
            for own, theirs in zip(stored, held.asked[layer_idx], strict=True):
                assert torch.equal(own[torch.from_numpy(~differs)], theirs[torch.from_numpy(~differs)])
        self._check_active(sequence, kv, asked, computed)
        if sequence.exact_tokens:
            dense = DensePass(
                self._runner._decoder,
                sequence.token_ids[: sequence.exact_tokens],
                sequence.positions[: sequence.exact_tokens],
            )
            torch.testing.assert_close(kv[:, : sequence.exact_tokens], dense.kv, atol=1e-4, rtol=1e-4)

    def _is_superfluous(self, gone: CachedSequence) -> bool:
        return any(
            (each.space, each.session) == (gone.space, gone.session)
            and np.array_equal(each.token_ids[: len(gone)], gone.token_ids)
            and np.array_equal(each.positions[: len(gone)], gone.positions)
            and each.exact_tokens >= gone.exact_tokens
            and each.staleness[: len(gone)].sum() <= gone.staleness.sum()
            for each in self._sequences()
        )

    @property
    def corrected_all(self) -> bool:
        """Whether the last call corrected everything that slid."""
        assert self._plan is not None
        return bool(np.array_equal(self._plan.corrected, self._plan.slid_tokens()))

    @property
    def had_room(self) -> bool:
        """Whether the pool holds the last call's donors, its prompt and a copy of each page of that."""
        assert self._plan is not None
        donors = {span.source for span in self._plan.spans if span.source is not None}
        pages = [page for donor in donors for page in self._runner.preparation.index.get(donor).table.pages]
        own = _last_place(self._plan.positions) // PAGE_TOKENS + 1
        return len(pages) + 2 * own <= int(self._runner.preparation.pool.num_pages)

    def poison(self) -> None:
        """Fills with NaN what no sequence has written."""
        pool = self._runner.preparation.pool
        owned = np.zeros(pool.kv.shape[1], dtype=np.bool_)
        for sequence in self._sequences():
            owned[sequence.table.slots(np.arange(len(sequence)))] = True
        unowned, queries = torch.from_numpy(np.flatnonzero(~owned)), self._runner.preparation.queries
        for stored in (pool.kv, queries._scales, queries._lse):
            stored[:, unowned] = torch.nan

    def check_kept(self, before: dict[int, _Held]) -> None:
        """Sequences of earlier turns hold what they held."""
        for sequence in self._sequences():
            if sequence.id in before:
                held = before[sequence.id]
                assert torch.equal(self._kv(sequence.table, len(sequence)), held.kv), "a page was written"
                for layer_idx, asked in self._asked(sequence.table, len(sequence)).items():
                    assert all(map(torch.equal, asked, held.asked[layer_idx])), "a stored query was written"

    def check_pages(self) -> None:
        """Every page has as many owners as sequences hold it; the others are free."""
        pool = self._runner.preparation.pool
        owners = Counter(page for sequence in self._sequences() for page in sequence.table.pages)
        assert pool.references(range(pool.num_pages)).tolist() == [owners[page] for page in range(pool.num_pages)]
        assert self.engine.stats().free_pages == pool.num_pages - len(owners)
        for sequence in self._sequences():
            assert sequence.pins == 0
            assert len(sequence.table.pages) == _last_place(sequence.positions) // PAGE_TOKENS + 1

    def _check_receipt(self, output: Output) -> None:
        receipt, plan = output.receipt, self._plan
        assert plan is not None
        assert_valid(plan)
        counts = Counter[str]()
        place = 0
        for start, stop, treatment in receipt.treatments:
            assert start == place < stop
            counts[treatment] += stop - start
            place = stop
        assert place == receipt.prompt_tokens == plan.num_tokens
        assert counts["exact"] == receipt.exact_tokens
        assert counts["corrected"] == receipt.corrected_tokens
        assert counts["slid"] + counts["corrected"] == receipt.slid_tokens
        assert counts["fresh"] == receipt.fresh_tokens
        assert receipt.cache_read_tokens + receipt.computed_tokens == receipt.prompt_tokens
        assert self._computed is not None
        owed = self._computed[0].staleness[plan.slid_tokens()]
        if receipt.staleness is None:  # not measured
            assert not receipt.is_exact and not isinstance(plan.correction, ByStaleness)
        else:
            assert abs(receipt.staleness - (owed.mean() if len(owed) else 0.0)) < 1e-6
        assert receipt.generated_tokens == len(output.token_ids)
        used = receipt.prompt_tokens + receipt.unused_positions + len(output.token_ids)
        assert output.token_ids and used <= self.engine.context_tokens
        assert receipt.unused_positions == plan.positions[-1] + 1 - plan.num_tokens
        assert receipt.positions == "learned" or receipt.unused_positions == 0

    def _check_computed(self, before: dict[int, _Held]) -> None:
        assert self._computed is not None and self._plan is not None
        (sequence, kv, asked), plan = self._computed, self._plan
        assert kv.isfinite().all(), "unwritten slots were read"
        kv_heads = kv.shape[2] // 2
        rope = self._runner._decoder.spec.rope
        corrected = np.zeros(len(kv[0]), dtype=np.bool_)
        corrected[plan.corrected] = True
        active = np.ones(len(kv[0]), dtype=np.bool_)
        stale = np.zeros(len(kv[0]), dtype=np.bool_)
        assert (sequence.staleness >= 0.0).all() and (sequence.staleness <= 1.0).all()
        for span in plan.spans:
            if span.source is None or span.source_start is None:
                continue
            donor = before[span.source]
            kept = np.arange(span.start, span.stop)[~corrected[span.start : span.stop]]
            source = kept - span.start + span.source_start
            active[kept] = False
            moved = sequence.positions[kept] - donor.positions[source]
            hops = donor.hops[source] + (moved != 0)
            assert (sequence.hops[kept] == hops).all() and (hops <= self.engine.config.max_hops).all()
            for layer_idx, stored in asked.items():
                for own, theirs in zip(stored, donor.asked[layer_idx], strict=True):
                    assert torch.equal(own[kept], theirs[source]), f"queries of {span}"
            assert (sequence.query_positions[kept] == donor.query_positions[source]).all()
            if span.treatment == "slid" and isinstance(plan.correction, ByStaleness):
                assert (sequence.staleness[kept] >= donor.staleness[source]).all(), "a debt was forgotten"
            elif span.treatment == "slid" and not _same_before(sequence, donor, span):
                assert (sequence.staleness[kept] == 1.0).all(), "what nobody measured counts as fresh"
            else:
                assert (sequence.staleness[kept] == donor.staleness[source]).all()
            stale[kept] = span.treatment == "slid"
            assert torch.equal(kv[:, kept, kv_heads:], donor.kv[:, source, kv_heads:]), f"values of {span}"
            if span.treatment == "exact":
                assert not moved.any() and torch.equal(kv[:, kept], donor.kv[:, source]), f"keys of {span}"
            turns = torch.from_numpy(moved).repeat(len(kv))
            keys = rotate_directly(donor.kv[:, source, :kv_heads].flatten(0, 1), turns, rope.inv_freq, 1.0)
            torch.testing.assert_close(kv[:, kept, :kv_heads].flatten(0, 1).double(), keys, atol=1e-4, rtol=1e-4)
        assert (sequence.hops[active] == 0).all()
        assert (sequence.query_positions[active] == sequence.positions[active]).all()
        assert not sequence.staleness[~stale].any(), "exact, fresh and corrected tokens owe nothing"
        self._check_active(sequence, kv, asked, np.flatnonzero(active))
        untainted = sequence.exact_tokens
        if untainted:
            own = torch.full_like(kv[:, :untainted], torch.nan)
            self._walk(sequence, own, np.arange(untainted), store=True)
            torch.testing.assert_close(kv[:, :untainted], own, atol=1e-3, rtol=1e-3)

    def _check_active(
        self, sequence: RunningSequence | CachedSequence, kv: Tensor, asked: Asked, tokens: np.ndarray
    ) -> None:
        stored = kv.clone()
        computed = self._walk(sequence, stored, tokens, store=False)
        torch.testing.assert_close(kv[:, torch.from_numpy(tokens)], computed, atol=1e-3, rtol=1e-3)
        for layer_idx, (queries, lse) in asked.items():
            query, sums = self._last_asked[layer_idx]
            error = (queries[torch.from_numpy(tokens)] - query).abs()
            assert (error <= query.abs().amax(-1, keepdim=True) * 0.51 / 127 + 1e-3).all(), "eight bits are kept"
            torch.testing.assert_close(lse[torch.from_numpy(tokens)], sums.float(), atol=1e-3, rtol=1e-3)

    @torch.inference_mode()
    def _walk(
        self, sequence: RunningSequence | CachedSequence, kv: Tensor, tokens: np.ndarray, *, store: bool
    ) -> Tensor:
        """K and V of some tokens over `kv` (layers, tokens, ...), which receives them layer by layer if `store`."""
        decoder = self._runner._decoder
        hidden = decoder.embed(torch.from_numpy(sequence.token_ids[tokens]))
        rotary = decoder.rotary(torch.from_numpy(sequence.positions[tokens]))
        in_order = BlockTable(range(-(-kv.shape[1] // PAGE_TOKENS)))
        layers = []
        self._last_asked: Asked = {}
        for layer_idx in range(decoder.spec.num_layers):
            query, own = decoder.project(layer_idx, hidden, rotary)
            layers.append(own.clone())
            if store:
                kv[layer_idx, torch.from_numpy(tokens)] = own
            window = decoder.spec.windows[layer_idx]
            scale = decoder.spec.attention_scale
            attended = dense_attention(query, kv[layer_idx], in_order, tokens, scale, window)
            if self._runner.preparation.queries.wants(layer_idx):
                lse = dense_lse(query, kv[layer_idx], in_order, tokens, scale, window)
                self._last_asked[layer_idx] = (query.clone(), lse)
            hidden = decoder.finish(layer_idx, hidden, attended.to(hidden.dtype))
        self._last_hidden = hidden
        return torch.stack(layers)

    def _check_answer(self, output: Output) -> None:
        """Greedy answers: each token is the best one after the stored K and V (up to rounding)."""
        assert self._computed is not None
        sequence, kv, _ = self._computed
        num_prompt = output.receipt.prompt_tokens
        tokens = np.arange(num_prompt - 1, sequence.num_tokens)
        assert sequence.token_ids[num_prompt:].tolist() == list(output.token_ids[: len(tokens) - 1])
        self._walk(sequence, kv.clone(), tokens, store=False)
        with torch.inference_mode():
            logits = self._runner._decoder.logits(self._last_hidden)
        chosen = logits[torch.arange(len(tokens)), torch.tensor(output.token_ids)]
        assert (logits.amax(-1) - chosen < 1e-2).all(), "not the greedy answer"

    def _held(self, sequence: CachedSequence) -> _Held:
        return _Held(
            token_ids=sequence.token_ids.copy(),
            kv=self._kv(sequence.table, len(sequence)),
            asked=self._asked(sequence.table, len(sequence)),
            positions=sequence.positions.copy(),
            hops=sequence.hops.astype(np.int64),
            query_positions=sequence.query_positions.copy(),
            staleness=sequence.staleness.copy(),
        )

    def _asked(self, table: BlockTable, num_tokens: int) -> Asked:
        queries, slots = self._runner.preparation.queries, torch.from_numpy(table.slots(np.arange(num_tokens)))
        assert queries.layers, "a model under test stores queries"
        return {layer_idx: queries.read(layer_idx, slots) for layer_idx in queries.layers}

    def _kv(self, table: Any, num_tokens: int) -> Tensor:
        pool: Tensor = self._runner.preparation.pool.kv
        return pool[:, torch.from_numpy(table.slots(np.arange(num_tokens)))].clone()

    def _sequences(self) -> list[CachedSequence]:
        return list(self._runner.preparation.index._sequences.values())
