"""`evensong run-batch -i FILE -o FILE`: OpenAI batch files, answered by the server's own application on an engine here.

Input and output are those of the OpenAI Batch API: one JSON object a line. Answers come in any order.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import msgspec
from tqdm import tqdm

from evensong.config.resolve import EngineArgs, resolve
from evensong.config.sections import ServerConfig
from evensong.engine.async_llm import AsyncLLM
from evensong.entrypoints.cli.flags import Parser, add_engine_flags, engine_values
from evensong.entrypoints.http.app import create_app
from evensong.entrypoints.http.state import ServerState
from evensong.protocol.errors import ConfigError
from evensong.utils.progress import ProgressPage

FAILURE = 1
URLS = ("/v1/chat/completions", "/v1/completions")
# Refusals that come from load, not from the request: it is sent again after this long, or up to twice as long.
BUSY, BUSY_SECONDS = (429, 503), 0.5
# Where nothing else ran, so often, it is the request after all: too many prompts for a limit that was set, say.
TRIES_ALONE = 3
# In flight beyond what a step takes, so that a place that becomes free is filled at once.
WAITING = 16


class Line(msgspec.Struct):
    """One request of a batch; the bytes of its body reach the application as they are."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class BadLine(Exception):
    """A line that is no request; the message says why."""

    def __init__(self, message: str, custom_id: str | None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


class Batch:
    """One run over an input file; `done` are the custom_ids that have an answer already."""

    def __init__(self, http: httpx.AsyncClient, output: BinaryIO, done: set[str], bar: Any) -> None:
        self._http = http
        self._output = output
        self._done = done
        self._bar = bar
        self._seen: set[str] = set()
        self._running = 0
        self.num_failed = 0

    async def run(self, path: Path, concurrency: int, engine: AsyncLLM) -> None:
        """Answers every line, `concurrency` at a time. Raises EngineDeadError; what is written stays."""
        # Each worker takes the next line when it is free, so the file is never in memory.
        lines = _numbered_lines(path)

        async def work() -> None:
            for number, raw in lines:
                await self._answer(number, raw)
                self._bar.update()
                if engine.errored:
                    raise engine.dead_error

        workers = [asyncio.create_task(work()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _answer(self, number: int, raw: bytes) -> None:
        try:
            line = read_line(raw)
            if line.custom_id in self._seen:
                raise BadLine(f"the custom_id {line.custom_id!r:.100} comes twice", line.custom_id)
        except BadLine as error:
            self._write(error.custom_id, None, {"code": "invalid_line", "message": f"line {number}: {error}"})
            return
        self._seen.add(line.custom_id)
        if line.custom_id not in self._done:
            await self._send(line)

    async def _send(self, line: Line) -> None:
        headers = {"Content-Type": "application/json"}
        alone = 0
        while True:
            self._running += 1
            response = await self._http.post(line.url, content=bytes(line.body), headers=headers)
            self._running -= 1
            alone += self._running == 0
            if response.status_code not in BUSY or alone == TRIES_ALONE:
                break
            # Not in step with others that wait: each would see the other running.
            await asyncio.sleep(BUSY_SECONDS * random.uniform(1, 2))
        answer = {
            "status_code": response.status_code,
            "request_id": response.headers.get("X-Request-Id", ""),
            "body": msgspec.Raw(response.content or b"null"),
        }
        self._write(line.custom_id, answer, None)

    def _write(self, custom_id: str | None, answer: dict[str, Any] | None, error: dict[str, Any] | None) -> None:
        self.num_failed += answer is None or answer["status_code"] != 200
        name = f"batch_req_{secrets.token_hex(12)}"
        line = {"id": name, "custom_id": custom_id, "response": answer, "error": error}
        # One write a line, at once: an interruption leaves whole lines.
        self._output.write(msgspec.json.encode(line) + b"\n")
        self._output.flush()


def read_line(raw: bytes) -> Line:
    """A line as a request. Raises BadLine."""
    try:
        line = msgspec.json.decode(raw, type=Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(str(error), _field(raw, "custom_id")) from error
    problem = None
    if not line.custom_id:
        problem = "custom_id is empty"
    elif line.method != "POST":
        problem = f"method must be POST, not {line.method!r:.40}"
    elif line.url not in URLS:
        problem = f"url must be one of {', '.join(URLS)}, not {line.url!r:.80}"
    elif _field(bytes(line.body), "stream"):
        problem = "a batch cannot stream: leave stream out of the body"
    if problem is not None:
        raise BadLine(problem, line.custom_id)
    return line


def finished_lines(path: Path) -> dict[str, bytes]:
    """Lines of an output file that hold an answer (status 200), by custom_id; a torn last line is left out."""
    found: dict[str, bytes] = {}
    if not path.exists():
        return found
    with path.open("rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
                if raw.endswith(b"\n") and line["response"]["status_code"] == 200:
                    found[str(line["custom_id"])] = raw
            except (ValueError, KeyError, TypeError):
                continue
    return found


def make_parser() -> Parser:
    """The files, and the engine's flags."""
    parser = Parser(
        prog="evensong run-batch",
        description="Answer an OpenAI batch file on an engine of its own. Exit code 1 when a line got no answer (200).",
    )
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests, one JSON object a line")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="answers; replaced if it is there")
    parser.add_argument("--resume", action="store_true", help="keep the output's answers and do what is missing")
    parser.add_argument("--model", default="demo", help="a folder, a .gguf file, a name on the hub, or demo")
    add_engine_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Answers the batch. Raises ConfigError for files that cannot be used, before anything starts."""
    options = make_parser().parse_args(list(arguments))
    settings = engine_values(options)
    resolve(settings)
    source, target = _local(options.input_file), _local(options.output_file)
    try:
        num_lines = sum(1 for _ in _numbered_lines(source))
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from error
    if target.exists() and source.samefile(target):
        raise ConfigError("--output-file is the input file")
    kept = finished_lines(target) if options.resume else {}
    try:
        output = _begin(target, kept)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from error
    with output, tqdm(total=num_lines, disable=None, file=sys.stderr, unit="request") as bar:
        try:
            num_failed = asyncio.run(_run(settings, source, output, set(kept), bar))
        except KeyboardInterrupt:
            sys.stderr.write(f"\nevensong run-batch: interrupted; --resume goes on with {target}\n")
            raise
    sys.stderr.write(f"{num_lines} lines, {len(kept)} answered before, {num_failed} failed: {target}\n")
    return FAILURE if num_failed else 0


async def _run(settings: dict[str, Any], source: Path, output: BinaryIO, done: set[str], bar: Any) -> int:
    """How many lines failed."""
    engine = AsyncLLM.from_engine_args(EngineArgs(**settings))
    try:
        state = ServerState(engine.config, ServerConfig(), ProgressPage())
        state.engine = engine
        # As over a socket: an error of the application is an answer with status 500, not an exception here.
        transport = httpx.ASGITransport(create_app(state), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as http:
            batch = Batch(http, output, done, bar)
            await batch.run(source, engine.resources.max_num_seqs + WAITING, engine)
            return batch.num_failed
    finally:
        engine.shutdown()


def _begin(target: Path, kept: dict[str, bytes]) -> BinaryIO:
    """The output, holding what is kept; that is put there in one step, so that a crash here loses nothing."""
    if not kept:
        return target.open("wb")
    target = target.resolve()
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    with fresh.open("wb") as file:
        file.writelines(kept.values())
    fresh.replace(target)
    return target.open("ab")


def _local(name: str) -> Path:
    if "://" in name:
        raise ConfigError(f"{name!r:.100} is an address; run-batch reads and writes local files only")
    return Path(name)


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, raw


def _field(raw: bytes, name: str) -> Any:
    """One field of a JSON object that may be no such thing."""
    try:
        return json.loads(raw)[name]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
