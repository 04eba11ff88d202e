"""Two consecutive prompts of an agent: what every comparison of policies runs on."""

from __future__ import annotations

from dataclasses import dataclass

from cacheslide_agents.engine import Prompt, Segment


@dataclass(frozen=True)
class Turns:
    """Two consecutive turns of an agent.

    Attributes:
        id: Names them in figures and messages.
        first: The earlier prompt.
        second: The prompt after the update was rewritten.
        answer: Text over which divergence is measured; None takes what a full prefill answers.
        old_value: What the update said before and no longer says, or None.
    """

    id: str
    first: Prompt
    second: Prompt
    answer: str | None = None
    old_value: str | None = None


@dataclass(frozen=True)
class TurnSet:
    """Turns that are summed up together.

    Attributes:
        name: A family of the agent data, a file's name without its ending, or `samples`.
        turns: At least one.
    """

    name: str
    turns: tuple[Turns, ...]


def edited_prompts(system: str, old: str, new: str, suffix: str, query: str) -> tuple[Prompt, Prompt]:
    """The prompt before an update was rewritten, and the one after it, which asks something."""
    before, after = Segment.system(system), Segment.suffix(suffix)
    first = Prompt([before, Segment.update(old), after])
    return first, Prompt([before, Segment.update(new), after, Segment.suffix(query)])
