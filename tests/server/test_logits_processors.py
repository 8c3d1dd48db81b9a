"""Logits processors in a real server: what they do is the request's own, however it is run, and faults end it alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from evensong.entrypoints.llm import LLM
from evensong.protocol.errors import RequestError
from evensong.protocol.sampling_params import SamplingParams
from tests.server.harness import Server, Survivors, events

FOLDER = str(Path(__file__).parent)
PROMPT = "In the harbour of the old town there was a ship that"
STRIDE = {"model": "demo", "prompt": PROMPT, "max_tokens": 48, "temperature": 0.8, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def server_flags() -> list[str]:
    return ["--logits-processors", "own_processors:Stride", "--logits-processors", "own_processors:Breaks"]


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    """Children find the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([FOLDER, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
        patch.syspath_prepend(FOLDER)
        yield


def asked(stride: int, **more: Any) -> dict[str, Any]:
    return STRIDE | {"vllm_xargs": {"stride": stride}, "return_token_ids": True} | more


def ids_of(server: Server, body: dict[str, Any]) -> list[int]:
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def test_the_same_bytes_alone_in_a_crowd_streamed_and_offline(server: Server) -> None:
    strides = [1, 2, 3, 7, 50, 100]
    alone = [ids_of(server, asked(stride)) for stride in strides]
    length = server.post("/tokenize", {"prompt": PROMPT}).json()["count"]
    for stride, ids in zip(strides, alone, strict=True):
        assert [i % stride for i in ids] == [(length + index) % stride for index in range(48)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda stride: ids_of(server, asked(stride)), strides)) == alone
    with server.client.stream("POST", "/v1/completions", json=asked(7, stream=True)) as response:
        assert [i for event in events(response) for i in event["choices"][0]["token_ids"]] == alone[3]
    plain = ids_of(server, STRIDE | {"return_token_ids": True})
    assert plain == alone[0] and len({tuple(ids) for ids in alone}) == 6
    # A pool in which they preempt each other, in this process.
    params = [
        SamplingParams(temperature=0.8, seed=5, max_tokens=48, ignore_eos=True, extra_args={"stride": stride})
        for stride in strides
    ]
    settings: dict[str, Any] = {"num_kv_blocks_override": 12, "max_num_batched_tokens": 16, "multiprocess": False}
    with LLM("demo", logits_processors=["own_processors:Stride"], disable_log_stats=True, **settings) as llm:
        outputs = llm.generate([PROMPT] * 6, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == alone


def test_chats_and_choices(server: Server) -> None:
    body = asked(3, n=2) | {"messages": [{"role": "user", "content": PROMPT}]}
    del body["prompt"]
    answer = server.post("/v1/chat/completions", body).json()
    count = answer["usage"]["prompt_tokens"]
    for choice in answer["choices"]:
        assert [i % 3 for i in choice["token_ids"]] == [(count + index) % 3 for index in range(48)]


@pytest.mark.parametrize("how", ["raise", "exit", "nan"])
def test_a_fault_ends_its_own_request(server: Server, survivors: Survivors, how: str) -> None:
    broken = STRIDE | {"vllm_xargs": {"break": how, "after": 6}}
    with survivors.watch():
        for stream in (False, True):
            answer = server.post("/v1/completions", broken | {"stream": stream})
            assert answer.status_code == (200 if stream else 500)
            assert "logits processor own_processors:Breaks" in answer.text


def test_a_fault_on_admission(server: Server, survivors: Survivors) -> None:
    with survivors.watch():
        answer = server.post("/v1/completions", STRIDE | {"vllm_xargs": {"break": "check"}})
        assert answer.status_code == 500 and "own_processors:Breaks failed: KeyError" in answer.text


BAD: list[dict[str, Any]] = [
    {"stride": 0},
    {"stride": "x"},
    {"stride": {"deep": [1]}},
    {"stride": 10**30},
    {"stride": 1, "more": [0] * 5000},
    {"stride": 1, "more": "x" * 100_000},
    {"stride": 1, "\ud800": 1},
]


def test_bad_arguments_are_a_400_before_any_byte(server: Server, survivors: Survivors) -> None:
    with survivors.watch():
        for bad in [*BAD, [1], "x", 7]:
            for stream in (False, True):
                body = json.dumps(STRIDE | {"vllm_xargs": bad, "stream": stream})
                headers = {"Content-Type": "application/json"}
                answer = server.client.post("/v1/completions", content=body, headers=headers)
                assert answer.status_code == 400, (bad, answer.text)
                assert answer.json()["error"]["param"] in ("extra_args", "vllm_xargs")


def test_the_fingerprint_names_them(server: Server) -> None:
    parts = server.client.get("/version").json()["fingerprint_parts"]
    assert parts["logits_processors"] == "own_processors:Stride (flag), own_processors:Breaks (flag)"


def test_a_start_with_one_that_cannot_be_loaded_fails_with_one_line() -> None:
    command = [sys.executable, "-m", "evensong.entrypoints.cli.main", "serve", "demo", "--port", "0"]
    result = subprocess.run(
        [*command, "--logits-processors", "own_processors:Absent"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    last = result.stderr.strip().splitlines()[-1]
    assert "own_processors:Absent" in last and "Traceback" not in result.stderr, result.stderr


def test_without_any_the_arguments_are_refused() -> None:
    with LLM("demo", multiprocess=False, disable_log_stats=True) as llm:
        with pytest.raises(RequestError, match="none is loaded") as caught:
            llm.generate("a", SamplingParams(extra_args={"stride": 1}), use_tqdm=False)
        assert (caught.value.status, caught.value.param) == (400, "extra_args")
        assert "logits_processors" not in llm.llm_engine.resources.fingerprint_parts
