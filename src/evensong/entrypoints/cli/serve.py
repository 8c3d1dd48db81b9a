"""`evensong serve`: the launcher. It binds the port, starts the other processes, watches them, and ends them.

No torch and no HTTP framework here. Only this process answers Ctrl-C and SIGTERM: the first drains, a second forces.
"""

from __future__ import annotations

import dataclasses
import queue
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from setproctitle import setproctitle

from evensong.config.sections import EngineConfig, ServerConfig
from evensong.engine.launch import Launch
from evensong.engine.launch_table import HTTP, LAUNCHER_TITLE, LIMITS, PROCESS_TABLE, Limits, ProcessRow
from evensong.entrypoints.cli.keys import API_KEY_VARIABLE, keys_in_environment
from evensong.protocol.errors import ConfigError, EvensongError
from evensong.protocol.handshake import FETCHING, LOADING, STARTED, Membership
from evensong.protocol.kv_spec import Resources
from evensong.sources.generation_config import load_generation_defaults
from evensong.sources.resolve import resolve_model
from evensong.utils.logging import JSON, TEXT, configure_logging, get_logger
from evensong.utils.net import ListenError, base_url, listening_socket
from evensong.utils.tls import TLSError, server_context

logger = get_logger(__name__)

DRAINED, FAILURE, USAGE, FORCED = 0, 1, 2, 130
# How long clients can still read the cause from /health after the core died.
LAST_WORDS_SECONDS = 3.0
POLL_SECONDS = 0.05


class Interrupted(BaseException):
    """A signal ends what the main thread waits for."""


class Signals:
    """SIGINT and SIGTERM: the first is an event, or an Interrupted where nothing can be drained yet; a second forces.

    Handlers are put back by `restore()`.
    """

    def __init__(self, events: queue.SimpleQueue[object]) -> None:
        self.count = 0
        self.interrupt = False
        self.deaf = False
        self._events = events
        kinds = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            kinds.append(signal.SIGHUP)
        self._previous = {kind: signal.signal(kind, self._handle) for kind in kinds}

    def restore(self) -> None:
        """The handlers from before."""
        for kind, handler in self._previous.items():
            signal.signal(kind, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.deaf:
            return
        self.count += 1
        if self.interrupt or self.count > 1:
            raise Interrupted
        # Safe in a handler: SimpleQueue.put may interrupt itself.
        self._events.put(None)


class Server:
    """One `serve`: its launch and its end. `run()` returns the exit code."""

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        listener: socket.socket,
        table: Mapping[str, ProcessRow] = PROCESS_TABLE,
        limits: Limits = LIMITS,
    ) -> None:
        self._config = config
        self._server = server
        self._listener = listener
        self._limits = limits
        self._log_format = config.observability.log_format
        self._url = base_url(listener, "https" if server.ssl_certfile else "http")
        self._began = time.monotonic()
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._signals = Signals(self._events)
        self._launch = Launch(config, self._changed, table=table, limits=limits)

    def run(self) -> int:
        """Starts, serves, ends; every process of the launch is gone when it returns."""
        code = self._guarded()
        try:
            self._launch.close()
        except Interrupted:
            code = FORCED
        finally:
            self._signals.deaf = True
            self._launch.force()
            self._signals.restore()
        return code

    def _guarded(self) -> int:
        try:
            return self._run()
        except Interrupted:
            return FORCED if self._signals.count > 1 else DRAINED
        except EvensongError as error:
            # In one line: the person who typed the command needs no traceback.
            complain(str(error), self._log_format)
            return USAGE if isinstance(error, ConfigError) else FAILURE

    def _run(self) -> int:
        self._launch.start_http(self._server, self._listener)
        # The HTTP process has the socket now; connections it does not take must be refused once it is gone.
        self._listener.close()
        self._launch.set_phase(FETCHING)
        self._fetch()
        self._launch.set_phase(LOADING)
        self._launch.start_core()
        resources = self._await_ready()
        if resources is None:
            return DRAINED
        self._launch.set_phase(STARTED)
        self._announce(resources)
        while self._launch.fault is None and not self._signals.count:
            self._events.get()
        return self._drain() if self._launch.fault is None else self._die(self._launch.fault)

    def _fetch(self) -> None:
        """The model's files, fetched on first use; a signal ends it at once."""
        self._signals.interrupt = True
        if self._signals.count:
            raise Interrupted
        own = self._config.model
        source = resolve_model(own.model, revision=own.revision)
        # What is wrong with these is said before anything loads.
        load_generation_defaults(source, own.generation_config, own.override_generation_config)
        self._signals.interrupt = False

    def _await_ready(self) -> Resources | None:
        """What the core learned; None when a signal came first. Raises what went wrong."""
        while not self._signals.count:
            if self._launch.fault is not None:
                raise self._launch.fault
            members = self._launch.membership.members
            if members and members[0].resources is not None and self._launch.is_ready(HTTP):
                return members[0].resources
            self._events.get()
        logger.info("stopping before the engine was ready")
        return None

    def _drain(self) -> int:
        seconds = self._server.shutdown_timeout
        logger.info("draining: running requests get up to %g s; a second signal forces the end", seconds)
        self._launch.drain(seconds)
        until = time.monotonic() + seconds + self._limits.exit
        while not self._launch.wait_gone(HTTP, POLL_SECONDS) and time.monotonic() < until:
            if self._launch.fault is not None:
                return self._die(self._launch.fault)
        self._launch.close()
        logger.info("drained")
        return DRAINED

    def _die(self, fault: EvensongError) -> int:
        complain(str(fault), self._log_format)
        until = time.monotonic() + LAST_WORDS_SECONDS
        while time.monotonic() < until and not self._signals.count and not self._launch.wait_gone(HTTP, POLL_SECONDS):
            continue
        return FAILURE

    def _changed(self, membership: Membership, fault: EvensongError | None) -> None:
        self._events.put(None)

    def _announce(self, resources: Resources) -> None:
        for phase, seconds in resources.phases.items():
            logger.info("%6.2f s  %s", seconds, phase)
        logger.info("%6.2f s  from the command to ready", time.monotonic() - self._began)
        num_groups = len(resources.layer_groups)
        logger.info(
            "%d KV blocks of %d tokens%s, up to %d tokens a request, %d requests a step",
            resources.num_blocks,
            resources.block_size,
            f" in {num_groups} layer groups" if num_groups > 1 else "",
            resources.max_model_len,
            resources.max_num_seqs,
        )
        model = self._config.model.served_model_name or self._config.model.model
        for line in ready_lines(self._url, model, with_key=bool(self._server.api_key)):
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def ready_lines(url: str, model: str, with_key: bool) -> list[str]:
    """What to paste to chat with the server at `url`."""
    key = f" -H 'Authorization: Bearer '${API_KEY_VARIABLE}" if with_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return [
        f"evensong serves {model} at {url}/v1",
        f"  chat:  {own_command()} chat --url {url}/v1",
        f"  curl:  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'",
    ]


def own_command() -> str:
    """How a shell in this folder finds this program: by name where PATH leads to it, else as it was called."""
    called = Path(sys.argv[0])
    found = shutil.which("evensong")
    if called.name != "evensong" or (found is not None and Path(found).resolve() == called.resolve()):
        return "evensong"
    return shlex.quote(str(called))


def complain(message: str, log_format: str = TEXT) -> None:
    """One line on stderr, in the form of log lines where those are for programs."""
    if log_format == JSON:
        logger.error("%s", message)
        return
    sys.stderr.write(f"evensong serve: {message}\n")
    sys.stderr.flush()


def serve(config: EngineConfig, server: ServerConfig) -> int:
    """Serves until a signal or a failure; returns the exit code: 0 drained, 1 failure, 2 usage, 130 forced."""
    setproctitle(LAUNCHER_TITLE)
    logs = config.observability
    configure_logging(logs.log_level, "launcher", logs.log_format)
    if not server.api_key:
        server = dataclasses.replace(server, api_key=keys_in_environment())
    try:
        # Made again where it is used; here a mistake is found before anything starts.
        server_context(server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certs, server.ssl_cert_reqs)
    except TLSError as error:
        complain(str(error), logs.log_format)
        return USAGE
    try:
        listener = listening_socket(server.host, server.port)
    except ListenError as error:
        complain(str(error), logs.log_format)
        return FAILURE
    with listener:
        return Server(config, server, listener).run()
