"""LLM and AsyncLLM with the real model in a real core process."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from evensong.config.resolve import EngineArgs
from evensong.engine.async_llm import AsyncLLM
from evensong.entrypoints.llm import LLM
from evensong.protocol.errors import EngineDeadError, RequestError
from evensong.protocol.request_output import CompletionOutput, RequestOutput
from evensong.protocol.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.launching import children, eventually

SETTINGS: dict[str, Any] = {
    "num_kv_blocks_override": 160,
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "disable_log_stats": True,
}
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village",
    "日本の首都は",
    "Emoji: 👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈",
    "def fibonacci(n):\n",
    "naïve café, e\u0301",
]


@pytest.fixture(scope="module", autouse=True)
def sockets_base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In place of the check after every test, for engines that live longer: the whole file leaves nothing."""
    base = tmp_path_factory.mktemp("s")
    before = set(children())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(base))
        yield base
    assert eventually(lambda: not set(children()) - before), "a process is left"
    assert eventually(lambda: not any(base.iterdir())), f"folders are left: {list(base.iterdir())}"


@pytest.fixture(scope="module")
def llm(demo_model: Path, sockets_base: Path) -> Iterator[LLM]:
    with LLM(str(demo_model), **SETTINGS) as made:
        yield made


def bytes_of(choice: CompletionOutput) -> tuple[Any, ...]:
    """What must be the same whatever else ran."""
    return (
        choice.text,
        choice.token_ids,
        choice.logprobs,
        choice.cumulative_logprob,
        choice.finish_reason,
        choice.stop_reason,
    )


def mixed_params() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0, max_tokens=16, logprobs=3),
        SamplingParams(temperature=0.9, seed=11, max_tokens=16, logprobs=0),
        SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=-5, max_tokens=16),
        SamplingParams(temperature=0.7, min_p=0.05, seed=3, max_tokens=16, presence_penalty=1.0),
        SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.3, min_tokens=10),
        SamplingParams(temperature=1.5, seed=2**62, max_tokens=16, logit_bias={504: 3.0}),
    ]


def test_one_answer_alone_or_in_a_batch(llm: LLM) -> None:
    params = mixed_params()
    batch = llm.generate(PROMPTS * 2, params * 2, use_tqdm=False)
    for index, (prompt, own) in enumerate(zip(PROMPTS, params, strict=True)):
        (solo,) = llm.generate(prompt, own, use_tqdm=False)
        assert bytes_of(solo.outputs[0]) == bytes_of(batch[index].outputs[0]) == bytes_of(batch[index + 6].outputs[0])
        decoded = llm.get_tokenizer().decode(solo.outputs[0].token_ids)
        assert solo.outputs[0].text == decoded


def test_each_choice_can_be_had_alone(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[1], SamplingParams(n=3, max_tokens=12), use_tqdm=False)
    assert len({choice.text for choice in output.outputs}) == 3
    for choice in output.outputs:
        (alone,) = llm.generate(PROMPTS[1], SamplingParams(max_tokens=12, seed=choice.seed), use_tqdm=False)
        assert bytes_of(alone.outputs[0]) == bytes_of(choice)


def test_stop_strings_end_the_text_exactly(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[17:23]
    cut = text.index(stop)
    for include in (False, True):
        params = SamplingParams(temperature=0, max_tokens=40, stop=[stop], include_stop_str_in_output=include)
        (output,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
        choice = output.outputs[0]
        assert choice.text == text[: cut + len(stop) * include]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        assert choice.token_ids == whole.outputs[0].token_ids[: len(choice.token_ids)]
        # The last token is the one that completed the stop string.
        assert stop not in llm.get_tokenizer().decode(choice.token_ids[:-1])
    assert llm.check_kv_cache()["owned"] == 0  # type: ignore[attr-defined]


def test_sleep_gives_memory_back_and_the_bytes_are_the_same(llm: LLM) -> None:
    core = next(c for c in psutil.Process().children(recursive=True) if "core-0" in " ".join(c.cmdline()))
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=16, logprobs=2)
    before = bytes_of(llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0])
    engine: Any = llm
    parts = llm.llm_engine.resources.fingerprint_parts
    awake = core.memory_info().rss
    engine.sleep(level=2)
    assert engine.is_sleeping() and engine.is_paused()
    # The packed weights are the most of what a small pool leaves.
    assert core.memory_info().rss < awake - 100 * 2**20
    with pytest.raises(RequestError, match="wake_up"):
        engine.resume()
    engine.wake_up()
    assert engine.collective_rpc("describe") == [{name: parts[name] for name in engine.collective_rpc("describe")[0]}]
    assert bytes_of(llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]) == before


def test_chat_answers(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    (output,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.prompt is not None and output.prompt.startswith("<|im_start|>")
    assert not output.outputs[0].text.endswith("<|im_end|>")


def test_bad_prompts_leave_nothing_running(llm: LLM) -> None:
    for bad in ("", [49152], [-1], "x " * 2000, "\ud800"):
        with pytest.raises(RequestError, match="^prompt 1: "):
            llm.generate(["fine", bad], use_tqdm=False)
    assert llm.is_scheduler_empty()  # type: ignore[attr-defined]
    assert llm.check_kv_cache()["owned"] == 0  # type: ignore[attr-defined]


SCRIPT = """
import sys, time
from evensong import LLM, SamplingParams
llm = LLM({model!r}, **{settings!r})
print("ready", flush=True)
try:
    llm.generate(["Once upon a time"] * 8, SamplingParams(max_tokens=450, ignore_eos=True), use_tqdm=False)
    print("not interrupted", flush=True)
except KeyboardInterrupt:
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    print("after:", output.outputs[0].text.split(".")[0], llm.check_kv_cache()["owned"], flush=True)
"""


def test_ctrl_c_in_a_script_without_a_main_guard(demo_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(model=str(demo_model), settings=SETTINGS))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "after:  Paris 0\n"
        assert process.wait(20) == 0
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_streams_equal_the_batch_aborts_leave_nothing_and_death_is_heard(demo_model: Path, llm: LLM) -> None:
    params = mixed_params()
    expected = llm.generate(PROMPTS, params, use_tqdm=False)

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(EngineArgs(model=str(demo_model), **SETTINGS))
        try:
            rng = random.Random(3)
            followers = [follow(engine, PROMPTS[i], params[i], expected[i].outputs[0]) for i in range(len(PROMPTS))]
            leavers = [leave(engine, number, rng) for number in range(60)]
            await asyncio.wait_for(asyncio.gather(*followers, *leavers), 120)
            await nothing_is_left(engine)
            await asyncio.wait_for(killed(engine), 30)
        finally:
            engine.shutdown()

    asyncio.run(main())


async def follow(engine: AsyncLLM, prompt: str, params: SamplingParams, choice: CompletionOutput) -> None:
    """The same request as a stream."""
    own = params.clone()
    own.output_kind = RequestOutputKind.DELTA
    outputs = await drain(engine, prompt, own, "same id for all")
    assert "".join(output.outputs[0].text for output in outputs) == choice.text
    assert [token for output in outputs for token in output.outputs[0].token_ids] == choice.token_ids
    assert outputs[-1].outputs[0].finish_reason == choice.finish_reason


async def leave(engine: AsyncLLM, number: int, rng: random.Random) -> None:
    """A consumer that is cancelled in some phase of its request."""
    long = SamplingParams(max_tokens=400, ignore_eos=True, n=1 + number % 3)
    task = asyncio.create_task(drain(engine, f"{number} bottles of", long, f"q{number}"))
    await asyncio.sleep(rng.random() * 0.5)
    task.cancel()
    await asyncio.wait([task])


async def nothing_is_left(engine: AsyncLLM) -> None:
    """Aborted requests hold no block, here or in the core, and the gauges say so."""
    deadline = time.monotonic() + 10
    while not await engine.is_scheduler_empty():  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    counts = await engine.check_kv_cache()  # type: ignore[attr-defined]
    assert (counts["owned"], counts["tables"]) == (0, 0)
    assert engine.front.outputs.num_requests == 0
    await gauges_at_zero(engine)


async def killed(engine: AsyncLLM) -> None:
    """Every waiter hears within a second that the core was killed."""
    long = SamplingParams(max_tokens=450, ignore_eos=True)
    tasks = [asyncio.create_task(drain(engine, "x", long, str(i))) for i in range(6)]
    await asyncio.sleep(0.3)
    newest = max(psutil.Process().children(recursive=True), key=lambda process: process.create_time())
    os.kill(newest.pid, signal.SIGKILL)
    start = time.monotonic()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert time.monotonic() - start < 1
    assert all(isinstance(result, EngineDeadError) for result in results)
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    with pytest.raises(EngineDeadError):
        await engine.reset_prefix_cache()  # type: ignore[attr-defined]


async def drain(engine: AsyncLLM, prompt: str, params: SamplingParams, request_id: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, request_id)]


async def gauges_at_zero(engine: AsyncLLM) -> None:
    """The core reports that it is idle."""
    names = {"evensong:num_requests_running", "evensong:num_requests_waiting", "evensong:kv_cache_usage_perc"}
    deadline = time.monotonic() + 3
    while True:
        text = engine.front.outputs.metrics.render().decode()
        values = [s.value for f in text_string_to_metric_families(text) for s in f.samples if s.name in names]
        if values == [0.0, 0.0, 0.0]:
            return
        assert time.monotonic() < deadline, values
        await asyncio.sleep(0.02)
