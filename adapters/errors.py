"""What an adapter cannot do in this release."""

from __future__ import annotations

from cacheslide_agents.engine.errors import CacheSlideError


class UnsupportedFeatureError(CacheSlideError, NotImplementedError):
    """A feature of a framework that this release does not serve; the message says what to do instead."""
