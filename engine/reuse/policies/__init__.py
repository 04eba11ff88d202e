"""The reuse policies by name; one file each."""

from __future__ import annotations

from ...config import PolicyName
from ...errors import ConfigError
from .cacheblend import CacheBlend
from .deviation import Deviation
from .epic import Epic
from .head import Head
from .interface import PlanRequest, Policy
from .paper import Paper
from .prefix import Prefix
from .promptcache import PromptCache
from .recompute import Recompute
from .slide import Slide

_ALL: tuple[Policy, ...] = (
    Recompute(),
    Prefix(),
    PromptCache(),
    CacheBlend(),
    Epic(),
    Head(),
    Deviation(),
    Slide(),
    Paper(),
)
POLICIES: dict[str, Policy] = {policy.name: policy for policy in _ALL}

__all__ = ["POLICIES", "PlanRequest", "Policy", "lesser", "policy_named"]


def policy_named(name: str) -> Policy:
    """The policy that users call `name`.

    Raises:
        ConfigError: There is none.
    """
    if not isinstance(name, str) or name not in POLICIES:
        raise ConfigError(f"policy {name!r} does not exist: use one of {', '.join(POLICIES)}")
    return POLICIES[name]


def lesser(policy: PolicyName) -> PolicyName | None:
    """What is tried where the pool does not hold a policy's donors beside the prompt; None if nothing is less."""
    if policy == "recompute":
        return None
    return "recompute" if policy == "prefix" or POLICIES[policy].isolation is not None else "prefix"
