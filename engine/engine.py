"""The engine: one model, its KV pages and one queue. The façade that adapters, benchmarks and people use."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .arguments import checked_call, checked_namespace, checked_params, checked_session, continuation_ids, text_ids
from .attention import select_attention
from .config import PAGE_TOKENS, PER_REQUEST, EngineConfig, PolicyName, SamplingParams
from .errors import ConfigError
from .model.decoder import Decoder
from .model.identity import ModelIdentity
from .model.loading import load_model
from .position.profile_file import ProfileBook
from .run import answering
from .run.comparison import Comparison, Trace
from .run.drift import Drift
from .run.forward import Forward
from .run.preparation import Preparation
from .run.request import Emit, Output, Piece, Request
from .run.runner import Runner
from .run.scheduler import Scheduler
from .segments import Prompt
from .slide.pages import PagePool, pool_pages
from .slide.queries import StoredQueries
from .stats import EngineStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Engine:
    """Answers prompts with one model and reuses their KV from turn to turn.

    Calls from any number of threads and event loops are served first come, first served. Use `Engine.load` for a
    model on disk and `Engine.from_model` for one that is in memory already.

    Attributes:
        config: The settings.
        tokenizer: The model's Hugging Face tokenizer.
        model: The transformers model whose weights are used; it still runs by itself.
        model_name: The model's name, for people.
        model_path: The dense checkpoint folder in use, or None for a model that came from memory.
        context_tokens: Longest prompt plus answer, in tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        *,
        model_name: str,
        model_path: Path | None,
    ) -> None:
        decoder = Decoder.from_transformers(model, context_tokens=config.max_context_tokens)
        num_pages = pool_pages(config, decoder.spec, decoder.dtype, decoder.device)
        context_tokens = min(
            decoder.spec.context_tokens,
            config.max_context_tokens or decoder.spec.context_tokens,
            num_pages * PAGE_TOKENS,
        )
        pool = PagePool(decoder.spec, num_pages, decoder.dtype, decoder.device)
        queries = StoredQueries(decoder.spec, num_pages * PAGE_TOKENS, decoder.dtype, decoder.device)
        attention = select_attention(config.attention, decoder.device, decoder.dtype)
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.model_path = model_path
        self.context_tokens = context_tokens
        profiles = None
        if config.learned_positions:
            identity = ModelIdentity.of(model_name, model.config, tokenizer)
            profiles = ProfileBook(identity, config.positions_file)
        forward = Forward(decoder, pool, queries, attention)
        preparation = Preparation(config, tokenizer, forward, context_tokens, profiles)
        self._runner = Runner(preparation, tokenizer)
        self._comparison = Comparison(preparation)
        idle_work = self._runner.idle_work
        self._scheduler = Scheduler(f"cacheslide {model_name}", idle_work.step if idle_work.is_on else None)
        self._closing = threading.Event()
        self._finalizer = weakref.finalize(self, _shut_down, self._scheduler, self._closing, profiles)

    @classmethod
    def load(cls, config: EngineConfig | str | Path | None = None) -> Engine:
        """Loads a model from disk or a hub; with no model named, the bundled one.

        Args:
            config: The settings, or just the model: a folder, a hub id or a GGUF file.

        Raises:
            ModelError: The model cannot be found, read or served exactly; the message says why.
            ConfigError: The device does not exist here, a limit does not fit the model or `positions_file` is broken
                or of another model.
        """
        if isinstance(config, (str, Path)):
            config = EngineConfig(model=config)
        config = config or EngineConfig()
        loaded = load_model(config)
        return cls(loaded.model, loaded.tokenizer, config, model_name=loaded.name, model_path=loaded.path)

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: EngineConfig | None = None
    ) -> Engine:
        """Serves a transformers model that is in memory, without a second copy of its weights.

        The model's device and dtype are used; its modules' weights become views of fused ones and still run.

        Raises:
            UnsupportedModelError: The model cannot be served exactly; the message says why.
        """
        name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
        return cls(model, tokenizer, config or EngineConfig(), model_name=name, model_path=None)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        session: str | None = None,
        namespace: str | None = None,
        policy: PolicyName | None = None,
        store: bool = True,
    ) -> Output:
        """Answers a prompt.

        Args:
            prompt: What to answer.
            params: How to sample; greedy with at most 256 tokens by default.
            session: A conversation's name: KV of its earlier turns may be slid. Without one only exact prefixes
                are reused.
            namespace: The tenant; None is the configuration's.
            policy: How reuse is decided; None is the configuration's.
            store: Whether later requests may reuse what is computed for this one. Comparisons store nothing.

        Raises:
            PromptError: The prompt is malformed.
            ContextLengthError: The prompt does not fit the context.
            ConfigError: The policy does not exist, or an argument has a wrong type.
            ModelError: The model gave no finite logits.
            EngineClosedError: The engine was closed.
            RequestCancelledError: The engine was closed while the request waited or ran.
        """
        pieces = self.stream(prompt, params, session=session, namespace=namespace, policy=policy, store=store)
        with closing(pieces):
            return answering.collect(list(pieces))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        session: str | None = None,
        namespace: str | None = None,
        policy: PolicyName | None = None,
        store: bool = True,
    ) -> Generator[Piece, None, None]:
        """Answers a prompt piece by piece; the last piece carries the receipt.

        Closing the iterator cancels the request and returns when its pages are free. Arguments and errors are those
        of `generate`; errors are raised by the first `next`.
        """
        ask = partial(self._request, prompt, params, session, namespace, policy, store)
        return answering.pieces(self._scheduler, self._runner.serve, ask)

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        session: str | None = None,
        namespace: str | None = None,
        policy: PolicyName | None = None,
        store: bool = True,
    ) -> Output:
        """`generate` for asyncio; cancelling the task cancels the request."""
        pieces = self.astream(prompt, params, session=session, namespace=namespace, policy=policy, store=store)
        return answering.collect([piece async for piece in pieces])

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        session: str | None = None,
        namespace: str | None = None,
        policy: PolicyName | None = None,
        store: bool = True,
    ) -> AsyncIterator[Piece]:
        """`stream` for asyncio; closing the iterator or cancelling the task cancels the request."""
        ask = partial(self._request, prompt, params, session, namespace, policy, store)
        return answering.pieces_async(self._scheduler, self._runner.serve, ask)

    def logits(
        self,
        prompt: Prompt,
        continuation: str | Sequence[int],
        *,
        session: str | None = None,
        namespace: str | None = None,
        policy: PolicyName | None = None,
    ) -> torch.Tensor:
        """The logits before each token of a continuation, as a policy would compute them; nothing is stored.

        Args:
            prompt: What stands before the continuation.
            continuation: Text, tokenized by itself, or token ids.
            session: As in `generate`.
            namespace: As in `generate`.
            policy: As in `generate`.

        Returns:
            (tokens of the continuation, vocab) float32, on the model's device.

        Raises:
            PromptError: The continuation is empty or has an id that is not the model's; else as in `generate`.
        """
        call = checked_call(prompt, session, namespace, policy, self.config)
        token_ids = continuation_ids(continuation, self.tokenizer)
        return self._scheduler.call(partial(self._comparison.logits, call, token_ids))

    def trace(
        self,
        prompt: Prompt,
        *continuations: str | Sequence[int],
        session: str | None = None,
        namespace: str | None = None,
        policy: PolicyName | None = None,
    ) -> Trace:
        """K and V of a prompt as a policy would leave them, and the logits along some continuations; nothing is stored.

        Args:
            prompt: What is looked at.
            continuations: Each as in `logits`; none is allowed. The prompt is computed once for all.
            session: As in `generate`.
            namespace: As in `generate`.
            policy: As in `generate`.

        Returns:
            K and V, and for each continuation the logits before each of its tokens.

        Raises:
            PromptError: As in `logits`.
        """
        call = checked_call(prompt, session, namespace, policy, self.config)
        token_ids = [continuation_ids(continuation, self.tokenizer) for continuation in continuations]
        return self._scheduler.call(partial(self._comparison.trace, call, token_ids))

    def drift(
        self,
        prompt: Prompt,
        *,
        session: str | None = None,
        namespace: str | None = None,
        policy: PolicyName | None = None,
    ) -> Drift:
        """How far a prompt under a policy is from its full prefill, which is computed for it; nothing is stored.

        Arguments and errors are those of `generate`.
        """
        call = checked_call(prompt, session, namespace, policy, self.config)
        return self._scheduler.call(partial(self._comparison.drift, call))

    def adjust(self, **changes: Any) -> None:
        """Changes settings for the requests to come; what is cached stays.

        Args:
            changes: Settings of `config.PER_REQUEST` and their new values.

        Raises:
            ConfigError: A setting does not exist, cannot change while the engine lives, or has a value outside its
                limits; nothing is changed then.
        """
        for name in changes:
            if name not in PER_REQUEST:
                raise ConfigError(
                    f"{name} cannot change while an engine lives: load another, or change {', '.join(PER_REQUEST)}"
                )
        self._scheduler.call(partial(self._adjust, changes))

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, without special ones."""
        return len(text_ids(text, self.tokenizer))

    def forget(self, session: str | None, *, namespace: str | None = None) -> None:
        """Drops everything cached for a session; None for what was asked without one."""
        namespace, session = checked_namespace(namespace, self.config), checked_session(session)
        self._scheduler.call(partial(self._runner.forget, namespace, session))

    def wait_until_repaired(self, timeout_seconds: float | None = None) -> bool:
        """Waits while repair goes on; a request of another thread delays it.

        Args:
            timeout_seconds: Longest wait; None waits as long as there is something to do.

        Returns:
            Whether everything cached is exact. False too if `repair_seconds` are spent or no page is free.

        Raises:
            ConfigError: Repair is off.
            EngineClosedError: The engine was closed.
        """
        if not self._runner.idle_work.is_repair_on:
            raise ConfigError(
                f"EngineConfig.repair = {self.config.repair!r} is off on {self.model.device}: load with repair=True"
            )
        quiet = self._scheduler.wait_until_quiet(timeout_seconds)
        return quiet and not self._runner.preparation.index.stats().tainted_tokens

    def stats(self) -> EngineStats:
        """What the engine holds and has done, between two requests or in the middle of one."""
        return self._runner.stats(self.model_name, self._scheduler.waiting)

    def close(self) -> None:
        """Cancels what runs or waits and ends the engine's thread. Closing twice is harmless."""
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _adjust(self, changes: dict[str, Any]) -> None:
        """`adjust` on the engine's thread: of two callers at once neither undoes what the other changed."""
        config = self.config.with_changes(**changes)
        self._runner.preparation.adjust(config)
        self.config = config

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        session: str | None,
        namespace: str | None,
        policy: PolicyName | None,
        store: bool,
        emit: Emit,
    ) -> Request:
        return Request(
            call=checked_call(prompt, session, namespace, policy, self.config),
            params=checked_params(params),
            emit=emit,
            submitted_at=time.perf_counter(),
            closing=self._closing,
            store=store,
        )


def _shut_down(scheduler: Scheduler, is_closing: threading.Event, profiles: ProfileBook | None) -> None:
    if scheduler.is_forked:
        return  # its locks may be held by threads that are not here
    is_closing.set()  # first, so that what waits ends at once when its turn comes
    scheduler.close()
    if profiles is not None:
        profiles.save()
