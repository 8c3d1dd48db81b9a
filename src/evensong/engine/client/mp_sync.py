"""SyncMPClient: blocking calls to a core in a process of its own, for LLMEngine."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
import weakref
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import zmq

from evensong.config.sections import EngineConfig
from evensong.engine.client.base import SyncCoreClient
from evensong.engine.client.mp_channel import (
    CLIENT_INCARNATION,
    DEFAULT_UTILITY_SECONDS,
    IO_THREADS,
    LAUNCHER,
    ClientInbox,
    CoreChannel,
    again,
    bind,
    open_launch,
    utility_args,
)
from evensong.engine.client.resources import BackgroundResources
from evensong.protocol.errors import EngineDeadError
from evensong.protocol.kv_spec import Resources
from evensong.protocol.output import EngineCoreOutputs
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.wire import Stamp

RETRY_SECONDS = 0.005


class SyncInbox(ClientInbox):
    """The inbox of a SyncMPClient."""

    def __init__(self) -> None:
        super().__init__()
        self._outputs: queue.Queue[EngineCoreOutputs | EngineDeadError] = queue.Queue()

    def get(self) -> EngineCoreOutputs:
        """The next outputs; raises EngineDeadError after the last ones."""
        item = self._outputs.get()
        if isinstance(item, EngineDeadError):
            # Stays for whoever asks next.
            self._outputs.put(item)
            raise again(item)
        return item

    def _put(self, item: EngineCoreOutputs | EngineDeadError) -> None:
        self._outputs.put(item)


class SyncMPClient(SyncCoreClient):
    """Starts a core and talks to it; returns when the core is ready.

    Raises EngineStartError or ConfigError; nothing is left behind then. One thread reads the core's messages; calls
    may come from any thread.
    """

    def __init__(self, config: EngineConfig, launcher: str = LAUNCHER) -> None:
        self._inbox = SyncInbox()
        resources = BackgroundResources(self._inbox.fail)
        self._finalizer = weakref.finalize(self, resources)
        try:
            resources.launch = launch = open_launch(launcher, config, self._inbox.update)
            self._channel = CoreChannel(Stamp(launch.token, launch.client.client_index, CLIENT_INCARNATION))
            resources.context = context = zmq.Context(IO_THREADS)
            self._router = context.socket(zmq.ROUTER)
            bind(self._router, launch.client.requests)
            self._sending = threading.Lock()
            outputs = context.socket(zmq.PULL)
            bind(outputs, launch.client.outputs)
            wake, resources.wake = socket.socketpair()
            arguments = (outputs, wake, self._channel, self._inbox)
            reader = threading.Thread(target=_read_outputs, args=arguments, name="evensong outputs", daemon=True)
            reader.start()
            resources.reader = reader
            launch.start_core()
            self._resources = launch.wait_ready()
        except BaseException:
            self._finalizer()
            raise

    @property
    def resources(self) -> Resources:
        return self._resources

    @property
    def num_dropped(self) -> int:
        """Messages on the client's sockets that were not its core's."""
        return self._channel.num_dropped

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(self._channel.add(request))

    def abort_requests(self, request_ids: list[str]) -> None:
        self._send(self._channel.abort(request_ids))

    def get_output(self) -> EngineCoreOutputs:
        return self._inbox.get()

    def call_utility(self, verb: str, timeout: float | None = None, /, **args: Any) -> Any:
        raw = utility_args(verb, timeout, args)
        call_id, future = self._inbox.calls.open()
        seconds = DEFAULT_UTILITY_SECONDS if timeout is None else timeout
        try:
            self._send(self._channel.utility(call_id, verb, raw))
            return future.result(seconds)
        except FutureTimeoutError:
            raise TimeoutError(f"{verb} was not answered within {seconds:g} s") from None
        finally:
            self._inbox.calls.forget(call_id)

    def shutdown(self) -> None:
        self._finalizer()

    def _send(self, frames: list[bytes]) -> None:
        while True:
            if self._inbox.dead is not None:
                raise again(self._inbox.dead)
            with self._sending:
                with contextlib.suppress(zmq.Again):
                    while True:
                        self._channel.check(self._router.recv_multipart(zmq.NOBLOCK))
                try:
                    self._router.send_multipart(frames, zmq.NOBLOCK)
                    return
                except zmq.ZMQError as error:
                    if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                        raise
            # The core is alive but its connection is not there yet, or is being made again.
            time.sleep(RETRY_SECONDS)


def _read_outputs(outputs: zmq.Socket[bytes], wake: socket.socket, channel: CoreChannel, inbox: SyncInbox) -> None:
    """The reader thread: ends when the other end of `wake` is closed."""
    poller = zmq.Poller()
    poller.register(outputs, zmq.POLLIN)
    poller.register(wake.fileno(), zmq.POLLIN)
    with wake, outputs:
        while True:
            ready = dict(poller.poll())
            if wake.fileno() in ready:
                return
            try:
                message = channel.read(outputs.recv_multipart(zmq.NOBLOCK))
                if message is not None:
                    inbox.deliver(message)
            except zmq.Again:
                continue
            except Exception as error:
                inbox.fail(EngineDeadError(f"the outputs of the engine core cannot be read: {error!r}"))
                return
