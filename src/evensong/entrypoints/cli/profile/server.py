"""A profile of a running server, through its control routes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import time
from collections.abc import Sequence
from typing import Any

import httpx

from evensong.entrypoints.cli.bench.datasets import Sample, load_samples
from evensong.entrypoints.cli.bench.load import Load, Record
from evensong.entrypoints.cli.bench.target import CONNECT_SECONDS, KEY_VARIABLES, Target, complaint_of, key_header
from evensong.protocol.errors import EngineStartError

ENDPOINT = "/v1/completions"
PREFIX = "profile"
WARM_UP_TOKENS = 8


def profile_server(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The trace's path on the server's machine, and what the load took.

    Raises EngineStartError in one line: nobody there, no key, a profile runs already, no request was answered.
    """
    headers = {"Authorization": f"Bearer {options.api_key}"} if "api_key" in options else key_header()
    options.seed = getattr(options, "seed", 0)
    with contextlib.closing(Target(options.url, ENDPOINT, chat=False, headers=headers)) as target:
        target.find_model(None)
        samples = load_samples(options, lambda: target.units(None))
    with Profiled(options.url, headers) as profiled:
        records, duration = asyncio.run(_load(target, samples, profiled))
        trace = profiled.stop()
    done = [record for record in records if record.done]
    if not done:
        raise EngineStartError(f"{options.url} answered no request: {records[0].error:.300}")
    return trace, {
        "elapsed_time": duration,
        "num_requests": len(done),
        "output_tokens_per_second": sum(record.output_len for record in done) / duration,
    }


class Profiled:
    """The server's profiler: whatever happens, it does not run on."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._root = url.rstrip("/").removesuffix("/v1")
        # Writing a trace takes a while; a server that is not there is seen at once.
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_SECONDS))
        self._runs = False

    def __enter__(self) -> Profiled:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(EngineStartError):
            if self._runs:
                self.stop()
        self._client.close()

    def start(self) -> None:
        """Starts it."""
        self._call(f"/start_profile?profile_prefix={PREFIX}")
        self._runs = True

    def stop(self) -> str:
        """Stops it; where the trace lies."""
        self._runs = False
        try:
            return str(self._call("/stop_profile").json()["traces"][0])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise EngineStartError(f"{self._root}/stop_profile names no trace") from error

    def _call(self, route: str) -> httpx.Response:
        try:
            response = self._client.post(self._root + route)
        except (httpx.TransportError, httpx.InvalidURL, UnicodeError) as error:
            raise EngineStartError(f"no server answers at {self._root}: {error!s:.200}") from error
        path = route.partition("?")[0]
        if response.status_code in (401, 403):
            words = f"(--api-key, or set {' or '.join(KEY_VARIABLES)})"
            raise EngineStartError(f"{self._root}{path} answers {_said(response)} {words}")
        if not response.is_success:
            raise EngineStartError(f"{self._root}{path} answers {_said(response)}")
        return response


def _said(response: httpx.Response) -> str:
    return complaint_of(response.status_code, response.content)


async def _load(target: Target, samples: Sequence[Sample], profiled: Profiled) -> tuple[list[Record], float]:
    """A few tokens of the first requests, unprofiled; then all of them. Ctrl-C ends them, and the trace is written."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    fields = {"ignore_eos": True, "temperature": 0.0}
    warm_up = [Sample(sample.prompt, min(sample.output_len, WARM_UP_TOKENS)) for sample in samples]
    await Load(target, fields, "warm-up-", None).run(warm_up, [0.0] * len(samples), stop, lambda: None)
    profiled.start()
    begun = time.perf_counter()
    records = await Load(target, fields, "profile-", None).run(samples, [0.0] * len(samples), stop, lambda: None)
    return records, time.perf_counter() - begun
