"""Load on a server: requests at their times, each one's stream timed token by token. One event loop, httpx."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from evensong.entrypoints.cli.bench.datasets import Sample
from evensong.entrypoints.cli.bench.target import CONNECT_SECONDS, Target, complaint_of

INTERRUPTED = "not finished when the benchmark was interrupted"


@dataclass
class Record:
    """What became of one request. Times in seconds; `error` is empty where it was answered."""

    prompt_len: int | None = None
    output_len: int = 0
    start: float = 0.0  # of time.perf_counter()
    queued: float = 0.0  # waited here for a place under --max-concurrency
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    text: str = ""
    error: str = ""

    @property
    def done(self) -> bool:
        """Answered in full."""
        return not self.error


def arrivals(samples: Sequence[Sample], rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds from the start at which each request leaves: its own, or at `rate` a second, gamma-distributed gaps.

    Burstiness is the gamma distribution's shape: 1 is a Poisson process, less comes in bursts, inf is a metronome. The
    whole is stretched to len / rate, as in vLLM, so that runs with different seeds offer the same load.
    """
    if rate == float("inf"):
        return [0.0] * len(samples)
    even = burstiness == float("inf")
    gaps = [1.0 if even else rng.gammavariate(burstiness, 1.0) for _ in samples]
    total, at, times = sum(gaps), 0.0, []
    for gap in gaps:
        at += gap
        times.append(at / total * len(samples) / rate if total else 0.0)
    return times


class Load:
    """One run of requests against a target."""

    def __init__(self, target: Target, extra: dict[str, Any], id_prefix: str, max_concurrency: int | None) -> None:
        self._target = target
        self._extra = extra
        self._id_prefix = id_prefix
        self._places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()

    async def run(
        self, samples: Sequence[Sample], times: Sequence[float], stop: asyncio.Event, on_done: Callable[[], object]
    ) -> list[Record]:
        """Sends every sample at its time; the records in the samples' order. `stop` ends what is not finished."""
        records = [Record(prompt_len=sample.prompt_len, error=INTERRUPTED) for sample in samples]
        # No limit but our own on connections and on the time that an answer takes.
        limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(None, connect=CONNECT_SECONDS)
        async with httpx.AsyncClient(headers=self._target.headers, limits=limits, timeout=timeout) as client:
            began = time.perf_counter()

            async def one(index: int) -> None:
                await asyncio.sleep(began + times[index] - time.perf_counter())
                due = time.perf_counter()
                async with self._places:
                    records[index].queued = time.perf_counter() - due
                    await self._send(client, samples[index], records[index], f"{self._id_prefix}{index}")
                on_done()

            tasks = [asyncio.create_task(one(index)) for index in range(len(samples))]
            await _until(stop, tasks)
            for task in tasks:
                if not task.cancelled():
                    task.result()  # an error of ours is not lost
        return records

    async def _send(self, client: httpx.AsyncClient, sample: Sample, record: Record, name: str) -> None:
        record.start = time.perf_counter()
        body = self._body(sample)
        try:
            async with client.stream("POST", self._target.url, json=body, headers={"X-Request-Id": name}) as response:
                if response.status_code != 200:
                    record.error = complaint_of(response.status_code, await response.aread())
                else:
                    record.error = await self._read(response, record)
        except httpx.HTTPError as error:
            record.error = f"{type(error).__name__}: {error}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            record.error = f"the stream is not the API's: {type(error).__name__}: {error}"

    async def _read(self, response: httpx.Response, record: Record) -> str:
        """Follows the stream; what went wrong with it, or nothing."""
        last, pieces, usage = record.start, 0, None
        async for event in events(response):
            now = time.perf_counter()
            if event.get("error"):
                return str(event["error"].get("message") or event["error"])
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                text = _new_text(choice)
                if text is None:
                    continue  # a chat stream's opening, which bears no token
                if pieces:
                    record.itl.append(now - last)
                else:
                    record.ttft = now - record.start
                last, pieces = now, pieces + 1
                record.text += text
        if not pieces:
            return "the stream ended without a token"
        record.latency = last - record.start
        # A chunk may bear several tokens, so the server's count goes before ours.
        record.output_len = pieces
        if usage is not None:
            record.output_len = int(usage.get("completion_tokens") or pieces)
            record.prompt_len = int(usage.get("prompt_tokens") or record.prompt_len or 0)
        return ""

    def _body(self, sample: Sample) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._target.model, "stream": True, "stream_options": {"include_usage": True}}
        if self._target.chat:
            body["messages"] = [{"role": "user", "content": sample.prompt}]
            body["max_completion_tokens"] = sample.output_len
        else:
            body["prompt"] = sample.prompt
            body["max_tokens"] = sample.output_len
        return body | self._extra


async def _until(stop: asyncio.Event, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Until all tasks are done, or `stop` is set; then none of them runs any more."""

    async def everything() -> None:
        await asyncio.gather(*tasks)

    waits: set[asyncio.Task[Any]] = {asyncio.create_task(everything()), asyncio.create_task(stop.wait())}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (*tasks, *waits):
            task.cancel()
        await asyncio.gather(*tasks, *waits, return_exceptions=True)


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream up to [DONE]. Raises ValueError for one that is no JSON object, or no end."""
    # By bytes: httpx's own lines also end at separators that JSON text may hold.
    buffer = b""
    async for piece in response.aiter_bytes():
        buffer += piece
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError("an event is no object")
            yield event
    raise ValueError("it ended without [DONE]")


def _new_text(choice: dict[str, Any]) -> str | None:
    """The text of a chunk's choice; None for one that bears no token."""
    if "text" in choice:
        return choice["text"] or ""
    delta = choice.get("delta") or {}
    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    return str(text) if text or "role" not in delta or choice.get("finish_reason") else None
