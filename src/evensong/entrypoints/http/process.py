"""The process `evensong:http-I`: uvicorn on the inherited socket, answering from its first moment."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator

import msgspec
import uvicorn
import zmq
from setproctitle import setproctitle

from evensong.config.sections import EngineConfig, ServerConfig
from evensong.engine.async_llm import AsyncLLM
from evensong.engine.client.mp_async import AsyncMPClient
from evensong.engine.core.handshake import ChildHandshake, begin_child
from evensong.engine.frontend.front import ModelFiles, load_model_files
from evensong.entrypoints.http.app import create_app
from evensong.entrypoints.http.state import ServerState
from evensong.protocol.errors import ConfigError, EngineDeadError, EvensongError
from evensong.protocol.handshake import LOADING, Bootstrap, Failed, HttpInit, Membership, Ready
from evensong.protocol.wire import MessageType, Stamp
from evensong.utils.logging import configure_logging, get_logger

logger = get_logger(__name__)

USAGE = 2
# After the drain time what still runs is aborted; its last events get this long to leave.
ABORT_SECONDS = 2.0


class HttpServer(uvicorn.Server):
    """Uvicorn without signal handlers of its own: the launcher decides."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """No handlers."""
        yield


class HttpProcess:
    """One HTTP process's life, on its event loop."""

    def __init__(self, bootstrap: Bootstrap, listener: socket.socket) -> None:
        self._bootstrap = bootstrap
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._state = ServerState(expects_settings=True)
        self._client: AsyncMPClient | None = None
        self._early: list[Membership] = []
        self._files: asyncio.Task[ModelFiles] | None = None
        self._engine_task: asyncio.Task[None] | None = None
        self._drain_task: asyncio.Task[None] | None = None
        app = create_app(self._state)
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", server_header=False)
        self._server = HttpServer(config)
        self._loop.add_signal_handler(signal.SIGTERM, self._exit_now)
        self._handshake = ChildHandshake(bootstrap, self._receive, zmq.Context())

    async def run(self) -> None:
        """Serves until the launcher says stop."""
        await self._server.serve(sockets=[self._listener])
        if self._state.engine is not None:
            self._state.engine.shutdown()
        elif self._client is not None:
            self._client.shutdown()
        self._handshake.close()

    def _receive(self, type: MessageType, payload: bytes) -> None:
        """In the handshake's thread."""
        self._loop.call_soon_threadsafe(self._on_message, type, payload)

    def _on_message(self, type: MessageType, payload: bytes) -> None:
        if type is MessageType.INIT:
            self._init(msgspec.msgpack.decode(payload, type=HttpInit))
        elif type is MessageType.MEMBERSHIP:
            self._update(msgspec.msgpack.decode(payload, type=Membership))
        elif type is MessageType.SHUTDOWN:
            seconds = msgspec.msgpack.decode(payload, type=float)
            if self._drain_task is None:
                self._drain_task = self._loop.create_task(self._drain(seconds))
            elif seconds <= 0:
                self._exit_now()

    def _init(self, init: HttpInit) -> None:
        state = self._state
        state.engine_config = msgspec.msgpack.decode(init.config, type=EngineConfig)
        state.server_config = msgspec.msgpack.decode(init.server, type=ServerConfig)
        configure_logging(state.engine_config.observability.log_level, f"http-{self._bootstrap.index}")
        stamp = Stamp(self._bootstrap.token, init.client.client_index, self._bootstrap.incarnation)
        self._client = AsyncMPClient(init.client, stamp)
        for membership in self._early:
            self._client.update_membership(membership)

    def _update(self, membership: Membership) -> None:
        self._state.phase = membership.phase
        self._state.draining |= membership.draining
        if self._client is None:
            self._early.append(membership)
        else:
            self._client.update_membership(membership)
        for member in membership.members:
            if member.state == "DEAD":
                self._state.dead_reason = self._state.dead_reason or member.reason or "killed"
        config = self._state.engine_config
        if config is None or self._client is None:
            return
        ready = any(member.state == "READY" for member in membership.members)
        if self._files is None and (ready or membership.phase == LOADING):
            # The tokenizer is read in a thread, while the core loads and others are answered.
            self._files = self._loop.create_task(
                asyncio.to_thread(load_model_files, config, self._state.server_config.chat_template)
            )
        if ready and self._engine_task is None and self._files is not None:
            self._engine_task = self._loop.create_task(self._make_engine(config, self._client, self._files))

    async def _make_engine(self, config: EngineConfig, client: AsyncMPClient, files: asyncio.Task[ModelFiles]) -> None:
        """The engine, once the core is ready and the model's files are read."""
        state = self._state
        try:
            state.engine = AsyncLLM(config, client=client, files=await files, max_n=state.server_config.max_n)
        except EvensongError as error:
            self._handshake.send(MessageType.FAILED, Failed(str(error), usage=isinstance(error, ConfigError)))
        else:
            self._handshake.send(MessageType.READY, Ready(client.resources))

    async def _drain(self, seconds: float) -> None:
        """New work is refused, running work gets `seconds`, then it is aborted; then the process ends."""
        self._state.draining = True
        if seconds > 0 and not await self._state.wait_quiet(seconds):
            logger.info("drain time is over: %d requests are aborted", self._state.num_active)
            engine = self._state.engine
            if engine is not None:
                with contextlib.suppress(EngineDeadError):
                    await engine.abort_everything()
            await self._state.wait_quiet(ABORT_SECONDS)
        self._exit_now()

    def _exit_now(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True


async def _serve(bootstrap: Bootstrap, listener: socket.socket) -> None:
    await HttpProcess(bootstrap, listener).run()


def main(arguments: list[str]) -> int:
    """`python -m evensong.entrypoints.http.process --bootstrap-fd N --listen-fd M`."""
    parser = argparse.ArgumentParser(description="a child process of evensong; start `evensong serve` instead")
    parser.add_argument("--bootstrap-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the launcher answers Ctrl-C
    bootstrap = begin_child(options.bootstrap_fd)
    setproctitle(f"evensong:http-{bootstrap.index}")
    configure_logging("info", f"http-{bootstrap.index}")
    listener = socket.socket(fileno=options.listen_fd)
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        runner.run(_serve(bootstrap, listener))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
