"""bench serve and run-batch against the real model: exact counts, a trace's sharing found, the server's own answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from evensong.entrypoints.cli.bench.traces import read_trace, shared_tokens
from tests.server.harness import Server

# Three conversations of two turns, one block of 16 tokens shared by all; times in ms.
TRACE = [
    {"timestamp": 0, "input_length": 40, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 64, "output_length": 8, "hash_ids": [0, 3, 4, 5]},
    {"timestamp": 50, "input_length": 33, "output_length": 48, "hash_ids": [0, 6, 7]},
    {"timestamp": 100, "input_length": 90, "output_length": 4, "hash_ids": [0, 1, 8, 9, 10, 11]},
    {"timestamp": 100, "input_length": 64, "output_length": 4, "hash_ids": [0, 3, 4, 5]},
    {"timestamp": 150, "input_length": 48, "output_length": 4, "hash_ids": [0, 6, 12]},
]


def evensong(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evensong.entrypoints.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def bench(server: Server, *words: str) -> dict[str, Any]:
    done = evensong("bench", "serve", "--base-url", server.url, "--ignore-eos", *words)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["first_error"] is None
    return result


def test_random_prompts_have_exactly_the_tokens_asked_for(server: Server) -> None:
    result = bench(server, "--num-prompts", "4", "--input-len", "37", "--output-len", "12", "--request-rate", "20")
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (4, 4 * 37, 4 * 12)
    assert result["median_tpot_ms"] > 0 and result["median_ttft_ms"] > 0


def test_chat_prompts_differ_from_that_by_the_template_only(server: Server) -> None:
    words = ["--backend", "openai-chat", "--num-prompts", "3", "--output-len", "5"]
    short, longer = (bench(server, *words, "--input-len", length)["total_input_tokens"] for length in ("21", "30"))
    assert longer - short == 3 * 9


def test_a_trace_finds_in_the_cache_what_its_ids_share(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TRACE))
    before = {name: server.metric(name) for name in ("prefix_cache_queries_total", "prefix_cache_hits_total")}
    result = bench(server, "--dataset-name", "trace", "--dataset-path", str(path), "--seed", "5")
    assert result["completed"] == len(TRACE)
    found = {name: server.metric(name) - value for name, value in before.items()}
    assert found["prefix_cache_queries_total"] == sum(row["input_length"] for row in TRACE)  # type: ignore[misc]
    shared = shared_tokens(read_trace(path, 100), 16, 16)
    assert found["prefix_cache_hits_total"] == shared == 16 * (1 + 1 + 2 + 3 + 2)


def test_run_batch_gives_the_servers_answers(server: Server, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Say something kind."}], "seed": 5, "max_tokens": 48, "n": 2}
    text = {"prompt": ["The sea is", "The sky is"], "temperature": 0, "seed": 3, "max_tokens": 48, "logprobs": 2}
    asked = {"chat": ("/v1/chat/completions", chat), "text": ("/v1/completions", text)}
    asked["bad"] = ("/v1/completions", {"prompt": "a", "logit_bias": {"99999999": 1}})
    lines = [{"custom_id": n, "method": "POST", "url": url, "body": body} for n, (url, body) in asked.items()]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = evensong("run-batch", "-i", str(source), "-o", str(target), "--model", "demo")
    assert done.returncode == 1, done.stderr  # one line is refused
    answers = {line["custom_id"]: line["response"] for line in map(json.loads, target.read_text().splitlines())}
    for name, (url, body) in asked.items():
        response = server.post(url, body)
        assert answers[name]["status_code"] == response.status_code
        expected = response.json()
        for moment in ("id", "created"):
            expected.pop(moment, None), answers[name]["body"].pop(moment, None)
        # What was found in the cache says what ran before, not what the answer is.
        for form in (expected, answers[name]["body"]):
            form.get("usage", {}).pop("prompt_tokens_details", None)
        assert answers[name]["body"] == expected
