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
