"""Prometheus metrics under the field's names, prefix `evensong:`. Only front ends hold a registry (spec G, F7)."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from evensong.protocol.stats import SchedulerStats

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_LABELS = ("model_name", "engine")
_FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 80, 160)
_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10)
_REQUEST_BUCKETS = (0.1, 0.3, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1280)


class Times(Collector):
    """A histogram that is added to with every token: it has one writer, so no locks, and sums up when it is shown.

    `buckets` are upper bounds, in seconds. The library's own costs three times as much, and looks the same.
    """

    def __init__(self, name: str, text: str, buckets: tuple[float, ...], labels: dict[str, str]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, seconds: float) -> None:
        """Adds a time."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What is shown."""
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, itertools.accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        family.add_sample(f"{self._name}_created", self._labels, self._created)
        yield family


class EngineMetrics:
    """All figures of one engine as one front end sees them."""

    def __init__(self, model_name: str, engine_index: int = 0) -> None:
        self.registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": str(engine_index)}

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"evensong:{name}", text, _LABELS, registry=self.registry).labels(**labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"evensong:{name}", text, _LABELS, registry=self.registry).labels(**labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Times:
            times = Times(f"evensong:{name}", text, buckets, labels)
            self.registry.register(times)
            return times

        self._gauges = (
            gauge("num_requests_running", "Requests in the running batch"),
            gauge("num_requests_waiting", "Requests that wait"),
            gauge("kv_cache_usage_perc", "Share of KV blocks held by requests; 1 is all"),
        )
        self._counters = {
            "prefix_cache_queries": counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
            "prefix_cache_hits": counter("prefix_cache_hits", "Prompt tokens found in the prefix cache"),
            "num_preemptions": counter(
                "num_preemptions", "Requests that gave way: blocks ran out, or for an urgent one"
            ),
            "admission_rejections": counter("admission_rejections", "Requests refused by the core, a full queue's too"),
            "prompt_tokens": counter("prompt_tokens", "Prompt tokens of admitted requests"),
            "generation_tokens": counter("generation_tokens", "Tokens generated"),
            "determinism_violations": counter("determinism_violations", "Tokens that differed when sent again"),
        }
        self._success = Counter(
            "evensong:request_success",
            "Finished requests",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._labels = labels
        self._histograms = {
            "time_to_first_token": histogram(
                "time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN_BUCKETS
            ),
            "inter_token_latency": histogram(
                "inter_token_latency_seconds", "Time between two tokens of a request", _TOKEN_BUCKETS
            ),
            "e2e_request_latency": histogram("e2e_request_latency_seconds", "Arrival to last token", _REQUEST_BUCKETS),
            "request_queue_time": histogram(
                "request_queue_time_seconds", "Arrival to the first step that runs it", _FIRST_TOKEN_BUCKETS
            ),
        }

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to a counter."""
        if amount:
            self._counters[name].inc(amount)

    def observe(self, name: str, seconds: float) -> None:
        """Adds a time to a histogram."""
        self._histograms[name].observe(max(seconds, 0.0))

    def finished(self, reason: str) -> None:
        """A request ended."""
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def update(self, stats: SchedulerStats) -> None:
        """Takes a core's report: gauges as they are, counts since its last one."""
        for gauge, value in zip(
            self._gauges, (stats.num_running, stats.num_waiting, stats.kv_cache_usage), strict=True
        ):
            gauge.set(value)
        for name in ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"):
            self.count(name, getattr(stats, name))

    def engine_dead(self) -> None:
        """Nothing runs any more."""
        for gauge in self._gauges:
            gauge.set(0)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
