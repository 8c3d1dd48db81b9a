"""ToolParser: a text to content and calls, in any of the ways in which families of models write calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from evensong.entrypoints.http.parsers.base import Delta, ToolCallDelta
from evensong.entrypoints.http.parsers.calls import CallReader
from evensong.entrypoints.http.parsers.formats import ToolFormat
from evensong.entrypoints.http.parsers.markers import find_first, num_held

_MAX_NAMED_CHARS = 200


class ToolParser:
    """For one choice. What looks like a call and is none, or calls a tool that is not in `names`, is content.

    Once a call's name and the beginning of its arguments are there it is a call, whatever comes. White space before and
    after calls is dropped. `make_id` gives the id of a call by its index.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], make_id: Callable[[int], str]) -> None:
        self._form = form
        self._names = names
        self._make_id = make_id
        self._named_head = re.compile(rf"([A-Za-z0-9_.-]+)(?:\[CALL_ID\]\w+)?(?:{re.escape(form.named)})?\s*")
        self._state: Callable[[], bool] = self._before if form.bare else self._text
        self._buffer = ""
        # What is no content if a call follows.
        self._held = ""
        self._spaces = ""
        self._said = True
        self._reader: CallReader | None = None
        self._in_array = False
        self._num_calls = 0
        self._out = Delta()

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._num_calls > 0

    def push(self, text: str) -> Delta:
        """What is certain after `text`."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        out, self._out = self._out, Delta()
        return out

    def finish(self) -> Delta:
        """What was held back, now that no text follows."""
        while not self._ends():
            while self._buffer and self._state():
                pass
        if self._said:
            self._out.content += self._spaces
        out, self._out, self._spaces = self._out, Delta(), ""
        return out

    def _ends(self) -> bool:
        """Decides what waits for more; False where that leaves a text to be read again."""
        begun = self._reader is not None and self._reader.started
        if self._state in (self._open, self._named) or (self._reader is not None and not begun):
            self._fail()
            return False
        cut_closer = self._state == self._after and self._form.closer.startswith(self._buffer.strip())
        if not begun and not cut_closer:
            self._say(self._buffer)
        self._buffer = ""
        return True

    # States: each takes what it can of the buffer; False where it waits for more.

    def _before(self) -> bool:
        """Nothing but white space has come; calls may stand here without an opener."""
        bare = self._buffer.lstrip()
        if not bare:
            return False
        if bare[0] == "{" or (bare[0] == "[" and self._form.arrays):
            self._held, self._buffer = self._buffer[: -len(bare)], bare
            self._state = self._open
        else:
            self._state = self._text
        return True

    def _text(self) -> bool:
        at, opener = find_first(self._buffer, self._form.openers)
        if at < 0:
            keep = len(self._buffer) - num_held(self._buffer, self._form.openers)
            self._say(self._buffer[:keep])
            self._buffer = self._buffer[keep:]
            return False
        self._say(self._buffer[:at])
        self._held, self._buffer = opener, self._buffer[at + len(opener) :]
        self._state = self._open
        return True

    def _open(self) -> bool:
        """A call should begin here."""
        bare = self._buffer.lstrip()
        self._held += self._buffer[: len(self._buffer) - len(bare)]
        self._buffer = bare
        if not bare:
            return False
        if bare[0] == "{":
            self._reader = CallReader(self._names)
            self._state = self._call
        elif bare[0] == "[" and self._form.arrays and not self._in_array:
            self._in_array = True
            self._held, self._buffer = self._held + "[", bare[1:]
        elif self._form.named and not self._in_array:
            self._state = self._named
        else:
            self._fail()
        return True

    def _named(self) -> bool:
        """A name, and its arguments after a mark."""
        head, brace, _ = self._buffer.partition("{")
        if len(head) > _MAX_NAMED_CHARS or "\n" in head:
            self._fail()
            return True
        if not brace:
            return False
        match = self._named_head.fullmatch(head)
        if match is None or match[1] not in self._names:
            self._fail()
            return True
        self._held, self._buffer = self._held + head, self._buffer[len(head) :]
        self._reader = CallReader(self._names, match[1])
        self._state = self._call
        return True

    def _call(self) -> bool:
        reader = self._reader
        assert reader is not None
        fresh = not reader.started
        self._buffer = self._buffer[reader.push(self._buffer) :]
        if reader.failed:
            self._fail()
            return True
        if reader.started:
            self._announce(reader, fresh)
        if reader.ended:
            self._reader = None
            self._state = self._after
        return reader.ended

    def _after(self) -> bool:
        """A call has ended: what closes it, or another."""
        form, bare = self._form, self._buffer.lstrip()
        if not bare or (len(bare) < len(form.closer) and form.closer.startswith(bare)):
            return False
        spaces = self._buffer[: -len(bare)]
        if form.closer and bare.startswith(form.closer):
            self._buffer, self._in_array, self._state = bare[len(form.closer) :], False, self._text
        elif self._in_array and bare[0] == "]":
            self._buffer, self._in_array, self._state = bare[1:], False, self._text
        elif bare[0] in ("," if self._in_array else form.separators):
            self._held, self._buffer, self._state = spaces + bare[0], bare[1:], self._open
        elif bare[0] == "{" and form.bare and not self._in_array:
            self._held, self._buffer, self._state = spaces, bare, self._open
        else:
            self._in_array, self._state = False, self._text
        return True

    def _fail(self) -> None:
        """It was no call: what opened it is content, the rest is read again."""
        raw = "" if self._reader is None else self._reader.raw
        self._say(self._held)
        self._held, self._buffer = "", raw + self._buffer
        self._reader, self._in_array, self._state = None, False, self._text
        if not self._form.openers:
            self._say(raw)
            self._buffer = self._buffer[len(raw) :]

    def _announce(self, reader: CallReader, fresh: bool) -> None:
        arguments = reader.take()
        calls = self._out.tool_calls
        if fresh:
            self._held = self._spaces = ""
            self._said = False
            calls.append(ToolCallDelta(self._num_calls, self._make_id(self._num_calls), reader.name, arguments))
            self._num_calls += 1
        elif arguments:
            calls.append(ToolCallDelta(self._num_calls - 1, None, None, arguments))

    def _say(self, text: str) -> None:
        """Content; white space at its end waits for what follows."""
        text = self._spaces + text
        said = text.rstrip()
        self._spaces = text[len(said) :]
        self._out.content += said
        self._said = self._said or bool(said)
