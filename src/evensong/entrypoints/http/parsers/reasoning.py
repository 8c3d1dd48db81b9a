"""Reasoning and what follows it."""

from __future__ import annotations

from collections.abc import Iterable

from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.engine.frontend.reasoning import Phase, ReasoningFormat
from evensong.entrypoints.http.parsers.base import Delta
from evensong.entrypoints.http.parsers.markers import num_held


class ReasoningParser:
    """For one output, which begins in `phase`. White space at the edges of reasoning, and after it, is dropped."""

    def __init__(self, form: ReasoningFormat, phase: Phase) -> None:
        self._start = form.start_marker
        self._end = form.end_marker
        # before: nothing but white space, perhaps with a part of the start marker, has come.
        self._state = "after" if phase == "done" else "before"
        self._open = phase == "open"
        self._trim = False
        self._held = ""

    def push(self, text: str) -> Delta:
        """What is certain after `text`."""
        self._held += text
        reasoning = ""
        if self._state == "before":
            self._begin()
        if self._state == "inside":
            reasoning = self._reason()
        return Delta(reasoning, self._content() if self._state == "after" else "")

    def finish(self) -> Delta:
        """What was held back, now that no text follows."""
        held, self._held = self._held, ""
        if self._state == "after":
            return Delta()
        if self._state == "before" and not self._open:
            return Delta(content=held)
        return Delta(reasoning=held.strip() if self._trim or self._state == "before" else held.rstrip())

    def _begin(self) -> None:
        """Decides whether reasoning begins here: a model may write the start marker though the prompt has it."""
        bare = self._held.lstrip()
        if not bare or (len(bare) < len(self._start) and self._start.startswith(bare)):
            return
        if bare.startswith(self._start):
            self._held = bare[len(self._start) :]
            self._state, self._trim = "inside", True
        elif self._open:
            self._state, self._trim = "inside", True
        else:
            self._state = "after"

    def _reason(self) -> str:
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held
        text, marker, rest = self._held.partition(self._end)
        if marker:
            self._held, self._state, self._trim = rest, "after", True
            return text.rstrip()
        keep = len(text) - num_held(text, [self._end], spaces=True)
        self._held = text[keep:]
        return text[:keep]

    def _content(self) -> str:
        text, self._held = self._held, ""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text


class ReasoningTokens:
    """Counts an output's tokens up to the one that ends its reasoning."""

    def __init__(self, form: ReasoningFormat, phase: Phase, texts: TokenTexts) -> None:
        self._start = form.start_marker.encode()
        self._end = form.end_marker.encode()
        self._phase: Phase = phase
        self._texts = texts
        self._tail = b""
        self._num_waiting = 0

    def add(self, token_ids: Iterable[int]) -> int:
        """How many of these tokens, and of those that waited, are reasoning."""
        count = 0
        for token_id in token_ids:
            if self._phase == "done":
                break
            self._tail += self._texts.bytes_of(token_id)
            self._num_waiting += 1
            if self._phase == "undecided":
                self._decide()
            if self._phase == "open":
                count, self._num_waiting = count + self._num_waiting, 0
                if self._end in self._tail:
                    self._phase = "done"
                self._tail = self._tail[-len(self._end) :]
        return count

    def _decide(self) -> None:
        bare = self._tail.lstrip()
        if bare.startswith(self._start):
            self._phase = "open"
        elif not self._start.startswith(bare):
            self._phase = "done"
