"""GuideLLM against this server, on both generation routes. python with_guidellm.py URL TOKENIZER_FOLDER"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["guidellm==0.8.1"]
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
target = url.removesuffix("/v1")

with tempfile.TemporaryDirectory() as folder:
    for route in ("/v1/completions", "/v1/chat/completions"):
        report = Path(folder, "report.json")
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console-interactive"]
        command += ["--backend", f"kind=openai_http,target={target},model={model},request_format={route}"]
        command += ["--tokenizer", f"kind=hf_auto,model={tokenizer}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"]
        command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"]
        command += ["--output", f"kind=json,path={report}"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
        totals, lengths = metrics["request_totals"], metrics["output_token_count"]["successful"]
        assert (totals["successful"], totals["errored"]) == (4, 0), totals
        assert lengths["min"] == lengths["max"] == 16, lengths
        first = metrics["time_to_first_token_ms"]["successful"]["median"]
        print(f"{route}: 4 requests of 16 tokens, TTFT {first:.0f} ms")
