"""Stop strings in a stream of text, wherever the borders between its pieces fall."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Passes text on until a stop string is complete; holds back what may still become one.

    The text decides, not how it is cut into pieces: the stop string that is complete first ends it, and if several
    end with the same character, the longest of them is cut off.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._stops = [(string, _borders(string)) for string in dict.fromkeys(stop)]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Adds text; returns what may be shown, and whether a stop string ended it.

        Nothing of the stop string or behind it is shown. After a stop, feed no more.
        """
        if not self._stops:
            return text, False
        held = self._held + text
        for idx, char in enumerate(text, start=len(self._held)):
            complete = 0
            for stop_idx, (string, borders) in enumerate(self._stops):
                matched = self._matched[stop_idx]
                while matched and string[matched] != char:
                    matched = borders[matched - 1]
                if string[matched] == char:
                    matched += 1
                self._matched[stop_idx] = matched
                if matched == len(string):
                    complete = max(complete, matched)
            if complete:
                self._held = ""
                return held[: idx + 1 - complete], True
        shown = len(held) - max(self._matched)
        self._held = held[shown:]
        return held[:shown], False

    def flush(self) -> str:
        """Returns what was held back: the text ended, so it became no stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _borders(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is its suffix too (Knuth, Morris, Pratt)."""
    borders = [0] * len(string)
    for idx in range(1, len(string)):
        length = borders[idx - 1]
        while length and string[length] != string[idx]:
            length = borders[length - 1]
        borders[idx] = length + (string[length] == string[idx])
    return borders
