"""The token ids that the model sampled for its replies, found again by their text.

A reply that comes back in the next prompt would be tokenized anew, and canonical ids often differ from sampled ones:
the cached KV would end there. Tokenization asks here for each piece of text between two control tokens. Knows text and
ids only: no tokenizer, no cache.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from .index import SpaceKey

MAX_REPLIES = 256
MAX_SESSIONS = 1024


class ReplyBook:
    """The replies of one session, the least recently used forgotten first."""

    def __init__(self, max_replies: int = MAX_REPLIES) -> None:
        self._max_replies = max_replies
        self._ids: OrderedDict[str, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def remember(
        self,
        header_text: str,
        header_ids: np.ndarray,
        text: str,
        token_ids: np.ndarray,
        canonical_ids: np.ndarray | None = None,
    ) -> None:
        """Notes the ids of a reply.

        Args:
            header_text: The prompt's text after its last control token, such as `assistant` and a line break.
            header_ids: (n,) int64: its ids in the prompt.
            text: The reply; exactly what `token_ids` decode to. A reply cut inside a token by a stop string must not
                be noted.
            token_ids: (n,) int64: the sampled ids, without the token that ended the reply.
            canonical_ids: The tokenizer's own ids of header and reply, if known: where they are the same there is
                nothing to note, and what was noted for that text is out of date.
        """
        key = header_text + text
        ids = np.concatenate([header_ids, token_ids]).astype(np.int64)
        ids.flags.writeable = False
        self._ids.pop(key, None)
        if not text or (canonical_ids is not None and np.array_equal(ids, canonical_ids)):
            return
        self._ids[key] = ids
        while len(self._ids) > self._max_replies:
            self._ids.popitem(last=False)

    def lookup(self, piece_text: str) -> np.ndarray | None:
        """The ids to use for a piece of prompt text between two control tokens, or None for the canonical ones.

        Returns:
            (n,) int64, read-only: header and reply, if the piece is exactly a header and a reply noted behind it.
        """
        ids = self._ids.get(piece_text)
        if ids is not None:
            self._ids.move_to_end(piece_text)
        return ids


class ReplyBooks:
    """A book for each session of each space, the least recently used forgotten first."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._books: OrderedDict[tuple[SpaceKey, str], ReplyBook] = OrderedDict()

    def __len__(self) -> int:
        return len(self._books)

    def book(self, space: SpaceKey, session: str | None) -> ReplyBook:
        """The session's book, made at first use. Without a session an empty one that nobody else sees."""
        if session is None:
            return ReplyBook()
        key = (space, session)
        if key not in self._books:
            self._books[key] = ReplyBook()
        self._books.move_to_end(key)
        while len(self._books) > self._max_sessions:
            self._books.popitem(last=False)
        return self._books[key]

    def forget(self, namespace: str, session: str) -> None:
        """Drops the session's books, whatever the template."""
        for space, owner in list(self._books):
            if (space.namespace, owner) == (namespace, session):
                del self._books[space, owner]
