"""`vllm bench serve` against this server. python with_vllm_bench.py URL TOKENIZER_FOLDER

Runs in any environment that has vLLM: `pip install vllm`, or its CPU build.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["vllm==0.32.0"]
# ///

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

url, tokenizer = sys.argv[1].rstrip("/"), sys.argv[2]
with urllib.request.urlopen(f"{url}/models") as response:
    model = json.load(response)["data"][0]["id"]

with tempfile.TemporaryDirectory() as folder:
    for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", backend]
        command += ["--base-url", url.removesuffix("/v1"), "--endpoint", endpoint, "--model", model]
        command += ["--tokenizer", tokenizer, "--dataset-name", "random", "--random-input-len", "32"]
        command += ["--random-output-len", "16", "--num-prompts", "8", "--max-concurrency", "4", "--ignore-eos"]
        command += ["--save-result", "--result-dir", folder, "--result-filename", f"{backend}.json", "--disable-tqdm"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        result = json.loads(Path(folder, f"{backend}.json").read_text())
        assert (result["completed"], result["failed"]) == (8, 0), result
        assert result["total_output_tokens"] == 8 * 16, result["total_output_tokens"]
        print(f"{backend}: 8 requests, {result['output_throughput']:.1f} output tokens/s,", end=" ")
        print(f"TTFT {result['mean_ttft_ms']:.0f} ms, TPOT {result['mean_tpot_ms']:.0f} ms")
