"""The fields that a chat model has in every framework, and what comes with them: its engine, copies, pickles."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cacheslide_agents.engine.config import AttentionName, DtypeName, PaperSettings, PolicyName

from .errors import UnsupportedFeatureError
from .settings import ChatSettings, explain

if TYPE_CHECKING:
    from typing import Self

    from cacheslide_agents.engine.engine import Engine


class ModelFields(BaseModel):
    """Base of chat models, to stand before the framework's own base class.

    The engine is loaded when the first model of its configuration is made, and lives in a registry of the process:
    copies, bindings and rebuilt objects share it.

    Attributes:
        model: A Hugging Face folder, a hub id or a GGUF file; None is the bundled SmolLM2-135M-Instruct.
        llm: A local LLM to wrap instead, see `wrapping`; its generation settings are kept unless given here.
        session_id: The session of calls that name none. Without any, only exact prefixes are reused.
        chat_template: A Jinja template, or a `Path` of one, instead of the tokenizer's own.
        template_variables: What the template reads besides messages, such as `{"enable_thinking": False}`.
        prompt_date: The date that templates write; the day on which the engine was first used by default.

    The other attributes are those of `EngineConfig` and `SamplingParams`; None is the default of the wrapped LLM, else
    that of `SamplingParams`.

    Raises:
        ConfigError: A setting does not exist, a value is outside its limits, or `llm` holds no local model.
        ModelError: The model cannot be found, read or served exactly.
    """

    model: str | Path | None = None
    device: str = "auto"
    dtype: DtypeName = "auto"
    policy: PolicyName = "slide"
    correction_share: float = 0.15
    staleness_bound: float = 0.00003
    min_slide_tokens: int = 16
    max_hops: int = 20
    share_slid: bool = False
    epic_head_tokens: int = 32
    epic_tail_tokens: int = 32
    cacheblend_share: float = 0.18
    deviation_share: float = 0.26
    paper: PaperSettings = PaperSettings()
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

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    llm: Any = Field(default=None, exclude=True, repr=False)
    session_id: str | None = None
    chat_template: str | Path | None = None
    template_variables: dict[str, Any] = Field(default_factory=dict)
    prompt_date: datetime | None = None

    model_config = ConfigDict(protected_namespaces=())

    if not TYPE_CHECKING:  # type checkers see the fields' own signature

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise explain(type(self).__name__, list(type(self).model_fields), error) from None
            self._settings().shared()

    @property
    def engine(self) -> Engine:
        """The engine, shared with every model of the same configuration."""
        return self._settings().shared().engine

    @property
    def model_name(self) -> str:
        """The model's name."""
        return self.engine.model_name

    def close(self) -> None:
        """Closes the engine, also for every other model of the same configuration; the next call loads it anew."""
        self._settings().close()

    def _settings(self) -> ChatSettings:
        return ChatSettings(self)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that shares the wrapped LLM: a model's weights are never held twice."""
        return super().__deepcopy__({**(memo or {}), id(self.llm): self.llm})

    def __getstate__(self) -> dict[Any, Any]:
        if self.llm is not None:
            raise UnsupportedFeatureError(
                f"a chat model that wraps a {type(self.llm).__name__} cannot be pickled, since its weights would be "
                "written too: name the model with model= instead of llm="
            )
        return super().__getstate__()
