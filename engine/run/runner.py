"""Takes one request through the engine: tokens, plan, pages, prefill, decode, index."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..attention.interface import Attention
from ..config import EngineConfig, PolicyName, SamplingParams
from ..model.decoder import Decoder
from ..position.profile_file import ProfileBook
from ..receipt import Receipt
from ..reuse.index import CachedSequence, SpaceKey
from ..reuse.plan import treatments
from ..reuse.policies import policy_named
from ..reuse.spans import Plan
from ..segments import Prompt
from ..slide.pages import PagePool
from ..slide.queries import StoredQueries
from ..tokenization import TextPiece
from .decode import Answer, decode
from .detokenize import Detokenizer
from .drift import Drift, measure
from .forward import Forward
from .idle_work import IdleWork
from .preparation import Preparation, Prepared, space_of
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
        totals: Tokens by treatment, requests and fallbacks since the start.
    """

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        pool: PagePool,
        queries: StoredQueries,
        attention: Attention,
        context_tokens: int,
        profiles: ProfileBook | None = None,
    ) -> None:
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._pool = pool
        self._forward = Forward(decoder, pool, queries, attention)
        self.preparation = Preparation(
            config, decoder, tokenizer, pool, queries, self._forward, context_tokens, profiles
        )
        self.idle_work = IdleWork(config, self.preparation, decoder.device.type)
        self.totals: dict[str, int] = defaultdict(int)

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
        isolation = policy_named(request.policy).isolation
        if isolation is not None and request.store:
            space = space_of(request.policy, prepared.asked.space)
            register(self.preparation, prepared, space, request.session, isolation, request.check)

    def _serve(self, request: Request) -> Prepared:
        request.check()
        self.idle_work.begin_request()
        started = time.perf_counter()
        refused = self.idle_work.refusal(SpaceKey(request.namespace, request.prompt.template), request.policy)
        prepared = self.preparation.prepare(
            request.prompt,
            request.session,
            request.namespace,
            request.policy,
            refused=refused,
            answer_tokens=request.params.max_tokens,
        )
        room = self.preparation.context_tokens - int(prepared.plan.positions[-1]) - 1
        sequence = RunningSequence(prepared.token_ids, prepared.plan, prepared.assembly)
        try:
            logits = self.preparation.prefill(prepared, wanted=1, check=request.check)
            receipt = replace(
                _receipt(prepared),
                session=request.session,
                queue_seconds=started - request.submitted_at,
                plan_seconds=prepared.plan_seconds,
                computed_share=prepared.computed_share,
            )
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
            asked = prepared.asked
            self.preparation.positions.settle(asked.placement, asked.space, asked.session)
            kept = self._remember(request, prepared.header, sequence, answer)
            if kept is not None and kept.table.pages == sequence.table.pages[: len(kept.table.pages)]:
                self.idle_work.end_request(prepared, logits, kept)
        else:
            self._pool.release(sequence.table.pages)
        self._count(receipt)
        request.emit(replace(piece, receipt=receipt))
        return prepared

    @torch.inference_mode()
    def logits(
        self, prompt: Prompt, continuation: np.ndarray, session: str | None, namespace: str, policy: PolicyName
    ) -> Tensor:
        """The logits before each token of a continuation; nothing is stored.

        Args:
            prompt: What stands before the continuation.
            continuation: (tokens,) int64, at least one.
            session: Whose earlier turns may be slid.
            namespace: The tenant.
            policy: How reuse is decided.

        Returns:
            (tokens of the continuation, vocab) float32, on the model's device.

        Raises:
            PromptError: A token id is not the model's.
            ContextLengthError: Prompt and continuation do not fit.
        """
        self.preparation.check_ids(continuation)
        prepared = self.preparation.prepare(prompt, session, namespace, policy, continuation[:-1])
        try:
            return self.preparation.prefill(prepared, wanted=len(continuation))
        finally:
            self._pool.release(prepared.assembly.table.pages)

    @torch.inference_mode()
    def keys_values(self, prompt: Prompt, session: str | None, namespace: str, policy: PolicyName) -> Tensor:
        """K and V of a prompt's tokens as a policy would leave them; nothing is stored.

        Returns:
            (layers, tokens, 2 * kv_heads, head_dim), the pool's dtype: keys, rotated at the prompt's positions, before
            values. A copy, on the model's device.

        Raises:
            PromptError: A token id is not the model's.
            ContextLengthError: The prompt does not fit.
        """
        _, _, kv = self._copied(prompt, session, namespace, policy, lambda plan: np.arange(plan.num_tokens))
        return kv

    @torch.inference_mode()
    def drift(self, prompt: Prompt, session: str | None, namespace: str, policy: PolicyName) -> Drift:
        """How far a prompt under a policy is from its full prefill; nothing is stored.

        Raises:
            PromptError: A token id is not the model's.
            ContextLengthError: The prompt does not fit.
        """
        slid, reused_logits, reused_kv = self._copied(prompt, session, namespace, policy, Plan.slid_tokens)
        _, full_logits, full_kv = self._copied(prompt, session, namespace, "recompute", lambda _: slid)
        return measure(reused_kv, full_kv, reused_logits, full_logits)

    def _copied(
        self,
        prompt: Prompt,
        session: str | None,
        namespace: str,
        policy: PolicyName,
        wanted: Callable[[Plan], np.ndarray],
    ) -> tuple[np.ndarray, Tensor, Tensor]:
        """Computes a prompt and copies K and V of the wanted tokens out of its pages, which are given back.

        Returns:
            The tokens (n,) int64, the logits (vocab,) behind the prompt, and K and V
            (layers, n, 2 * kv_heads, head_dim).
        """
        prepared = self.preparation.prepare(prompt, session, namespace, policy)
        table = prepared.assembly.table
        try:
            logits = self.preparation.prefill(prepared, wanted=1)[-1]
            tokens = wanted(prepared.plan)
            slots = torch.from_numpy(table.slots(tokens)).to(self._pool.kv.device)
            return tokens, logits, self._pool.kv.index_select(1, slots)
        finally:
            self._pool.release(table.pages)

    def forget(self, namespace: str, session: str | None) -> None:
        """Drops everything cached for a session, or for calls without one, whatever the template."""
        index = self.preparation.index
        for space in index.spaces(namespace):
            index.forget_session(space, session)
        if session is not None:
            self.preparation.replies.forget(namespace, session)
            self.preparation.positions.forget(namespace, session)

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
        space = SpaceKey(request.namespace, request.prompt.template)
        kept = None
        if policy_named(request.policy).isolation is None:
            kept = self.preparation.index.add(
                space=space,
                session=request.session,
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
        self._remember_reply(request, space, header, answer)
        return kept

    def _remember_reply(self, request: Request, space: SpaceKey, header: TextPiece, answer: Answer) -> None:
        """Notes the sampled ids of the reply, if they spell exactly its text."""
        reply_ids = answer.token_ids
        if reply_ids[-1] in self._stop_token_ids(request.params):
            reply_ids = reply_ids[:-1]
        if request.session is None or not answer.text:
            return
        text = self._tokenizer.decode(reply_ids, skip_special_tokens=True)
        while len(text) > len(answer.text):  # a stop string cut the answer short
            reply_ids = reply_ids[:-1]
            text = self._tokenizer.decode(reply_ids, skip_special_tokens=True)
        if text != answer.text:
            return  # cut inside a token
        book = self.preparation.replies.book(space, request.session)
        canonical = self._tokenizer.encode(header.text + answer.text, add_special_tokens=False)
        book.remember(header.text, header.ids, answer.text, np.asarray(reply_ids), np.asarray(canonical))

    def _count(self, receipt: Receipt) -> None:
        self.totals["requests"] += 1
        self.totals["fallbacks"] += receipt.fallback is not None
        for name in ("prompt", "exact", "slid", "corrected", "fresh", "generated"):
            self.totals[f"{name}_tokens"] += getattr(receipt, f"{name}_tokens")


def _receipt(prepared: Prepared) -> Receipt:
    plan, placement, staleness = prepared.plan, prepared.asked.placement, prepared.assembly.staleness
    slid = plan.slid_tokens()
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
        staleness=float(staleness[slid].mean()) if len(slid) else 0.0,
        treatments=treatments(plan),
        positions=placement.kind,
        positions_reason=placement.reason,
        unused_positions=int(plan.positions[-1]) + 1 - plan.num_tokens,
    )
