"""The offline benchmarks' settings: those of `LLM`, not of a server."""

from __future__ import annotations

import pytest

from evensong.entrypoints.cli.bench import latency, throughput
from evensong.entrypoints.cli.bench.offline import engine_settings
from evensong.entrypoints.llm import BATCH_STEP_SECONDS, UNLIMITED_QUEUE


@pytest.mark.parametrize("benchmark", [latency, throughput])
def test_a_batch_may_be_as_long_as_it_likes(benchmark: object) -> None:
    options = benchmark.make_parser().parse_args(["--max-num-seqs", "3"])  # type: ignore[attr-defined]  # a module
    settings = engine_settings(options)
    assert (settings["max_num_queued_reqs"], settings["step_seconds"]) == (UNLIMITED_QUEUE, BATCH_STEP_SECONDS)
    assert (settings["model"], settings["max_num_seqs"], options.seed) == ("demo", 3, 0)


def test_latency_is_measured_without_the_prefix_cache() -> None:
    assert engine_settings(latency.make_parser().parse_args([]))["enable_prefix_caching"] is False
    assert engine_settings(throughput.make_parser().parse_args([]))["enable_prefix_caching"] is True
