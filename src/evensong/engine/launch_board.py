"""What a launch knows of its processes: one state machine a process, one verdict for the whole.

    NEW --HELLO--> CONNECTED --READY--> READY        any --exit, FAILED, too late--> DEAD

Pure bookkeeping without processes or sockets; the handshake thread writes it, any thread reads it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from evensong.engine.launch_table import CORE, Limits
from evensong.protocol.errors import ConfigError, EngineDeadError, EngineStartError, EvensongError
from evensong.protocol.handshake import Failed, Member, Membership
from evensong.protocol.kv_spec import Resources

NEW, CONNECTED, READY, DEAD = "NEW", "CONNECTED", "READY", "DEAD"
Key = tuple[str, int]


@dataclass
class Slot:
    """One process of the launch. `deadline` is on the monotonic clock, None when nothing is awaited."""

    role: str
    index: int
    title: str
    incarnation: int
    deadline: float | None
    state: str = NEW
    resources: Resources | None = None
    reason: str | None = None
    identity: bytes = b""


class Board:
    """The state of every process, whether the launch drains or closes, and the first fault, if any."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._slots: dict[Key, Slot] = {}
        self._changed = threading.Condition()
        self._draining = False
        self._closing = False
        self._phase = ""
        self._fault: EvensongError | None = None

    @property
    def fault(self) -> EvensongError | None:
        """The first failure of a process that was to live; it ends the launch."""
        with self._changed:
            return self._fault

    def membership(self) -> Membership:
        """A snapshot for front ends: every core, in order."""
        with self._changed:
            members = [
                Member(slot.index, slot.incarnation, slot.state, slot.resources, slot.reason)
                for slot in self._slots.values()
                if slot.role == CORE
            ]
            return Membership(members, self._draining, self._phase)

    def slot(self, key: Key) -> Slot | None:
        """The process at `key`, None if there is none."""
        with self._changed:
            return self._slots.get(key)

    def find(self, identity: bytes, incarnation: int) -> Key | None:
        """The living process that said HELLO from `identity`."""
        with self._changed:
            for key, slot in self._slots.items():
                if slot.identity == identity and slot.incarnation == incarnation and slot.state != DEAD:
                    return key
        return None

    def states(self, role: str) -> dict[Key, str]:
        """The state of every process of `role`."""
        with self._changed:
            return {key: slot.state for key, slot in self._slots.items() if key[0] == role}

    def add(self, role: str, index: int, title: str, incarnation: int = 1) -> None:
        """A process that was just started."""
        with self._changed:
            deadline = time.monotonic() + self._limits.connect
            self._slots[role, index] = Slot(role, index, title, incarnation, deadline)
            self._changed.notify_all()

    def hello(self, key: Key, identity: bytes) -> bool:
        """The process runs and can be reached at `identity`; False if it is not expected."""
        with self._changed:
            slot = self._slots.get(key)
            if slot is None or slot.state != NEW:
                return False
            slot.identity = identity
            slot.deadline = time.monotonic() + self._limits.ready if slot.role == CORE else None
            self._move(slot, CONNECTED)
            return True

    def ready(self, key: Key, resources: Resources) -> bool:
        """The process can take requests; False if it is not expected."""
        with self._changed:
            slot = self._slots.get(key)
            if slot is None or slot.state != CONNECTED:
                return False
            slot.resources = resources
            slot.deadline = None
            self._move(slot, READY)
            return True

    def failed(self, key: Key, failure: Failed) -> None:
        """The process says that it cannot start."""
        error = ConfigError(failure.message) if failure.usage else EngineStartError(failure.message)
        self._die(key, failure.message, error)

    def exited(self, key: Key, ending: str) -> None:
        """The process is gone; `ending` says how, in one line."""
        slot = self.slot(key)
        if slot is None:
            return
        text = f"{slot.title} died in state {slot.state} ({ending})"
        started = slot.state == READY or slot.role != CORE
        self._die(key, text, EngineDeadError(text) if started else EngineStartError(text))

    def broken(self, reason: str) -> None:
        """The launch itself cannot go on."""
        with self._changed:
            self._fault = self._fault or EngineDeadError(reason)
            self._changed.notify_all()

    def expire(self, now: float) -> list[Key]:
        """Processes that took too long; they are dead from now on and must be killed."""
        late = []
        for key, slot in list(self._slots.items()):
            if slot.deadline is not None and now >= slot.deadline and slot.state != DEAD:
                waited = self._limits.connect if slot.state == NEW else self._limits.ready
                text = f"{slot.title} was still in state {slot.state} after {waited:g} s"
                self._die(key, text, EngineStartError(text))
                late.append(key)
        return late

    def next_deadline(self) -> float | None:
        """When `expire` has something to look at, on the monotonic clock."""
        with self._changed:
            return min((s.deadline for s in self._slots.values() if s.deadline is not None), default=None)

    def change(self, *, phase: str | None = None, draining: bool = False, closing: bool = False) -> None:
        """What the launch itself does. `phase`: what start-up is busy with, for whoever asks while it lasts.

        `draining`: front ends refuse new requests and end. `closing`: every process is expected to end.
        """
        with self._changed:
            self._phase = self._phase if phase is None else phase
            self._draining |= draining
            self._closing |= closing
            if closing:
                for slot in self._slots.values():
                    slot.deadline = None
            self._changed.notify_all()

    def wait_ready(self) -> list[Resources]:
        """Blocks until every core is READY; raises the fault, or EngineStartError when the launch was closed."""
        with self._changed:
            while True:
                if self._fault is not None:
                    raise self._fault
                if self._closing:
                    raise EngineStartError("the engine was closed while it started")
                cores = [slot for slot in self._slots.values() if slot.role == CORE]
                if cores and all(slot.resources is not None for slot in cores):
                    return [slot.resources for slot in cores if slot.resources is not None]
                self._changed.wait()

    def _move(self, slot: Slot, state: str) -> None:
        slot.state = state
        self._changed.notify_all()

    def _die(self, key: Key, reason: str, error: EvensongError) -> None:
        with self._changed:
            slot = self._slots.get(key)
            if slot is None or slot.state == DEAD:
                return
            slot.deadline = None
            slot.reason = reason
            expected = self._closing or (self._draining and slot.role != CORE)
            self._move(slot, DEAD)
            if not expected and self._fault is None:
                self._fault = error
