"""What is compared: reuse policies, each under its own settings and under fixed budgets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from cacheslide_agents.engine.config import PER_REQUEST, PaperSettings, PolicyName
from cacheslide_agents.engine.errors import ConfigError
from cacheslide_agents.engine.reuse.policies import POLICIES, policy_named

REFERENCES: tuple[PolicyName, ...] = ("recompute", "prefix")
"""Always measured: divergence is taken from the one, and times are shares of both."""


@dataclass(frozen=True)
class Variant:
    """A policy under settings of its own.

    Attributes:
        name: Names it in tables and files.
        policy: How reuse is decided.
        settings: Of `config.PER_REQUEST`, where they are not the engine's.
        computes_like: A variant measured before it, whose number of computed tokens it is given through
            `correction_share`, prompt by prompt; None leaves its settings as they are. For `slide` and `head`.
    """

    name: str
    policy: PolicyName
    settings: Mapping[str, Any] = field(default_factory=dict)
    computes_like: str | None = None


def all_policies() -> tuple[PolicyName, ...]:
    """The policies that exist."""
    return cast("tuple[PolicyName, ...]", tuple(POLICIES))


def variants(policies: Iterable[str], budgets: Iterable[float] = ()) -> list[Variant]:
    """The policies under the engine's settings, then under each budget, which they spend whole.

    Args:
        policies: Names; `recompute` and `prefix` are added.
        budgets: Shares of the slid tokens that are corrected, 0 to 1.

    Raises:
        ConfigError: A policy does not exist, or a budget is no share.
    """
    names = cast("list[PolicyName]", list(dict.fromkeys([*REFERENCES, *policies])))
    for name in names:
        policy_named(name)
    wanted = list(dict.fromkeys(budgets))
    for budget in wanted:
        if not 0.0 <= budget <= 1.0:
            raise ConfigError(f"budget {budget:g}: give a share of the slid tokens, from 0 to 1")
    made = [Variant(name, name) for name in names]
    for name in names:
        for budget in wanted:
            settings = budget_settings(name, budget)
            if settings is not None:
                made.append(Variant(f"{name} {100 * budget:g} %", name, settings))
    return made


def budget_settings(policy: PolicyName, share: float) -> dict[str, Any] | None:
    """The settings under which a policy corrects a share of the slid tokens; None if it has no such budget.

    Args:
        policy: How reuse is decided.
        share: 0 to 1.
    """
    if policy in ("head", "slide"):
        return {"correction_share": share, "staleness_bound": 0.0}
    if policy == "paper":
        return {"paper": PaperSettings(share=share)}
    own = f"{policy}_share"
    return {own: share} if own in PER_REQUEST else None
