"""Metrics under the field's names."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from evensong.observe.metrics import CONTENT_TYPE, EngineMetrics, Times
from evensong.protocol.stats import SchedulerStats

NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "determinism_violations_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
}


def samples(metrics: EngineMetrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {s.name.removeprefix("evensong:"): s.value for family in families for s in family.samples}


def test_names_and_labels_are_there_from_the_start() -> None:
    metrics = EngineMetrics("my model", 3)
    assert set(samples(metrics)) >= NAMES
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.name.startswith("evensong:")
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("my model", "3")


def test_finished_requests_by_reason() -> None:
    metrics = EngineMetrics("m")
    for reason in ("stop", "length", "stop"):
        metrics.finished(reason)
    text = metrics.render().decode()
    assert 'evensong:request_success_total{engine="0",finished_reason="stop",model_name="m"} 2.0' in text


def test_gauges_are_absolute_and_counts_add_up() -> None:
    metrics = EngineMetrics("m")
    metrics.update(SchedulerStats(2, 1, 0.25, 100, 40, 1))
    metrics.update(SchedulerStats(0, 0, 0.0, 10, 0, 0))
    found = samples(metrics)
    assert (found["num_requests_running"], found["kv_cache_usage_perc"]) == (0, 0)
    assert (found["prefix_cache_queries_total"], found["prefix_cache_hits_total"]) == (110, 40)
    assert found["num_preemptions_total"] == 1


def test_nothing_touches_the_registry_of_the_process() -> None:
    EngineMetrics("m"), EngineMetrics("m")
    assert not [family for family in REGISTRY.collect() if family.name.startswith("evensong")]


def test_content_type_is_the_text_format() -> None:
    assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize("seconds", [[], [0.5], [0.0, 0.1, 0.1000001, 2.0, 7.5, 1e9]])
def test_times_look_like_the_librarys_histogram(seconds: list[float]) -> None:
    labels, buckets = {"model_name": "m", "engine": "0"}, (0.1, 2, 7.5)
    library, ours = CollectorRegistry(), CollectorRegistry()
    theirs = Histogram("evensong:t_seconds", "Text", tuple(labels), buckets=buckets, registry=library).labels(**labels)
    times = Times("evensong:t_seconds", "Text", buckets, labels)
    ours.register(times)
    for one in seconds:
        theirs.observe(one)
        times.observe(one)
    shown = [
        [line for line in generate_latest(registry).decode().splitlines() if "_created{" not in line]
        for registry in (library, ours)
    ]
    assert shown[0] == shown[1] and any("_created" in line for line in shown[0])
