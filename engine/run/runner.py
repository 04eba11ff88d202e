"""Takes one request through the engine: tokens, plan, pages, prefill, decode, index."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..attention.interface import Attention
from ..config import EngineConfig, PolicyName, SamplingParams
from ..errors import ContextLengthError, PromptError
from ..model.decoder import Decoder
from ..receipt import Receipt
from ..reuse.index import CacheIndex, SpaceKey
from ..reuse.plan import PlanRequest, treatments
from ..reuse.plan import plan as make_plan
from ..reuse.replies import ReplyBooks
from ..reuse.spans import Plan
from ..segments import EncodedPrompt, Prompt
from ..slide.assembly import Assembly
from ..slide.pages import PagePool, PoolFullError
from ..slide.queries import StoredQueries
from ..tokenization import TextPiece, encode_with_last_piece
from .correction import Correction
from .decode import Answer, decode
from .detokenize import Detokenizer
from .forward import Forward
from .prefill import prefill
from .request import Request
from .sampling import Sampler
from .sequence import RunningSequence
from .stop import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Runner:
    """Everything that a request needs, on one thread.

    Attributes:
        pool: The KV pages.
        index: What is cached in them.
        context_tokens: Longest prompt plus answer.
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
    ) -> None:
        self._config = config
        self._decoder = decoder
        self._tokenizer = tokenizer
        self.pool = pool
        self.index = CacheIndex(pool)
        self.context_tokens = context_tokens
        self.totals: dict[str, int] = defaultdict(int)
        self._replies = ReplyBooks()
        self._queries = queries
        self._forward = Forward(decoder, pool, queries, attention)

    @torch.inference_mode()
    def serve(self, request: Request) -> None:
        """Answers one request through its `emit`; an error goes there too, and leaves no page behind."""
        try:
            self._serve(request)
        except BaseException as error:
            request.emit(error)

    def _serve(self, request: Request) -> None:
        request.check()
        started = time.perf_counter()
        space = SpaceKey(request.namespace, request.prompt.template)
        encoded, header = self._encode(request.prompt, space, request.session)
        room = self.context_tokens - len(encoded)
        planning = time.perf_counter()
        plan, assembly = self._assemble(encoded, space, request.session, request.policy)
        plan_seconds = time.perf_counter() - planning
        sequence = RunningSequence(encoded.token_ids, plan, assembly)
        try:
            plan, logits = self._prefill(encoded.token_ids, plan, assembly, wanted=1, check=request.check)
            receipt = replace(
                _receipt(plan, assembly.staleness),
                session=request.session,
                queue_seconds=started - request.submitted_at,
                plan_seconds=plan_seconds,
            )
            answer = Answer()
            pieces = decode(
                answer,
                logits,
                lambda token_id: self._step(sequence, token_id),
                sampler=Sampler(request.params, encoded.token_ids, self._decoder.device),
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
            self.pool.release(assembly.table.pages)
            raise
        self._remember(request, space, header, sequence, answer)
        self._count(receipt)
        request.emit(replace(piece, receipt=receipt))

    @torch.inference_mode()
    def logits(
        self, prompt: Prompt, continuation: np.ndarray, session: str | None, namespace: str, policy: PolicyName
    ) -> torch.Tensor:
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
        space = SpaceKey(namespace, prompt.template)
        encoded, _ = self._encode(prompt, space, session)
        token_ids = np.concatenate([encoded.token_ids, continuation[:-1]])
        self._check_ids(continuation)
        if len(token_ids) >= self.context_tokens:
            raise ContextLengthError(len(token_ids), self.context_tokens, "shorten the prompt or the continuation")
        plan, assembly = self._assemble(encoded, space, session, policy, extra_tokens=len(continuation) - 1)
        try:
            _, logits = self._prefill(token_ids, plan, assembly, wanted=len(continuation))
            return logits
        finally:
            self.pool.release(assembly.table.pages)

    def forget(self, namespace: str, session: str | None) -> None:
        """Drops everything cached for a session, or for calls without one, whatever the template."""
        for space in self.index.spaces(namespace):
            self.index.forget_session(space, session)
        if session is not None:
            self._replies.forget(namespace, session)

    def _encode(self, prompt: Prompt, space: SpaceKey, session: str | None) -> tuple[EncodedPrompt, TextPiece]:
        """The prompt's ids, and its text after the last control token, which the answer continues."""
        replies = self._replies.book(space, session)
        encoded, header = encode_with_last_piece(prompt, self._tokenizer, replies.lookup)
        if len(encoded) >= self.context_tokens:
            remedy = "shorten the prompt"
            if self.context_tokens < self._decoder.spec.context_tokens:
                remedy += " or raise max_context_tokens or pool_tokens"
            raise ContextLengthError(len(encoded), self.context_tokens, remedy)
        self._check_ids(encoded.token_ids)
        return encoded, header

    def _check_ids(self, token_ids: np.ndarray) -> None:
        """Refuses ids without an embedding: on a GPU the look-up itself would end all use of the device."""
        vocab_size = self._decoder.spec.vocab_size
        wrong = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
        if len(wrong):
            raise PromptError(
                f"token id {wrong[0]} is not one of the model's {vocab_size}: use the tokenizer that belongs to the "
                "model, or resize the model's embeddings to the tokenizer"
            )

    def _assemble(
        self,
        encoded: EncodedPrompt,
        space: SpaceKey,
        session: str | None,
        policy: PolicyName,
        extra_tokens: int = 0,
    ) -> tuple[Plan, Assembly]:
        """Plans and takes pages; reuses less, with the reason, if donor and prompt do not fit side by side."""
        request = PlanRequest(
            prompt=encoded,
            session=session,
            sequences=self.index.candidates(space),
            correction_share=self._config.correction_share,
            min_slide_tokens=self._config.min_slide_tokens,
            max_hops=self._config.max_hops,
            share_slid=self._config.share_slid,
        )
        lesser: dict[PolicyName, PolicyName] = {"slide": "prefix", "head": "prefix", "prefix": "recompute"}
        # Where a model leaves no room for stored queries, staleness is unknown.
        attempt: PolicyName = "head" if policy == "slide" and not self._queries.layers else policy
        fallback: str | None = None
        while True:
            plan = make_plan(attempt, request)
            plan = replace(plan.extended(extra_tokens), policy=policy, fallback=fallback or plan.fallback)
            try:
                return plan, self._take_pages(plan)
            except PoolFullError:
                if attempt not in lesser:
                    raise
                attempt = lesser[attempt]
                fallback = (
                    f"the pool of {self.pool.num_pages} pages does not hold the earlier turn beside this prompt of "
                    f"{plan.num_tokens} tokens: raise pool_tokens to reuse it"
                )

    def _take_pages(self, plan: Plan) -> Assembly:
        """Takes the plan's pages and pins its donors, which `_prefill` unpins."""
        sources = {span.source: self.index.get(span.source) for span in plan.spans if span.source is not None}
        for source in sources:
            self.index.pin(source)
        try:
            return Assembly(
                plan, sources, self.pool, self._queries, self._decoder.spec.rope, plan.num_tokens, self._allocate
            )
        except BaseException:
            self._unpin(plan)
            raise

    def _allocate(self, num_pages: int, after: int | None) -> list[int]:
        if self.pool.num_free < num_pages:
            self.index.evict(num_pages)
        return self.pool.allocate(num_pages, after)

    def _prefill(
        self,
        token_ids: np.ndarray,
        plan: Plan,
        assembly: Assembly,
        *,
        wanted: int,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[Plan, torch.Tensor]:
        """Carries out a plan; returns it with what was corrected, and the wanted logits (`run.prefill`)."""
        try:
            correction = self._correction(token_ids, plan, assembly) if plan.selects else None
            logits = prefill(
                self._forward,
                token_ids,
                plan,
                assembly,
                wanted=wanted,
                chunk_tokens=self._config.prefill_chunk_tokens,
                check=check,
                choose=correction.choose if correction else None,
            )
            return (replace(plan, corrected=correction.chosen) if correction else plan), logits
        finally:
            self._unpin(plan)

    def _correction(self, token_ids: np.ndarray, plan: Plan, assembly: Assembly) -> Correction:
        return Correction(
            token_ids,
            plan,
            {span.source: self.index.get(span.source) for span in plan.spans if span.source is not None},
            assembly,
            self.pool,
            self._queries,
            self._decoder.spec,
            bound=self._config.staleness_bound,
            cap_share=self._config.correction_share,
        )

    def _unpin(self, plan: Plan) -> None:
        for source in {span.source for span in plan.spans if span.source is not None}:
            self.index.unpin(source)

    def _step(self, sequence: RunningSequence, token_id: int) -> torch.Tensor:
        """Computes one generated token; the logits after it are (1, vocab) float32."""
        token, position = sequence.append(token_id)
        table = sequence.table
        if token >= table.capacity_tokens:
            table.pages += self._allocate(1, table.pages[-1])
        logits = self._forward.rows(np.array([token_id]), np.array([position]), np.array([token]), table, wanted=1)
        assert logits is not None
        return logits

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        own = set() if params.ignore_eos else {*self._decoder.spec.stop_token_ids, self._tokenizer.eos_token_id}
        return frozenset(own - {None} | set(params.stop_token_ids))

    def _remember(
        self, request: Request, space: SpaceKey, header: TextPiece, sequence: RunningSequence, answer: Answer
    ) -> None:
        """Indexes the answered sequence and the reply's sampled ids."""
        self.index.add(
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
        book = self._replies.book(space, request.session)
        canonical = self._tokenizer.encode(header.text + answer.text, add_special_tokens=False)
        book.remember(header.text, header.ids, answer.text, np.asarray(reply_ids), np.asarray(canonical))

    def _count(self, receipt: Receipt) -> None:
        self.totals["requests"] += 1
        self.totals["fallbacks"] += receipt.fallback is not None
        for name in ("prompt", "exact", "slid", "corrected", "fresh", "generated"):
            self.totals[f"{name}_tokens"] += getattr(receipt, f"{name}_tokens")


def _receipt(plan: Plan, staleness: np.ndarray) -> Receipt:
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
    )
