"""Load on a server, for engine_cost.py: the client of vLLM's own environment, and one that counts events."""

from __future__ import annotations

import http.client
import json
import os
import random
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CLOSE_SECONDS = 30
REQUEST_SECONDS = 300

# Runs in vLLM's environment: reads the flags of `vllm bench serve` as a JSON list a line, answers its result as JSON.
# One process for all runs, as its imports take longer than most of them.
PROGRAM = """
import json, os, sys
if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w"); os.dup2(2, 1)
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        result = main(parser.parse_args(json.loads(line)))
        plain = {name: value for name, value in result.items() if isinstance(value, (int, float, str))}
        plain["error"] = next((error for error in result.get("errors") or () if error), "")
        print(json.dumps(plain), file=out, flush=True)
"""


@dataclass(frozen=True)
class Load:
    """`num_prompts` random prompts, `streams` at a time, each answered to its full length."""

    streams: int
    num_prompts: int
    prompt_len: int
    output_len: int

    @property
    def num_tokens(self) -> int:
        """Output tokens of all answers."""
        return self.num_prompts * self.output_len


class BenchClient:
    """`vllm bench serve` against any server, run after run."""

    def __init__(self, python: str, model: Path) -> None:
        self._model = model
        self._log = tempfile.NamedTemporaryFile("w+", suffix="-client.log")  # noqa: SIM115  closed with the client
        self._process = subprocess.Popen(
            [python, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        self._answer()

    def run(self, url: str, load: Load, seed: int, *, least: float = 1.0) -> dict[str, Any]:
        """What the client reports. Raises SystemExit where less than a share of `least` is answered in full."""
        flags = {
            "--backend": "openai",
            "--base-url": url,
            "--model": self._model,
            "--tokenizer": self._model,
            "--dataset-name": "random",
            "--random-input-len": load.prompt_len,
            "--random-output-len": load.output_len,
            "--num-prompts": load.num_prompts,
            "--max-concurrency": load.streams,
            "--seed": seed,
            "--temperature": 0,
        }
        words = [str(word) for pair in flags.items() for word in pair]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([*words, "--ignore-eos", "--disable-tqdm"]) + "\n")
        self._process.stdin.flush()
        result: dict[str, Any] = json.loads(self._answer())
        answered = min(result["completed"] / load.num_prompts, result["total_output_tokens"] / load.num_tokens)
        if answered < least:
            raise SystemExit(f"{url} answered {100 * answered:.1f} % of the prompts: {result['error'][-500:]}")
        return result

    def close(self) -> None:
        """Ends its process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the bench client ended early: {Path(self._log.name).read_text()[-2000:]}")
        return line


def events_per_token(url: str, model: Path, load: Load, vocabulary: int) -> float:
    """Events that bear a choice, by the tokens that the server counts, over all of the load's answers."""
    rng = random.Random(load.streams)
    prompts = [[rng.randrange(10, vocabulary) for _ in range(load.prompt_len)] for _ in range(load.num_prompts)]
    with ThreadPoolExecutor(load.streams) as threads:
        counts = list(threads.map(lambda prompt: _count(url, model, prompt, load.output_len), prompts))
    return sum(events for events, _ in counts) / sum(tokens for _, tokens in counts)


def _count(url: str, model: Path, prompt: list[int], output_len: int) -> tuple[int, int]:
    """Events and tokens of one answer."""
    form = {
        "model": str(model),
        "prompt": prompt,
        "max_tokens": output_len,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=REQUEST_SECONDS)
    try:
        connection.request("POST", "/v1/completions", json.dumps(form), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{url} refused: {response.read(500)!r}")
        return count_events(response.read().decode())
    finally:
        connection.close()


def count_events(body: str) -> tuple[int, int]:
    """Events with a choice in a stream, and the completion tokens of its usage."""
    events = tokens = 0
    for line in body.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            events += bool(event["choices"])
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return events, tokens
