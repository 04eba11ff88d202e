"""Engine and sampling settings: frozen, unknown settings refused. Nothing here touches a model or needs a package."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, dataclass_transform, get_args

from .errors import ConfigError

PAGE_TOKENS = 16
"""Tokens in one page: a page is K and V of so many tokens of one layer."""

PolicyName = Literal["recompute", "prefix", "promptcache", "cacheblend", "epic", "head", "deviation", "slide", "paper"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "sdpa", "flash"]

PER_REQUEST = (
    "policy",
    "correction_share",
    "staleness_bound",
    "min_slide_tokens",
    "max_hops",
    "share_slid",
    "epic_head_tokens",
    "epic_tail_tokens",
    "cacheblend_share",
    "deviation_share",
    "paper",
)
"""Settings that are read anew with every request, so that `Engine.adjust` can change them."""

S = TypeVar("S", bound=type)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: S) -> S:
    """Makes a frozen, keyword-only dataclass that names the settings it has when it is given one it has not."""
    made: Any = dataclass(frozen=True, kw_only=True)(cls)
    build = made.__init__

    @wraps(build)
    def build_known(self: Any, **values: Any) -> None:
        known = [field.name for field in fields(made)]
        for name in values:
            if name not in known:
                raise ConfigError(f"{made.__name__} has no setting {name!r}; it has {', '.join(known)}")
        build(self, **values)

    made.__init__ = build_known
    checked: S = made
    return checked


@settings
class PaperSettings:
    """How `paper` reads Algorithm 2 of the CacheSlide paper (§4.3) where that leaves a choice. Layers count from 0.

    Attributes:
        share: k, the share of the slid tokens that is corrected at a time.
        selection_layer: The layer whose key deviations choose them; the layers up to it are computed for all.
        clamp_alpha: Whether the weight α of computed K and V is at most 1; the paper prints no bound.
        gate: `converged` lets a token go where 1 − CKSim < τ, as the text says; `printed` where CKSim < τ, as
            Algorithm 2 does; `off` never.
        tau: τ, the gate's threshold.
        gate_every_layers: The gate is asked in every so manyth layer.
        attends_to: What corrected tokens see: everything before them, or segments of the role `update` and themselves.
    """

    share: float = 0.26
    selection_layer: int = 1
    clamp_alpha: bool = False
    gate: Literal["converged", "printed", "off"] = "converged"
    tau: float = 0.12
    gate_every_layers: int = 4
    attends_to: Literal["everything", "update"] = "everything"

    def __post_init__(self) -> None:
        check = _Checks(self)
        check.number("share", 0.0, 1.0)
        check.count("selection_layer", 0)
        check.flag("clamp_alpha")
        check.one_of("gate", ("converged", "printed", "off"))
        check.number("tau", 0.0, 2.0)
        check.count("gate_every_layers", 1)
        check.one_of("attends_to", ("everything", "update"))


@settings
class EngineConfig:
    """How an engine is loaded and how it reuses.

    Attributes:
        model: A Hugging Face folder, a hub id or a GGUF file; None is the bundled SmolLM2-135M-Instruct.
        device: `auto` takes CUDA where there is one.
        dtype: `auto` is bfloat16 where the device computes it quickly, else float16 on CUDA and float32 on a CPU.
        policy: The default policy of requests.
        correction_share: Most of the slid tokens that are computed again, as a share, 0 to 1: the cap of `slide`, the
            budget of `head`.
        staleness_bound: Share of the new text's attention that `slide` may leave on stale tokens, 0 to 1: it corrects
            until no more is left, within the cap. 0 spends the whole cap.
        min_slide_tokens: Matching runs shorter than this are computed, not slid: below it the copy costs more. Where
            `slide` corrects, so are those no longer than the changed text between them and the next run.
        max_hops: Rotations that a cached key may go through before it is computed again (rounding adds up).
        share_slid: Whether slid donors may come from other sessions of the namespace.
        epic_head_tokens: First tokens of each reused segment that `epic` computes again.
        epic_tail_tokens: Last tokens of each reused segment that `epic` computes again.
        cacheblend_share: Share of the slid tokens that `cacheblend` computes again.
        deviation_share: Share of the slid tokens that `deviation` computes again.
        paper: How `paper` reads what its paper leaves open.
        namespace: The tenant; nothing is shared across namespaces.
        max_context_tokens: Upper limit of prompt plus answer; None is the model's own.
        pool_tokens: Size of the KV pool in tokens; None takes `pool_share` of the memory free at load.
        pool_share: Share of free memory that the pool may take when `pool_tokens` is None.
        prefill_chunk_tokens: Prompt tokens that go through all layers at once.
        repair: Whether cached tokens that hang on slid ones are computed again while nobody asks, until they are exact;
            `auto` is on a GPU only.
        repair_seconds: Most time that repair takes between two requests.
        gate_share: Of the requests that slide so many, as a share, are measured against a full prefill after their
            answer, while nobody asks; 0 measures none, and nothing is ever refused. `auto` is 0.02 on a GPU, else 0.
        gate_kl_bound: Mean KL(full ‖ reuse) of the next token, in nats, past which prompts of the same namespace,
            template and policy reuse only what is exact, until measurements are good again.
        learned_positions: Whether a range of positions is reserved for each update, as long as most updates before
            it were, so that the text behind an update keeps its position and its pages. Ranges count against the
            context; a session that they no longer fit in goes on without.
        positions_quantile: Share of the observed updates that fit into a reserved range, 0 to 1.
        positions_file: JSON file in which the observed lengths are kept; None keeps them in memory. They are lengths
            only, apart for every namespace and template, and made for one model.
        attention: `auto` takes flash-attn on CUDA where it is installed and torch's SDPA elsewhere.
        cache_dir: Where converted models lie; None is the user's cache folder.
        offline: Never ask a hub, even for a hub id.
    """

    model: str | Path | None = None
    device: str = "auto"
    dtype: DtypeName = "auto"
    policy: PolicyName = "slide"
    correction_share: float = 0.15
    staleness_bound: float = 0.00003
    min_slide_tokens: int = PAGE_TOKENS
    max_hops: int = 20
    share_slid: bool = False
    epic_head_tokens: int = 32
    epic_tail_tokens: int = 32
    cacheblend_share: float = 0.18
    deviation_share: float = 0.26
    paper: PaperSettings = field(default_factory=PaperSettings)
    namespace: str = "default"
    max_context_tokens: int | None = None
    pool_tokens: int | None = None
    pool_share: float = 0.25
    prefill_chunk_tokens: int = 2048
    repair: bool | Literal["auto"] = "auto"
    repair_seconds: float = 30.0
    gate_share: float | Literal["auto"] = "auto"
    gate_kl_bound: float = 0.05
    learned_positions: bool = False
    positions_quantile: float = 0.95
    positions_file: Path | None = None
    attention: AttentionName = "auto"
    cache_dir: Path | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        check = _Checks(self)
        check.text("model", "cache_dir", optional=True, path=True)
        check.text("positions_file", optional=True, path=True)
        check.text("device", "namespace")
        check.one_of("dtype", get_args(DtypeName))
        check.one_of("policy", get_args(PolicyName))
        check.one_of("attention", get_args(AttentionName))
        check.number("correction_share", 0.0, 1.0)
        check.number("staleness_bound", 0.0, 1.0)
        check.number("positions_quantile", 0.0, 1.0, open_low=True)
        check.number("pool_share", 0.0, 0.95, open_low=True)
        check.number("repair_seconds", 0.0)
        check.number("gate_kl_bound", 0.0, open_low=True)
        if self.gate_share != "auto":
            check.number("gate_share", 0.0, 1.0)
        if self.repair != "auto" and not isinstance(self.repair, bool):
            check.refuse("repair", "use True, False or auto")
        check.count("min_slide_tokens", 1)
        check.count("max_hops", 0, 255)
        check.count("epic_head_tokens", 0)
        check.count("epic_tail_tokens", 0)
        check.number("cacheblend_share", 0.0, 1.0)
        check.number("deviation_share", 0.0, 1.0)
        if not isinstance(self.paper, PaperSettings):
            check.refuse("paper", "give PaperSettings(...)")
        check.count("prefill_chunk_tokens", 1)
        check.count("max_context_tokens", 2, optional=True)
        check.count("pool_tokens", PAGE_TOKENS, optional=True)
        check.flag("share_slid", "learned_positions", "offline")
        if self.positions_file is not None:
            if not self.learned_positions:
                check.refuse(
                    "positions_file", "it is read with learned_positions=True only, so set that or leave it out"
                )
            object.__setattr__(self, "positions_file", Path(self.positions_file).expanduser())
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
            check.refuse("device", "use auto, cpu, cuda or cuda:N")

    def with_changes(self, **changes: Any) -> Self:
        """A checked copy with some settings replaced.

        Raises:
            ConfigError: A setting does not exist or a value is outside its limits.
        """
        return replace(self, **changes)


@settings
class SamplingParams:
    """How an answer is sampled.

    Attributes:
        max_tokens: Upper limit of the answer; clamped to the room left in the context. None is all of that room.
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens with this much probability.
        repetition_penalty: Divides the positive logits of tokens seen in prompt or answer, multiplies negative ones.
        presence_penalty: Subtracted once from the logit of each token in the answer.
        frequency_penalty: Subtracted from a token's logit for each time that the answer has it.
        seed: Makes sampling repeatable; None draws one.
        stop: Strings that end the answer; they are not part of it.
        stop_token_ids: Token ids that end the answer besides the model's own.
        ignore_eos: Go on past the model's own stop tokens.
    """

    max_tokens: int | None = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check = _Checks(self)
        check.count("max_tokens", 1, optional=True)
        check.number("temperature", 0.0)
        check.count("top_k", 0)
        check.number("top_p", 0.0, 1.0, open_low=True)
        check.number("repetition_penalty", 0.0, open_low=True)
        check.number("presence_penalty", -2.0, 2.0)
        check.number("frequency_penalty", -2.0, 2.0)
        check.count("seed", -(2**63), 2**63 - 1, optional=True)
        check.flag("ignore_eos")
        stop = (self.stop,) if isinstance(self.stop, str) else check.several("stop", "one or several non-empty strings")
        if not all(isinstance(string, str) and string for string in stop):
            check.refuse("stop", "give one or several non-empty strings")
        object.__setattr__(self, "stop", stop)
        token_ids = check.several("stop_token_ids", "a list of token ids")
        if not all(_is_count(token_id) and token_id >= 0 for token_id in token_ids):
            check.refuse("stop_token_ids", "give a list of token ids")
        object.__setattr__(self, "stop_token_ids", token_ids)

    def with_changes(self, **changes: Any) -> Self:
        """A checked copy with some settings replaced.

        Raises:
            ConfigError: A setting does not exist or a value is outside its limits.
        """
        return replace(self, **changes)


class _Checks:
    """Checks the values of one settings object; every refusal names the setting, its value and what is allowed."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def refuse(self, name: str, remedy: str) -> None:
        raise ConfigError(f"{type(self._settings).__name__}.{name} = {getattr(self._settings, name)!r}: {remedy}")

    def one_of(self, name: str, allowed: Iterable[str]) -> None:
        if getattr(self._settings, name) not in tuple(allowed):
            self.refuse(name, f"use one of {', '.join(allowed)}")

    def text(self, *names: str, optional: bool = False, path: bool = False) -> None:
        for name in names:
            value = getattr(self._settings, name)
            if value is None and optional:
                continue
            if not isinstance(value, (str, Path) if path else str) or not str(value):
                self.refuse(name, "give a non-empty text")

    def several(self, name: str, what: str) -> tuple[Any, ...]:
        """The elements of a list, tuple or other collection; none of None."""
        value = getattr(self._settings, name)
        if value is not None and (not isinstance(value, Iterable) or isinstance(value, (str, bytes, dict))):
            self.refuse(name, f"give {what}")
        return tuple(value or ())

    def flag(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self._settings, name), bool):
                self.refuse(name, "use True or False")

    def count(self, name: str, low: int, high: int | None = None, *, optional: bool = False) -> None:
        value = getattr(self._settings, name)
        if value is None and optional:
            return
        if not _is_count(value) or value < low or (high is not None and value > high):
            self.refuse(name, f"use a whole number {_range(low, high)}")

    def number(self, name: str, low: float, high: float | None = None, *, open_low: bool = False) -> None:
        value = getattr(self._settings, name)
        is_number = _is_count(value) or (isinstance(value, float) and math.isfinite(value))
        if not is_number or value < low or (open_low and value == low) or (high is not None and value > high):
            self.refuse(name, f"use a number {'above' if open_low else 'from'} {low}" + (f" to {high}" if high else ""))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _range(low: int, high: int | None) -> str:
    return f"from {low} to {high}" if high is not None else f"of at least {low}"
