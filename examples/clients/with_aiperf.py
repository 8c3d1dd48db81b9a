"""AIPerf against this server, on both generation routes. python with_aiperf.py URL TOKENIZER_FOLDER"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["aiperf==0.13.0"]
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

# It reads a local tokenizer folder only where the hub is not switched off.
environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
with tempfile.TemporaryDirectory() as folder:
    for kind in ("completions", "chat"):
        artifacts = Path(folder, kind)
        command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", model]
        command += ["--url", url.removesuffix("/v1"), "--endpoint-type", kind, "--streaming"]
        command += ["--tokenizer", tokenizer, "--synthetic-input-tokens-mean", "32"]
        command += ["--output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true"]
        command += ["--request-count", "4", "--concurrency", "2", "--use-server-token-count"]
        command += ["--ui", "none", "--output-artifact-dir", str(artifacts)]
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        result = json.loads((artifacts / "profile_export_aiperf.json").read_text())
        assert result["request_count"]["avg"] == 4, result["request_count"]
        assert "error_request_count" not in result or result["error_request_count"]["avg"] == 0
        lengths = result["output_sequence_length"]
        assert lengths["min"] == lengths["max"] == 16, lengths
        print(f"{kind}: 4 requests of 16 tokens, TTFT {result['time_to_first_token']['avg']:.0f} ms")
