"""The `llm` command with this server as one of its models. python with_llm.py [URL]"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["llm==0.36"]
# ///

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
with urllib.request.urlopen(f"{url}/models") as response:
    model = json.load(response)["data"][0]["id"]

with tempfile.TemporaryDirectory() as folder:
    # Its settings live in a folder; JSON is YAML as well.
    entries = [{"model_id": "mine", "model_name": model, "api_base": url, "api_key_name": "none"}]
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps(entries))
    environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}

    def llm(*words: str) -> str:
        command = [sys.executable, "-m", "llm", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    options = ["-o", "temperature", "0", "-o", "max_tokens", "24"]
    streamed = llm("-m", "mine", *options, "Name three colours of autumn leaves.")
    assert streamed, "no text came"
    print("prompt:", streamed)
    assert llm("-m", "mine", "--no-stream", *options, "Name three colours of autumn leaves.") == streamed
    print("without streaming: the same text")
    assert llm("-m", "mine", "--continue", *options, "And of spring flowers?")
    logged = json.loads(llm("logs", "list", "--json", "-n", "1"))[0]
    assert logged["input_tokens"] > 0 and logged["output_tokens"] > 0
    print("conversation continued;", logged["input_tokens"], "tokens in,", logged["output_tokens"], "out")
