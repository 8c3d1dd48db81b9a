"""Stop strings, matched character by character, so that how text is cut into tokens or messages cannot matter.

Each stop string is followed by a Knuth-Morris-Pratt automaton (Knuth, Morris, Pratt, 1977): its state is the length of
the longest end of the text that begins the stop string. The longest state is exactly what must be held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Follows one output's text; the match that ends first wins, the longest of those."""

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        self._stops = [(stop, _failures(stop)) for stop in stops]
        # Whether there is anything to follow.
        self.any = bool(stops)
        self._states = [0] * len(self._stops)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Text that can be shown now. After a match `matched` is set and the rest of the text is dropped.

        With `may_stop` False (before min_tokens) a match that ends here does not count.
        """
        if not self._stops:
            return text
        known = len(self._held)
        buffer = self._held + text
        for index in range(known, len(buffer)):
            found = self._step(buffer[index])
            if found and may_stop:
                self.matched = max(found, key=len)
                self._held = ""
                end = index + 1
                return buffer[: end if self._include else end - len(self.matched)]
        keep = max(self._states)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return buffer[:cut]

    def finish(self) -> str:
        """What was held back, now that no text follows."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> list[str]:
        """Feeds one character to every automaton; the stop strings that it completes."""
        found = []
        for index, (stop, failures) in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != character:
                state = failures[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                found.append(stop)
                state = failures[state - 1]
            self._states[index] = state
        return found


def _failures(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper end that is a beginning of `stop`."""
    failures = [0] * len(stop)
    state = 0
    for index in range(1, len(stop)):
        while state and stop[state] != stop[index]:
            state = failures[state - 1]
        if stop[state] == stop[index]:
            state += 1
        failures[index] = state
    return failures
