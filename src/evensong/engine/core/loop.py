"""CoreLoop: blocks when idle, drains its inbox before every step, and dispatches by type of message."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty

from evensong.engine.core.control import Control
from evensong.engine.core.core import EngineCore, Outputs
from evensong.engine.core.inbox import (
    Abort,
    Add,
    ClientLost,
    Compiled,
    Failure,
    Inbox,
    Message,
    Shutdown,
    Undecodable,
    Utility,
)
from evensong.engine.core.pacing import Pacing
from evensong.protocol.errors import ErrorBody
from evensong.protocol.output import Admission, EngineCoreOutput, EngineCoreOutputs, FinishReason, UtilityReply
from evensong.utils.logging import get_logger

logger = get_logger(__name__)

HELD_POLL_SECONDS = 0.05
# How long nothing may come before the KV cache is proved sound: whoever comes right away does not wait for that.
PROOF_SECONDS = 0.2
# The client that gets the scheduler's stats.
STATS_CLIENT = 0
Send = Callable[[int, EngineCoreOutputs], None]


class CoreFailure(RuntimeError):
    """The core cannot go on."""


class CoreLoop:
    """Runs a core until it is told to stop. `send` hands a client's message on and never blocks."""

    def __init__(self, core: EngineCore, inbox: Inbox, send: Send) -> None:
        self._core = core
        self._inbox = inbox
        self._send = send
        self._control = Control(core, self._send_outputs)
        self._deadline: float | None = None
        self._stats_pending = False
        self._proof_pending = False
        if core.steps.runs_one_ahead:
            # One step runs and one is planned behind it: that plan may wait for who comes meanwhile.
            core.steps.pacing = Pacing()
        core.compiling.on_ready = lambda: inbox.put(Compiled())

    def run(self) -> None:
        """Until a Shutdown was carried out. Raises what ends a core: a failed step, a failed executor."""
        while True:
            self._drain()
            if self._deadline is not None and self._stopped():
                return
            outputs, model_ran = self._core.step()
            self._stats_pending |= model_ran
            self._send_outputs(outputs, with_stats=model_ran)
            self._core.post_step(model_ran)
            self._send_late_replies()

    def _drain(self) -> None:
        """Everything in the inbox; waits for a message when there is nothing to run."""
        while True:
            idle = not self._core.has_work()
            if idle and self._inbox.empty():
                self._become_idle()
            try:
                if idle and self._deadline is None:
                    # What a pause holds back may still run out of time.
                    message = self._inbox.get(timeout=self._idle_seconds())
                elif idle and self._core.request_ids():
                    # A pause holds them, and the end is near.
                    message = self._inbox.get(timeout=HELD_POLL_SECONDS)
                elif (seconds := self._core.steps.seconds_left()) > 0.0:
                    # A step runs, and who comes now can be in the next one.
                    message = self._inbox.get(timeout=seconds)
                else:
                    message = self._inbox.get_nowait()
            except Empty:
                if idle and self._proof_pending:
                    self._proof_pending = False
                    self._core.scheduler.check_kv_cache()
                return
            self._handle(message)
            self._send_late_replies()

    def _become_idle(self) -> None:
        """Nothing runs: old aborts are dropped, clients see gauges of zero; the KV cache is proved sound, if it lasts.

        Then the workers get time of their own, until a message comes.
        """
        while not self._core.aborts.empty():
            self._core.aborts.get_nowait()
        if self._stats_pending:
            self._stats_pending = False
            self._send(STATS_CLIENT, self._message(with_stats=True))
            self._proof_pending = True
        while self._deadline is None and self._inbox.empty() and self._core.executor.use_idle_time():
            pass

    def _idle_seconds(self) -> float | None:
        """How long to wait for a message: until something is over its time, or until the proof is due."""
        left = self._core.seconds_left()
        if not self._proof_pending:
            return left
        return PROOF_SECONDS if left is None else min(left, PROOF_SECONDS)

    def _handle(self, message: Message) -> None:
        match message:
            case Add():
                self._add(message)
            case Abort():
                self._stats_pending = True
                self._send_outputs(self._core.finish_requests(message.request_ids, FinishReason.ABORT))
            case Utility():
                reply = self._control.answer(message.call)
                if reply is not None:
                    self._send(message.client_index, self._message(utility=reply))
            case Compiled():
                self._send_admissions()
            case Undecodable():
                self._answer_undecodable(message)
            case ClientLost():
                self._drop_client(message.client_index)
            case Shutdown():
                logger.info("stopping: running requests get %.1f s", message.seconds)
                deadline = time.monotonic() + message.seconds
                self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
            case Failure():
                raise CoreFailure(message.reason)

    def _send_late_replies(self) -> None:
        for client_index, reply in self._control.late_replies():
            self._send(client_index, self._message(utility=reply))

    def _add(self, message: Add) -> None:
        request = message.request
        if self._deadline is None:
            admission: Admission | None = self._core.add_request(request)
        else:
            body = ErrorBody("the engine is shutting down", 503, "server_error", retry_after=1)
            admission = Admission(request.request_id, request.attempt, refusal=body)
        self._stats_pending = True
        if admission is not None:
            self._send(message.client_index, self._message(admissions=[admission]))

    def _answer_undecodable(self, message: Undecodable) -> None:
        logger.warning("client %d sent what cannot be decoded: %s", message.client_index, message.reason)
        if message.request_id is not None:
            body = ErrorBody(f"the request could not be decoded: {message.reason}", 400)
            refused = Admission(message.request_id, message.attempt, refusal=body)
            self._send(message.client_index, self._message(admissions=[refused]))
        elif message.call_id is not None:
            failure = f"the call could not be decoded: {message.reason}"
            self._send(message.client_index, self._message(utility=UtilityReply(message.call_id, failure=failure)))

    def _drop_client(self, client_index: int) -> None:
        requests = [*self._core.scheduler.requests.values(), *self._core.compiling.requests()]
        own = [r.request_id for r in requests if r.source.client_index == client_index]
        logger.warning("client %d does not read: its %d requests end", client_index, len(own))
        self._send_outputs(self._core.finish_requests(own, FinishReason.ABORT))

    def _stopped(self) -> bool:
        """True when a shutdown is complete: nothing runs, or its time is over and what ran was aborted.

        Steps in flight are taken first: nobody waits for them, but they write into memory that ends with the workers.
        """
        if self._deadline is not None and time.monotonic() >= self._deadline:
            left = self._core.request_ids()
            self._send_outputs(self._core.finish_requests(left, FinishReason.ABORT))
        return not self._core.request_ids() and not self._core.has_work()

    def _send_admissions(self) -> None:
        for client_index, admission in self._core.take_admissions():
            self._send(client_index, self._message(admissions=[admission]))

    def _send_outputs(self, outputs: Outputs, with_stats: bool = False) -> None:
        self._send_admissions()
        for client_index, new in outputs.items():
            stats = with_stats and client_index == STATS_CLIENT
            self._send(client_index, self._message(outputs=new, with_stats=stats))
        if with_stats and STATS_CLIENT not in outputs:
            self._send(STATS_CLIENT, self._message(with_stats=True))

    def _message(
        self,
        *,
        outputs: list[EngineCoreOutput] | None = None,
        admissions: list[Admission] | None = None,
        utility: UtilityReply | None = None,
        with_stats: bool = False,
    ) -> EngineCoreOutputs:
        stats = self._core.scheduler.make_stats() if with_stats else None
        return EngineCoreOutputs(
            outputs=outputs or [], admissions=admissions or [], utility=utility, stats=stats, timestamp=time.time()
        )
