"""Checks what a person hands to an engine's methods, before it reaches the engine's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .config import EngineConfig, PolicyName, SamplingParams
from .errors import ConfigError, PromptError
from .reuse.policies import policy_named
from .run.request import Call
from .segments import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def checked_call(
    prompt: Prompt, session: str | None, namespace: str | None, policy: PolicyName | None, config: EngineConfig
) -> Call:
    """The call; what is None is the configuration's, but for the session.

    Raises:
        PromptError: The prompt is no prompt.
        ConfigError: The policy does not exist, or something has a wrong type.
    """
    return Call(
        checked_prompt(prompt),
        checked_session(session),
        checked_namespace(namespace, config),
        checked_policy(policy, config),
    )


def checked_prompt(prompt: Prompt) -> Prompt:
    """The prompt.

    Raises:
        PromptError: It is something else.
    """
    if not isinstance(prompt, Prompt):
        raise PromptError(f"the prompt is a {_kind(prompt)}: give Prompt([Segment.suffix(text)])")
    return prompt


def checked_params(params: SamplingParams | None) -> SamplingParams:
    """The sampling parameters; the defaults for None.

    Raises:
        ConfigError: They are something else.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"the sampling parameters are a {_kind(params)}: give SamplingParams(max_tokens=…)")
    return params


def checked_session(session: str | None) -> str | None:
    """The session's name, or None.

    Raises:
        ConfigError: It is no text. Another type would be another session than its own text.
    """
    if session is not None and not isinstance(session, str):
        raise ConfigError(f"session = {session!r} is a {_kind(session)}: give a text, such as a thread id, or None")
    return session


def checked_namespace(namespace: str | None, config: EngineConfig) -> str:
    """The tenant; the configuration's for None. An empty one is refused: it must not fall to the default tenant.

    Raises:
        ConfigError: It is no text, or empty.
    """
    if namespace is None:
        return config.namespace
    if not isinstance(namespace, str) or not namespace:
        raise ConfigError(f"namespace = {namespace!r}: give a non-empty text, or None for {config.namespace!r}")
    return namespace


def checked_policy(policy: PolicyName | None, config: EngineConfig) -> PolicyName:
    """The policy's name; the configuration's for None.

    Raises:
        ConfigError: There is no such policy.
    """
    if policy is None:
        return config.policy
    policy_named(policy)
    return policy


def continuation_ids(continuation: str | Sequence[int], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """A continuation as token ids, (tokens,) int64; a text is tokenized by itself.

    Raises:
        PromptError: It is empty, cannot be encoded or is no list of token ids.
    """
    ids: Any = text_ids(continuation, tokenizer) if isinstance(continuation, str) else continuation
    try:
        token_ids = np.asarray(ids)
    except (OverflowError, TypeError, ValueError):
        token_ids = np.empty((), dtype=np.object_)
    if token_ids.ndim == 1 and not len(token_ids):
        raise PromptError("the continuation is empty: give text or token ids whose logits are wanted")
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu" or token_ids.dtype.itemsize > 8:
        raise PromptError(f"the continuation {str(continuation)[:80]!r} is neither a text nor a list of token ids")
    return token_ids.astype(np.int64)


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids of a text, without special tokens.

    Raises:
        PromptError: It holds a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text holds the lone surrogate {text[error.start]!r} at character {error.start}, which no encoding "
            "can carry: remove it, or decode the text's source with errors='replace'"
        ) from None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
