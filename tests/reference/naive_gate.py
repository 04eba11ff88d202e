"""A gate that keeps every measurement and works everything out anew each time it is asked."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class NaiveGate:
    """One kind of prompt. `events` holds None for a request that slid or was refused, else a measured KL."""

    share: float
    bound: float
    events: list[float | None] = field(default_factory=list)

    def replay(self) -> tuple[bool, float, float]:
        """Whether it is open, the mean, and how many requests are due to be measured."""
        is_open, kls, due, first = True, list[float](), 0.0, True
        for event in self.events:
            if event is None:
                due = min(2.0, 1.0 if first else due + (self.share if is_open else max(self.share, 0.25)))
                first = False
                continue
            due, first = max(0.0, due - 1.0), False
            kls.append(min(event, 8 * self.bound))
            mean = self._mean(kls)
            is_open = mean <= self.bound if is_open else mean <= self.bound / 2
        return is_open, self._mean(kls), due

    @staticmethod
    def _mean(kls: list[float]) -> float:
        return sum(0.25 * 0.75**age * kl for age, kl in enumerate(reversed(kls)))
