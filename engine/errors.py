"""The exceptions that a person's input or machine can cause.

Every message gives the value, the limit and the remedy. Broken invariants of our own are asserts, not these.
"""


class CacheSlideError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(CacheSlideError, ValueError):
    """A setting that does not exist or a value outside its limits."""


class PromptError(CacheSlideError, ValueError):
    """A prompt that cannot be served: empty, malformed or wrongly tagged."""


class ContextLengthError(PromptError):
    """A prompt with more tokens than the context or the page pool holds."""

    def __init__(self, num_tokens: int, limit_tokens: int, remedy: str) -> None:
        self.num_tokens = num_tokens
        self.limit_tokens = limit_tokens
        super().__init__(
            f"the prompt has {num_tokens} tokens, but the maximum context length is {limit_tokens} tokens "
            f"(one is kept for the answer): {remedy}"
        )


class ModelError(CacheSlideError):
    """A model that cannot be found, read or served exactly."""


class ModelNotInstalledError(ModelError):
    """The bundled model's package is absent; the message names the command that installs it."""


class UnsupportedModelError(ModelError):
    """A model whose reuse would not be exact here; the message says why and what is supported."""


class CacheFolderError(CacheSlideError, OSError):
    """The user's cache folder cannot be written: read-only, full or locked."""


class RequestCancelledError(CacheSlideError):
    """The request was cancelled before it finished."""


class EngineClosedError(CacheSlideError):
    """The engine was closed; load a new one."""
