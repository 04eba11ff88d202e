"""Engine and sampling settings. Unknown settings are refused; nothing here touches a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .errors import ConfigError

PAGE_TOKENS = 16
"""Tokens in one page (DESIGN: a page is K and V of 16 tokens of one layer)."""

PolicyName = Literal["recompute", "prefix", "slide"]


class Settings(BaseModel):
    """Base of every settings model: frozen, unknown keys refused, errors as `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from None

    def with_changes(self, **changes: Any) -> Any:
        """A validated copy with some settings replaced.

        Raises:
            ConfigError: A setting does not exist or a value is outside its limits.
        """
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})


class EngineConfig(Settings):
    """How an engine is loaded and how it reuses.

    Attributes:
        model: A Hugging Face folder, a hub id or a GGUF file; None is the bundled SmolLM2-135M-Instruct.
        device: `auto` takes CUDA where there is one.
        dtype: `auto` is bfloat16 where the device computes it quickly and float32 elsewhere.
        policy: The default policy of requests.
        correction_share: Share of each slid run after a change that `slide` computes again, 0 to 1.
        min_slide_tokens: Matching runs shorter than this are computed, not slid: below it the copy costs more.
        max_hops: Rotations that a cached key may go through before it is computed again (rounding adds up).
        share_slid: Whether slid donors may come from other sessions of the namespace.
        namespace: The tenant; nothing is shared across namespaces.
        max_context_tokens: Upper limit of prompt plus answer; None is the model's own.
        pool_tokens: Size of the KV pool in tokens; None takes `pool_share` of the memory free at load.
        pool_share: Share of free memory that the pool may take when `pool_tokens` is None.
        prefill_chunk_tokens: Prompt tokens that go through all layers at once.
        attention: `auto` takes flash-attn on CUDA where it is installed and torch's SDPA elsewhere.
        cache_dir: Where converted models lie; None is the user's cache folder.
        offline: Never ask a hub, even for a hub id.
    """

    model: str | Path | None = None
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    policy: PolicyName = "slide"
    correction_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.10
    min_slide_tokens: Annotated[int, Field(ge=1)] = PAGE_TOKENS
    max_hops: Annotated[int, Field(ge=0, le=255)] = 20
    share_slid: bool = False
    namespace: Annotated[str, Field(min_length=1)] = "default"
    max_context_tokens: Annotated[int, Field(ge=2)] | None = None
    pool_tokens: Annotated[int, Field(ge=PAGE_TOKENS)] | None = None
    pool_share: Annotated[float, Field(gt=0.0, le=0.95)] = 0.25
    prefill_chunk_tokens: Annotated[int, Field(ge=1)] = 2048
    attention: Literal["auto", "sdpa", "flash"] = "auto"
    cache_dir: Path | None = None
    offline: bool = False

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        name, _, index = device.partition(":")
        if name not in ("auto", "cpu", "cuda") or (index and not (name == "cuda" and index.isdigit())):
            raise ValueError("use auto, cpu, cuda or cuda:N")
        return device


class SamplingParams(Settings):
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

    max_tokens: Annotated[int, Field(ge=1)] | None = 256
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    repetition_penalty: Annotated[float, Field(gt=0.0)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_strings(cls, stop: Any) -> Any:
        if stop is None:
            return ()
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(string == "" for string in strings):
            raise ValueError("a stop string must not be empty")
        return strings


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    """One line per wrong setting: its name, the value, what is allowed."""
    lines = []
    for detail in error.errors():
        name = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            known = ", ".join(model.model_fields)
            lines.append(f"{model.__name__} has no setting {name!r}; it has {known}")
        else:
            lines.append(f"{model.__name__}.{name} = {detail['input']!r}: {detail['msg']}")
    return "; ".join(lines)
