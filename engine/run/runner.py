"""Takes one request through the engine: tokens, plan, pages, prefill, decode, index."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..config import SamplingParams
from ..receipt import Receipt
from ..reuse.index import CachedSequence
from ..reuse.plan import treatments
from ..reuse.policies import policy_named
from ..reuse.rules import ByStaleness
from ..stats import EngineStats
from ..tokenization import TextPiece
from .decode import Answer, decode
from .detokenize import Detokenizer
from .idle_work import IdleWork
from .preparation import Preparation
from .prepared import Prepared
from .registration import register
from .request import Request
from .sampling import Sampler
from .sequence import RunningSequence
from .stop import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Runner:
    """Everything that a request needs, on one thread.

    Attributes:
        preparation: What is cached, and the way from a prompt to its logits.
        idle_work: What is done while nobody asks.
    """

    def __init__(self, preparation: Preparation, tokenizer: PreTrainedTokenizerBase) -> None:
        self._decoder = preparation.forward.decoder
        self._tokenizer = tokenizer
        self._pool = preparation.pool
        self._forward = preparation.forward
        self.preparation = preparation
        self.idle_work = IdleWork(preparation)
        self._totals: dict[str, int] = defaultdict(int)

    @torch.inference_mode()
    def serve(self, request: Request) -> None:
        """Answers one request through its `emit`; an error goes there too, and leaves no page behind."""
        try:
            prepared = self._serve(request)
        except BaseException as error:
            request.emit(error)
        else:
            self._register(request, prepared)
        self.preparation.positions.save_if_due()

    def _register(self, request: Request, prepared: Prepared) -> None:
        """Caches an answered prompt's segments alone, if its policy reuses such."""
        isolation = policy_named(request.call.policy).isolation
        if isolation is not None and request.store:
            register(self.preparation, prepared, isolation, request.check)

    def _serve(self, request: Request) -> Prepared:
        request.check()
        self.idle_work.begin_request()
        started = time.perf_counter()
        call = request.call
        prepared = self.preparation.prepare(
            call, refused=self.idle_work.refusal(call), answer_tokens=request.params.max_tokens
        )
        room = self.preparation.context_tokens - int(prepared.plan.positions[-1]) - 1
        sequence = RunningSequence(prepared.token_ids, prepared.plan, prepared.assembly)
        try:
            logits = self.preparation.prefill(prepared, wanted=1, check=request.check)
            receipt = replace(_receipt(prepared), queue_seconds=started - request.submitted_at)
            answer = Answer()
            pieces = decode(
                answer,
                logits,
                lambda token_id: self._step(sequence, token_id),
                sampler=Sampler(request.params, prepared.token_ids, self._decoder.device),
                detokenizer=Detokenizer(self._tokenizer),
                stop_strings=StopStrings(request.params.stop),
                stop_token_ids=self._stop_token_ids(request.params),
                max_tokens=min(request.params.max_tokens or room, room),
                check=request.check,
            )
            for piece in pieces:
                if not receipt.ttft_seconds:
                    receipt = replace(receipt, ttft_seconds=time.perf_counter() - started)
                if piece.finish_reason is None:
                    request.emit(piece)
            receipt = replace(
                receipt,
                generated_tokens=len(answer.token_ids),
                finish_reason=answer.finish_reason,
                total_seconds=time.perf_counter() - started,
            )
        except BaseException:
            self._pool.release(prepared.assembly.table.pages)
            raise
        if request.store:
            self.preparation.positions.settle(prepared.asked.placement, call.space, call.session)
            kept = self._remember(request, prepared.header, sequence, answer)
            if kept is not None and kept.table.pages == sequence.table.pages[: len(kept.table.pages)]:
                self.idle_work.end_request(prepared, logits, kept)
        else:
            self._pool.release(sequence.table.pages)
        self._count(receipt)
        request.emit(replace(piece, receipt=receipt))
        return prepared

    def forget(self, namespace: str, session: str | None) -> None:
        """Drops everything cached for a session, or for calls without one, whatever the template."""
        index = self.preparation.index
        for space in index.spaces(namespace):
            index.forget_session(space, session)
        if session is not None:
            self.preparation.replies.forget(namespace, session)
            self.preparation.positions.forget(namespace, session)

    def stats(self, model_name: str, waiting_requests: int) -> EngineStats:
        """What is held and has been done, between two requests or in the middle of one; safe from any thread.

        Args:
            model_name: The model's, for people.
            waiting_requests: Calls in the queue.
        """
        cached, idle_work = self.preparation.index.stats(), self.idle_work
        return EngineStats(
            model=model_name,
            device=str(self._decoder.device),
            dtype=str(self._decoder.dtype).removeprefix("torch."),
            context_tokens=self.preparation.context_tokens,
            pool_pages=self._pool.num_pages,
            free_pages=self._pool.num_free,
            cached_sequences=cached.sequences,
            cached_tokens=cached.tokens,
            exact_cached_tokens=cached.tokens - cached.tainted_tokens,
            evicted_sequences=cached.evicted_sequences,
            waiting_requests=waiting_requests,
            repaired_tokens=idle_work.repair.tokens,
            repair_seconds=idle_work.repair.seconds,
            interrupted_repairs=idle_work.repair.interrupted_steps,
            shadow_runs=idle_work.shadow.measured,
            dropped_shadow_runs=idle_work.shadow.dropped,
            gates=idle_work.gate.states(),
            **self._totals,
        )

    def _step(self, sequence: RunningSequence, token_id: int) -> Tensor:
        """Computes one generated token; the logits after it are (1, vocab) float32."""
        token, position = sequence.append(token_id)
        table = sequence.table
        if token >= table.capacity_tokens:
            table.pages += self.preparation.allocate(1, table.pages[-1])
        logits = self._forward.rows(np.array([token_id]), np.array([position]), np.array([token]), table, wanted=1)
        assert logits is not None
        return logits

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        own = set() if params.ignore_eos else {*self._decoder.spec.stop_token_ids, self._tokenizer.eos_token_id}
        return frozenset(own - {None} | set(params.stop_token_ids))

    def _remember(
        self, request: Request, header: TextPiece, sequence: RunningSequence, answer: Answer
    ) -> CachedSequence | None:
        """Indexes the answered sequence and the reply's sampled ids; returns what holds the sequence now, if any."""
        call, kept = request.call, None
        if policy_named(call.policy).isolation is None:
            kept = self.preparation.index.add(
                space=call.space,
                session=call.session,
                token_ids=sequence.token_ids,
                positions=sequence.positions,
                exact_tokens=sequence.exact_tokens,
                hops=sequence.hops,
                query_positions=sequence.query_positions,
                staleness=sequence.staleness,
                table=sequence.table,
            )
        else:  # its K and V were not computed in context: no donor for anybody
            self._pool.release(sequence.table.pages)
        self._remember_reply(request, header, answer)
        return kept

    def _remember_reply(self, request: Request, header: TextPiece, answer: Answer) -> None:
        """Notes the sampled ids of the reply, if they spell exactly its text."""
        reply_ids = answer.token_ids
        if reply_ids[-1] in self._stop_token_ids(request.params):
            reply_ids = reply_ids[:-1]
        if request.call.session is None or not answer.text:
            return
        text = self._tokenizer.decode(reply_ids, skip_special_tokens=True)
        while len(text) > len(answer.text):  # a stop string cut the answer short
            reply_ids = reply_ids[:-1]
            text = self._tokenizer.decode(reply_ids, skip_special_tokens=True)
        if text != answer.text:
            return  # cut inside a token
        book = self.preparation.replies.book(request.call.space, request.call.session)
        canonical = self._tokenizer.encode(header.text + answer.text, add_special_tokens=False)
        book.remember(header.text, header.ids, answer.text, np.asarray(reply_ids), np.asarray(canonical))

    def _count(self, receipt: Receipt) -> None:
        self._totals["requests"] += 1
        self._totals["fallbacks"] += receipt.fallback is not None
        for name in ("prompt", "exact", "slid", "corrected", "fresh", "generated"):
            self._totals[f"{name}_tokens"] += getattr(receipt, f"{name}_tokens")


def _receipt(prepared: Prepared) -> Receipt:
    plan, placement = prepared.plan, prepared.asked.placement
    counts = dict.fromkeys(("exact", "slid", "fresh"), 0)
    for span in plan.spans:
        counts[span.treatment] += len(span)
    return Receipt(
        policy=plan.policy,
        fallback=plan.fallback,
        prompt_tokens=plan.num_tokens,
        exact_tokens=counts["exact"],
        slid_tokens=counts["slid"],
        corrected_tokens=len(plan.corrected),
        fresh_tokens=counts["fresh"],
        staleness=_staleness(prepared),
        computed_share=prepared.computed_share,
        plan_seconds=prepared.plan_seconds,
        session=prepared.asked.call.session,
        treatments=treatments(plan),
        positions=placement.kind,
        positions_reason=placement.reason,
        unused_positions=int(plan.positions[-1]) + 1 - plan.num_tokens,
    )


def _staleness(prepared: Prepared) -> float | None:
    """What the slid tokens are left with in the mean; None where that is not known."""
    plan, staleness = prepared.plan, prepared.assembly.staleness
    slid, rule = plan.slid_tokens(), plan.correction
    if not len(slid):
        return 0.0
    if isinstance(rule, ByStaleness):
        return float(staleness[slid].mean())
    replaced = rule is None or rule.is_complete
    return 0.0 if replaced and len(plan.corrected) == len(slid) else None
