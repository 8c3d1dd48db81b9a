"""Figures of a run, from its records: vLLM's definitions and result keys. Times in ms where the key says so.

TTFT: request sent to first token. TPOT: the time after it, by the other tokens, per request. ITL: between two chunks.
E2EL: request sent to last token. Goodput: requests a second that meet every objective (DistServe, arXiv:2401.09670).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from evensong.entrypoints.cli.bench.load import INTERRUPTED, Record
from evensong.protocol.errors import ConfigError

# metric -> (short name, what it is); the order is the table's
METRICS: dict[str, tuple[str, str]] = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
OBJECTIVES = ("ttft", "tpot", "e2el")


def tpot(record: Record) -> float:
    """Seconds a token after the first; 0 where there is no second one."""
    return (record.latency - record.ttft) / (record.output_len - 1) if record.output_len > 1 else 0.0


def values_of(metric: str, records: Sequence[Record]) -> list[float]:
    """A metric's values in seconds, of the answered requests."""
    done = [record for record in records if record.done]
    if metric == "itl":
        return [gap for record in done for gap in record.itl]
    if metric == "tpot":
        return [tpot(record) for record in done if record.output_len > 1]
    if metric == "e2el_including_client_queue":
        return [record.latency + record.queued for record in done]
    name = {"e2el": "latency", "client_queue_time": "queued"}.get(metric, metric)
    return [getattr(record, name) for record in done]


def meets(record: Record, objectives: dict[str, float]) -> bool:
    """Whether an answered request is within every objective (ms)."""
    values = {"ttft": record.ttft, "tpot": tpot(record), "e2el": record.latency}
    return record.done and all(values[name] * 1000 <= most for name, most in objectives.items())


def percentile_name(percentile: float) -> str:
    """p99, p99.9."""
    return f"p{percentile:g}"


def summarize(values: Sequence[float], metric: str, percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles in ms under vLLM's keys; None where nothing was measured."""
    if not values:
        names = ["mean", "median", "std", *map(percentile_name, percentiles)]
        return {f"{name}_{metric}_ms": None for name in names}
    result: dict[str, float | None] = {
        f"mean_{metric}_ms": statistics.fmean(values) * 1000,
        f"median_{metric}_ms": statistics.median(values) * 1000,
        f"std_{metric}_ms": statistics.pstdev(values) * 1000,
    }
    for percentile, value in zip(percentiles, np.percentile(values, list(percentiles)), strict=True):
        result[f"{percentile_name(percentile)}_{metric}_ms"] = float(value) * 1000
    return result


def peaks(records: Sequence[Record]) -> tuple[list[int], list[int]]:
    """Tokens that came, and requests that were under way, in each second of the run."""
    done = [record for record in records if record.done]
    if not done:
        return [], []
    began = min(record.start for record in done)
    length = int(max(record.start + record.latency for record in done) - began) + 1
    tokens, running = [0] * length, [0] * length
    for record in done:
        first = record.start - began
        for second in range(int(first), int(first + record.latency) + 1):
            running[second] += 1
        # A chunk's tokens are taken to be as many as those of any other chunk.
        share = record.output_len / (len(record.itl) + 1)
        at, counted, exact = first + record.ttft, 0, 0.0
        for gap in (0.0, *record.itl):
            at += gap
            exact += share
            tokens[min(int(at), length - 1)] += round(exact) - counted
            counted = round(exact)
    return tokens, running


def figures(
    records: Sequence[Record],
    duration: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    objectives: dict[str, float],
) -> dict[str, Any]:
    """The result's figures; `duration` in seconds."""
    done = [record for record in records if record.done]
    unfinished = sum(record.error == INTERRUPTED for record in records)
    tokens, running = peaks(records)
    output_tokens = sum(record.output_len for record in done)
    input_tokens = sum(record.prompt_len or 0 for record in done)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done) - unfinished,
        "unfinished": unfinished,
        "first_error": next((r.error for r in records if r.error and r.error != INTERRUPTED), None),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration,
        "request_goodput": sum(meets(r, objectives) for r in done) / duration if objectives else None,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (input_tokens + output_tokens) / duration,
        "max_output_tokens_per_s": max(tokens, default=0),
        "max_concurrent_requests": max(running, default=0),
    }
    for metric in METRICS:
        if metric in metrics:
            result |= summarize(values_of(metric, records), metric, percentiles)
    return result


def details(records: Sequence[Record]) -> dict[str, list[Any]]:
    """One value a request, under vLLM's keys; times in seconds."""
    return {
        "input_lens": [record.prompt_len for record in records],
        "output_lens": [record.output_len for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.itl for record in records],
        "latencies": [record.latency for record in records],
        "start_times": [record.start for record in records],
        "queue_times": [record.queued for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
    }


def read_metrics(text: str) -> list[str]:
    """`ttft,tpot` as a list. Raises ConfigError for a name that is no metric."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics: {name!r:.40} is not one of {', '.join(METRICS)}")
    return names


def read_percentiles(text: str) -> list[float]:
    """`50,99.9` as numbers. Raises ConfigError for what is no percentile."""
    try:
        numbers = [float(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise ConfigError(f"--metric-percentiles: {text!r:.60} is no list of numbers") from error
    if not all(0 <= number <= 100 for number in numbers):
        raise ConfigError("--metric-percentiles must be in 0..100")
    return numbers


def read_objectives(words: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50`, in ms. Raises ConfigError for another form."""
    objectives = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            objectives[name] = float(value)
        except ValueError as error:
            raise ConfigError(f"--goodput: {word!r:.60} is not METRIC:MILLISECONDS, as in ttft:500") from error
        if name not in OBJECTIVES or not 0 <= objectives[name] < math.inf:
            raise ConfigError(f"--goodput: {word!r:.60} is not one of {', '.join(OBJECTIVES)} with a time in ms")
    return objectives
