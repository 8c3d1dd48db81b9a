"""The engines of a comparison, each in a process of its own and asked the same way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

# The KV cache of each side that can be told.
KV_BYTES = 2 << 30
# A context of 4,096 tokens and what is generated after it.
MAX_MODEL_LEN = 4352
MAX_STREAMS = 64
CLOSE_SECONDS = 60
SETTLE_SECONDS, SETTLE_POLL, IDLE_SHARE = 60.0, 0.5, 0.1

# Among the settings, but none of the engine's: prompts are of token ids from 10 up to this.
VOCABULARY = "vocabulary"

# Runs in either environment: reads "n prompt_len output_len seed" lines, answers seconds.
PROGRAM = """
import json, os, random, sys, time
if __name__ == "__main__":
    # Engines and their child processes log to what they think is standard output.
    out = os.fdopen(os.dup(1), "w"); os.dup2(2, 1)
    settings = json.loads(sys.argv[2])
    vocabulary = settings.pop("vocabulary", 40000)
    if sys.argv[1] == "evensong":
        from evensong import LLM, SamplingParams
    else:
        from vllm import LLM, SamplingParams
    llm = LLM(**settings)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        n, plen, olen, seed = map(int, line.split())
        rng = random.Random(seed)
        prompts = [{"prompt_token_ids": [rng.randrange(10, vocabulary) for _ in range(plen)]} for _ in range(n)]
        params = SamplingParams(temperature=0, max_tokens=olen, ignore_eos=True)
        start = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(answer.outputs[0].token_ids) == olen for answer in answers), "an answer is too short"
        print(seconds, file=out, flush=True)
"""


class Working(Protocol):
    """Processes that use processor time."""

    def cpu_seconds(self) -> float:
        """What they have had so far."""


def wait_idle(processes: Working) -> None:
    """Waits until they do nothing more: evensong takes the memory of a cache of a given size while it is idle."""
    until, last = time.monotonic() + SETTLE_SECONDS, -1.0
    while time.monotonic() < until and (now := processes.cpu_seconds()) - last > IDLE_SHARE * SETTLE_POLL:
        last = now
        time.sleep(SETTLE_POLL)


class Side(Protocol):
    """One engine of the comparison."""

    name: str

    def run(self, n: int, prompt_len: int, output_len: int, seed: int) -> float:
        """Seconds from the first prompt to the last token of a batch; the same seed means the same prompts."""

    def decode_step(self, n: int, context: int, steps: int, seed: int) -> float:
        """Seconds of one decode step of `n` streams: the mean of `steps` after a prompt of `context` tokens."""

    def pause(self) -> None:
        """Takes it off the processors until it is asked again."""

    def close(self) -> None:
        """Ends its processes."""


class LLMSide:
    """An engine with vLLM's `LLM` class: evensong itself, or vLLM in another environment. Stopped between batches."""

    def __init__(
        self,
        name: str,
        python: str,
        kind: str,
        settings: dict[str, Any],
        processors: Sequence[int] | None = None,
    ) -> None:
        """`processors`: those to which the side, its children with it, is confined."""
        self.name = name
        self._filled: set[tuple[int, int, int]] = set()
        self._log = tempfile.NamedTemporaryFile("w+", suffix=f"-{name}.log")  # noqa: SIM115  closed with the side
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30)}
        self._process = subprocess.Popen(
            [python, "-c", PROGRAM, kind, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=None if processors is None else lambda: os.sched_setaffinity(0, processors),
        )
        self._answer()

    def settle(self) -> None:
        """Waits until it does nothing more."""
        wait_idle(self)

    def run(self, n: int, prompt_len: int, output_len: int, seed: int) -> float:
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.write(f"{n} {prompt_len} {output_len} {seed}\n")
        self._process.stdin.flush()
        seconds = float(self._answer())
        self.pause()
        return seconds

    def decode_step(self, n: int, context: int, steps: int, seed: int) -> float:
        """The prompts are read once into the prefix cache; then batches with 1 and with 1 + `steps` tokens differ by
        the steps alone. Reading them in both would bury the difference under the noise of the prompts."""
        if (n, context, seed) not in self._filled:
            self._filled.add((n, context, seed))
            self.run(n, context, 1, seed)
        first = self.run(n, context, 1, seed)
        return (self.run(n, context, 1 + steps, seed) - first) / steps

    def cpu_seconds(self) -> float:
        """Processor time that its processes have had so far."""
        root = psutil.Process(self._process.pid)
        times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    def pause(self) -> None:
        """Stops its processes: an engine that polls while it has nothing to do would take the other side's cores."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def close(self) -> None:
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(timeout=CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended early: {Path(self._log.name).read_text()[-2000:]}")
        return line.strip()


class LlamaSide:
    """llama.cpp's llama-batched-bench: a process for each batch, its time without loading the model.

    It feeds random tokens and samples nothing; prompts, logits and decode steps are those of the other sides. Its KV
    cache is as large as the batch needs, in f16 unless `flags` say else.
    """

    name = "llama.cpp"

    def __init__(self, binary: str, model: str, threads: int, flags: list[str]) -> None:
        self._command = [binary, "-m", model, "-t", str(threads), "-tb", str(threads), "--output-format", "jsonl"]
        self._flags = flags

    def run(self, n: int, prompt_len: int, output_len: int, seed: int) -> float:
        # The prompts' logits are the first output token's.
        return self._bench(n, prompt_len, output_len - 1)["t"]

    def decode_step(self, n: int, context: int, steps: int, seed: int) -> float:
        return self._bench(n, context, steps)["t_tg"] / steps

    def pause(self) -> None:
        """Nothing of it runs between batches."""

    def close(self) -> None:
        """Nothing of it runs between batches."""

    def _bench(self, n: int, prompt_len: int, steps: int) -> dict[str, Any]:
        context = n * (-(-(prompt_len + steps) // 256) * 256)
        sizes = ["-c", str(context), "-npp", str(prompt_len), "-ntg", str(steps), "-npl", str(n)]
        done = subprocess.run([*self._command, *sizes, *self._flags], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"llama-batched-bench: {done.stderr.strip()[-2000:]}")
        return parse_batched_bench(done.stdout)


def parse_batched_bench(output: str) -> dict[str, Any]:
    """The last line of JSON in what llama-batched-bench printed. Raises ValueError where there is none."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise ValueError(f"llama-batched-bench printed no result (too small a context?): {output.strip()[-500:]}")
    # A speed of no steps is printed as nan or inf, which are no JSON.
    result: dict[str, Any] = json.loads(re.sub(r"(?<=: )-?(?:nan|inf)\b", "null", lines[-1]))
    return result


def evensong_side(model: str, settings: dict[str, Any]) -> LLMSide:
    """This environment's engine; `settings` are added to the common ones, or replace them."""
    own = {"model": model, "log_level": "warning", "kv_cache_memory_bytes": KV_BYTES}
    side = LLMSide("evensong", sys.executable, "evensong", own | _common() | settings)
    side.settle()
    side.pause()
    return side


def vllm_side(python: str, model: str, settings: dict[str, Any] | None = None) -> LLMSide:
    """vLLM in the environment of `python`; `settings` are added to the common ones."""
    side = LLMSide("vllm", python, "vllm", {"model": model, **_common(), **(settings or {})})
    side.pause()
    return side


def _common() -> dict[str, Any]:
    return {"dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_STREAMS}
