"""ResponseStore: responses that can be read again, continued, followed and cancelled. In memory, and bounded."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from evensong.engine.frontend.chat_messages import MAX_MESSAGES
from evensong.entrypoints.http.forms_out import encode
from evensong.protocol.errors import RequestError

PREFIX = "resp_"
MAX_RESPONSES = 10_000
_ITEM_ID = re.compile(r"(?:rs|msg|fc|in)_(.+)_\d+")


@dataclass
class EventLog:
    """The events of a response that runs in the background, for whoever follows them."""

    events: list[bytes] = field(default_factory=list)
    closed: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def append(self, event: bytes) -> None:
        """One more event; its sequence number is its place."""
        self.events.append(event)
        self._wake()

    def close(self) -> None:
        """There will be no more."""
        self.closed = True
        self._wake()

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """The events from number `start` on, as they come."""
        while True:
            changed = self._changed
            while start < len(self.events):
                yield self.events[start]
                start += 1
            if self.closed and start >= len(self.events):
                return
            if changed is self._changed:
                await changed.wait()

    def _wake(self) -> None:
        # Everybody waits for an event of their own time: one that is set stays set.
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass
class Stored:
    """One response. Its JSON is kept as bytes, so that what it takes is known."""

    name: str
    owner: str | None
    previous: str | None
    items: bytes
    response: bytes = b"{}"
    background: bool = False
    log: EventLog | None = None
    task: asyncio.Task[None] | None = None
    finished: bool = False

    @property
    def id(self) -> str:
        """The response's id."""
        return PREFIX + self.name

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        logged = sum(map(len, self.log.events)) if self.log is not None else 0
        return len(self.items) + len(self.response) + logged


class ResponseStore:
    """At most `max_responses` of at most `max_bytes` in all: beyond that the ones that were not used for longest go.

    Only those that are finished count and go: what runs is bounded by the engine's queue. Each response belongs to the
    API key that asked for it; to others it is not there.
    """

    def __init__(self, max_bytes: int, max_responses: int = MAX_RESPONSES) -> None:
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._running: dict[str, Stored] = {}
        self._finished: OrderedDict[str, Stored] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self.num_bytes = 0

    @property
    def keeps_some(self) -> bool:
        """Whether a response can be read again at all."""
        return self._max_bytes > 0

    def __len__(self) -> int:
        return len(self._running) + len(self._finished)

    def holds(self, name: str) -> bool:
        """Whether a name is taken, by whomever."""
        return name in self._running or name in self._finished

    def open(self, stored: Stored) -> None:
        """A response begins."""
        assert not self.holds(stored.name)
        self._running[stored.name] = stored

    def close(self, stored: Stored, response: dict[str, Any]) -> None:
        """A response has ended; nothing to do for one that was dropped meanwhile."""
        stored.response, stored.finished = encode(response), True
        if stored.log is not None:
            stored.log.close()
        if self._running.pop(stored.name, None) is None:
            return
        self._finished[stored.name] = stored
        self._sizes[stored.name] = stored.num_bytes
        self.num_bytes += stored.num_bytes
        while self._finished and (self.num_bytes > self._max_bytes or len(self._finished) > self._max_responses):
            self.drop(next(iter(self._finished.values())))

    def drop(self, stored: Stored) -> None:
        """Forgets a response."""
        self._running.pop(stored.name, None)
        if self._finished.pop(stored.name, None) is not None:
            self.num_bytes -= self._sizes.pop(stored.name)

    def find(self, owner: str | None, response_id: str, param: str = "response_id") -> Stored:
        """The response of an id. Raises RequestError (404) for one that is not there, or belongs to somebody else."""
        name = response_id.removeprefix(PREFIX)
        stored = self._running.get(name) or self._finished.get(name)
        if stored is None or stored.owner != owner or response_id != stored.id:
            raise RequestError(
                f"there is no response {response_id!r:.200}; this server keeps responses in memory, the latest ones",
                status=404,
                type="not_found_error",
                param=param,
                code="response_not_found",
            )
        if name in self._finished:
            self._finished.move_to_end(name)
        return stored

    def items_before(self, owner: str | None, previous: str | None) -> list[dict[str, Any]]:
        """The items of a conversation up to the response `previous`: inputs and outputs, the oldest first.

        Raises RequestError where a response of it is not there, has not ended, or failed.
        """
        turns: list[list[dict[str, Any]]] = []
        count = 0
        while previous is not None:
            stored = self.find(owner, previous, "previous_response_id")
            if not stored.finished:
                raise RequestError(f"the response {previous!r:.200} has not ended", param="previous_response_id")
            answer = msgspec.json.decode(stored.response)
            if answer["status"] not in ("completed", "incomplete"):
                raise RequestError(
                    f"the response {previous!r:.200} is {answer['status']} and cannot be continued",
                    param="previous_response_id",
                )
            turns.append([*msgspec.json.decode(stored.items), *answer["output"]])
            count += len(turns[-1])
            if count > MAX_MESSAGES:
                raise RequestError(f"the conversation has more than {MAX_MESSAGES} items", param="input")
            previous = stored.previous
        return [item for turn in reversed(turns) for item in turn]

    def item(self, owner: str | None, item_id: str) -> dict[str, Any]:
        """An item of a stored response. Raises RequestError (404) for one that is not there."""
        match = _ITEM_ID.fullmatch(item_id)
        if match is not None:
            stored = self.find(owner, PREFIX + match[1], "input")
            answer = msgspec.json.decode(stored.response)
            for item in [*msgspec.json.decode(stored.items), *answer.get("output", ())]:
                if item.get("id") == item_id:
                    return dict(item)
        raise RequestError(
            f"there is no item {item_id!r:.200}", status=404, type="not_found_error", param="input", code="not_found"
        )
