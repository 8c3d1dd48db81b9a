"""`evensong bench throughput` on the real model: a table, and JSON on the last line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_last_line_holds_the_figures(demo_model: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["bench", "throughput", "--model", str(demo_model), "--num-prompts", "3", "--input-len", "20"]
    command = [sys.executable, "-m", "evensong.entrypoints.cli.main", *words, "--output-len", "48"]
    done = subprocess.run(
        [*command, "--output-json", str(report)], capture_output=True, text=True, timeout=240, check=True
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["num_requests"] == 3 and figures["total_num_tokens"] == 3 * (20 + 48)
    assert 0 < figures["output_tokens_per_second"] < figures["tokens_per_second"]
    assert json.loads(report.read_text()) == figures


def test_latency_is_of_one_batch(demo_model: Path) -> None:
    words = [
        "bench",
        "latency",
        "--model",
        str(demo_model),
        "--input-len",
        "8",
        "--output-len",
        "6",
        "--batch-size",
        "2",
    ]
    command = [sys.executable, "-m", "evensong.entrypoints.cli.main", *words, "--num-iters", "2"]
    done = subprocess.run(
        [*command, "--num-iters-warmup", "0"], capture_output=True, text=True, timeout=240, check=True
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert len(figures["latencies"]) == 2 and min(figures["latencies"]) > 0
    assert figures["avg_latency"] == sum(figures["latencies"]) / 2
    assert figures["percentiles"]["10"] < figures["percentiles"]["50"] < figures["percentiles"]["99"]


def test_startup_is_of_a_real_server(demo_model: Path) -> None:
    words = ["bench", "startup", "--model", str(demo_model), "--num-iters-cold", "0", "--num-iters-warmup", "0"]
    command = [sys.executable, "-m", "evensong.entrypoints.cli.main", *words, "--num-iters-warm", "1"]
    done = subprocess.run([*command, "--max-model-len", "256"], capture_output=True, text=True, timeout=240, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert 0 < figures["avg_warm_health_time"] < figures["avg_warm_startup_time"] < figures["avg_warm_first_token_time"]
    assert not any(name.startswith(("cold", "avg_cold")) for name in figures)


def test_a_server_that_cannot_start_is_told_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00")
    command = [sys.executable, "-m", "evensong.entrypoints.cli.main", "bench", "startup", "--model", str(broken)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert "the server ended with code" in done.stderr
