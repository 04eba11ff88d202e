"""Which model and tokenizer something was made with, as text that two processes agree on."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ModelIdentity(NamedTuple):
    """What tells models apart whose weights nobody wants to read.

    Attributes:
        name: The last part of the model's path or hub id.
        architecture: Family and sizes, such as `llama 30x576, 49152 ids`.
        tokenizer: Digest of the vocabulary with its ids.
    """

    name: str
    architecture: str
    tokenizer: str

    @classmethod
    def of(cls, name: str, config: Any, tokenizer: PreTrainedTokenizerBase) -> ModelIdentity:
        """The identity of a model.

        Args:
            name: As people call it, a path or a hub id included.
            config: Its transformers configuration.
            tokenizer: Its tokenizer.
        """
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        digest = hashlib.sha256("\n".join(f"{token_id} {token}" for token, token_id in vocabulary).encode())
        sizes = f"{config.num_hidden_layers}x{config.hidden_size}, {config.vocab_size} ids"
        return cls(
            name=name.replace("\\", "/").rstrip("/").rpartition("/")[2],
            architecture=f"{config.model_type} {sizes}",
            tokenizer=digest.hexdigest()[:16],
        )
