"""From a prompt to its pages and its last logits: what answering a prompt and comparing policies share.

Encodes, plans, takes pages and prefills. It generates nothing, indexes nothing and counts nothing (`run.runner` does).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..config import EngineConfig, PolicyName
from ..errors import ContextLengthError, PromptError
from ..position.profile_file import ProfileBook
from ..reuse.index import CachedSequence, CacheIndex, SpaceKey
from ..reuse.plan import PlanRequest
from ..reuse.plan import plan as make_plan
from ..reuse.policies import lesser, policy_named
from ..reuse.replies import ReplyBooks
from ..reuse.rules import ByDeviation, ByStaleness
from ..reuse.spans import Plan, Span
from ..segments import EncodedPrompt
from ..slide.assembly import Assembly
from ..slide.pages import PoolFullError
from ..tokenization import TextPiece, encode_with_last_piece
from .correction import Correction
from .forward import Forward
from .layerwise import Layerwise
from .positions import ANSWER_TOKENS, SessionPositions
from .prefill import prefill
from .prepared import Asked, Prepared
from .request import Call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NO_TOKENS = np.empty(0, dtype=np.int64)


class Preparation:
    """Prepares prompts and prefills them, on the engine's one thread.

    Attributes:
        config: The settings; those of `config.PER_REQUEST` may change between requests.
        pool: The KV pages.
        queries: The stored queries beside them.
        index: What is cached in them.
        replies: The sampled ids of earlier answers.
        positions: The sessions' reserved ranges of positions.
        forward: The model's loop.
        context_tokens: Longest prompt plus answer.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: PreTrainedTokenizerBase,
        forward: Forward,
        context_tokens: int,
        profiles: ProfileBook | None = None,
    ) -> None:
        self.config = config
        self._spec = forward.decoder.spec
        self._tokenizer = tokenizer
        self.pool = forward.pool
        self.queries = forward.queries
        self.index = CacheIndex(forward.pool)
        self.replies = ReplyBooks()
        self.positions = SessionPositions(profiles, config.positions_quantile, context_tokens)
        self.forward = forward
        self.context_tokens = context_tokens

    def adjust(self, config: EngineConfig) -> None:
        """Plans what comes next with other settings (`config.PER_REQUEST`); what is cached stays."""
        self.config = config

    def prepare(
        self,
        call: Call,
        continuation: np.ndarray = _NO_TOKENS,
        refused: str | None = None,
        answer_tokens: int | None = 1,
    ) -> Prepared:
        """Encodes a prompt, plans it and takes its pages; `prefill` is to follow at once.

        Args:
            call: What is asked.
            continuation: (n,) int64: more tokens to compute behind the prompt.
            refused: Why nothing may be slid, or None if it may; becomes the plan's fallback if something would be.
            answer_tokens: Tokens that may be generated behind all; reserved ranges leave room for them. None for
                an answer of no stated length.

        Raises:
            PromptError: A token id is not the model's.
            ContextLengthError: Prompt and continuation do not fit.
            PoolFullError: The pool does not hold them.
        """
        encoded, header = self._encode(call)
        token_ids = np.concatenate([encoded.token_ids, continuation])
        if len(token_ids) >= self.context_tokens:
            raise ContextLengthError(len(token_ids), self.context_tokens, "shorten the prompt or the continuation")
        started = time.perf_counter()
        answer_tokens = min(answer_tokens or ANSWER_TOKENS, self.context_tokens - len(token_ids))
        placement = self.positions.place(encoded, call.space, call.session, len(continuation) + answer_tokens)
        asked = Asked(call, encoded, placement, refused)
        plan, assembly = self._assemble(asked, len(continuation), self._candidates(call), self.allocate)
        return Prepared(token_ids, header, plan, assembly, time.perf_counter() - started, asked)

    def rehearse(self, prepared: Prepared, without: int) -> Prepared:
        """Prepares once more what was refused to slide, as if it might: on free pages, and without its own answer.

        Args:
            prepared: What was answered; its pages are not touched.
            without: Id of the cached sequence that holds the answer.

        Raises:
            PoolFullError: Too few pages are free; nothing cached is forgotten for it.
        """
        asked = replace(prepared.asked, refused=None)
        sequences = [sequence for sequence in self._candidates(asked.call) if sequence.id != without]
        plan, assembly = self._assemble(asked, 0, sequences, self.pool.allocate)
        return replace(prepared, plan=plan, assembly=assembly, asked=asked)

    def prefill(self, prepared: Prepared, wanted: int, check: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Carries out the plan and notes in it what was corrected.

        Args:
            prepared: Of `prepare`, not prefilled yet.
            wanted: Number of tokens at the end whose logits are returned.
            check: Called between layers; raises to stop.

        Returns:
            (wanted, vocab) float32 on the model's device.
        """
        plan, assembly, before = prepared.plan, prepared.assembly, self.forward.token_layers
        rule = plan.correction
        try:
            if isinstance(rule, ByDeviation):
                layerwise = Layerwise(
                    self.forward,
                    rule,
                    prepared.token_ids,
                    plan,
                    assembly,
                    chunk_tokens=self.config.prefill_chunk_tokens,
                    check=check,
                )
                logits = layerwise.run(wanted)
                prepared.plan = replace(plan, corrected=layerwise.corrected)
            else:
                correction = self._correction(prepared, rule) if rule else None
                logits = prefill(
                    self.forward,
                    prepared.token_ids,
                    plan,
                    assembly,
                    wanted=wanted,
                    chunk_tokens=self.config.prefill_chunk_tokens,
                    check=check,
                    chooser=correction,
                )
                if correction:
                    prepared.plan = replace(plan, corrected=correction.chosen)
            done = self.forward.token_layers - before
            prepared.computed_share = done / (plan.num_tokens * self.forward.num_layers)
            return logits
        finally:
            self._unpin(plan)

    def compute_alone(self, token_ids: np.ndarray, positions: np.ndarray, check: Callable[[], None]) -> Assembly:
        """Computes tokens with nothing before them; the caller has the pages indexed.

        Args:
            token_ids: (tokens,) int64.
            positions: (tokens,) int64, increasing: where the keys are rotated to.
            check: Called between layers; raises to stop.

        Raises:
            PoolFullError: The pool does not hold them.
        """
        plan = Plan((Span(0, len(token_ids), "fresh"),), positions)
        assembly = self._take_pages(plan, self.allocate)
        try:
            prefill(self.forward, token_ids, plan, assembly, chunk_tokens=self.config.prefill_chunk_tokens, check=check)
        except BaseException:
            self.pool.release(assembly.table.pages)
            raise
        return assembly

    def allocate(self, num_pages: int, after: int | None) -> list[int]:
        """Pages with one reference each, evicting what is cached if it must.

        Raises:
            PoolFullError: Even that is not enough.
        """
        if self.pool.num_free < num_pages:
            self.index.evict(num_pages)
        return self.pool.allocate(num_pages, after)

    def _encode(self, call: Call) -> tuple[EncodedPrompt, TextPiece]:
        """The prompt's ids, and its text after the last control token."""
        replies = self.replies.book(call.space, call.session)
        encoded, header = encode_with_last_piece(call.prompt, self._tokenizer, replies.lookup)
        if len(encoded) >= self.context_tokens:
            remedy = "shorten the prompt"
            if self.context_tokens < self._spec.context_tokens:
                remedy += " or raise max_context_tokens or pool_tokens"
            raise ContextLengthError(len(encoded), self.context_tokens, remedy)
        self.check_ids(encoded.token_ids)
        return encoded, header

    def check_ids(self, token_ids: np.ndarray) -> None:
        """Refuses ids without an embedding: on a GPU the look-up itself would end all use of the device.

        Raises:
            PromptError: A token id is not the model's.
        """
        vocab_size = self._spec.vocab_size
        wrong = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
        if len(wrong):
            raise PromptError(
                f"token id {wrong[0]} is not one of the model's {vocab_size}: use the tokenizer that belongs to the "
                "model, or resize the model's embeddings to the tokenizer"
            )

    def _candidates(self, call: Call) -> list[CachedSequence]:
        return self.index.candidates(space_of(call))

    def _assemble(
        self,
        asked: Asked,
        extra_tokens: int,
        sequences: list[CachedSequence],
        allocate: Callable[[int, int | None], list[int]],
    ) -> tuple[Plan, Assembly]:
        """Plans and takes pages; reuses less, with the reason, if it must or donor and prompt do not fit together."""
        policy = asked.call.policy
        request = PlanRequest(
            prompt=asked.encoded,
            session=asked.call.session,
            sequences=sequences,
            config=self.config,
            reserved=asked.placement.positions,
        )
        # Where a model leaves no room for stored queries, staleness is unknown.
        attempt: PolicyName = "head" if policy == "slide" and not self.queries.layers else policy
        fallback: str | None = None
        while True:
            plan = make_plan(attempt, request)
            if asked.refused is not None and fallback is None and len(plan.slid_tokens()):
                attempt, fallback = "prefix", asked.refused
                continue
            plan = replace(plan.extended(extra_tokens), policy=policy, fallback=fallback or plan.fallback)
            try:
                return plan, self._take_pages(plan, allocate)
            except PoolFullError:
                less = lesser(attempt)
                if less is None:
                    raise
                attempt = less
                fallback = fallback or (
                    f"the pool of {self.pool.num_pages} pages does not hold the earlier turn beside this prompt of "
                    f"{plan.num_tokens} tokens: raise pool_tokens to reuse it"
                )

    def _take_pages(self, plan: Plan, allocate: Callable[[int, int | None], list[int]]) -> Assembly:
        """Takes the plan's pages and pins its donors, which `prefill` unpins."""
        sequences = self._sequences(plan)
        for source in sequences:
            self.index.pin(source)
        try:
            return Assembly(plan, sequences, self.pool, self.queries, self._spec.rope, plan.num_tokens, allocate)
        except BaseException:
            self._unpin(plan)
            raise

    def _correction(self, prepared: Prepared, rule: ByStaleness) -> Correction:
        plan = prepared.plan
        return Correction(
            prepared.token_ids,
            plan,
            self._sequences(plan),
            prepared.assembly,
            self.forward,
            prompt_tokens=len(prepared.asked.encoded),
            bound=rule.bound,
            cap_share=rule.cap_share,
        )

    def _unpin(self, plan: Plan) -> None:
        for source in self._sequences(plan):
            self.index.unpin(source)

    def _sequences(self, plan: Plan) -> dict[int, CachedSequence]:
        """The cached sequences that a plan names, by id."""
        return {span.source: self.index.get(span.source) for span in plan.spans if span.source is not None}


def space_of(call: Call) -> SpaceKey:
    """Where a call's policy finds what it reuses: the call's own space, or that of isolated segments."""
    return call.space if policy_named(call.policy).isolation is None else call.space._replace(context="isolated")
