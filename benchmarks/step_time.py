"""Python time of a decode step: what a step takes outside of the native calls.

    python benchmarks/step_time.py --streams 32

An engine in this process decodes; functions that do native work are wrapped with a timer, and the time inside them is
taken from the time of `LLMEngine.step`. Percentiles over the steps, then one JSON line. The engine's thread hands over
to the caller's within a step, so that, too, counts as Python.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from sides import KV_BYTES, MAX_STREAMS

from evensong import EngineArgs, LLMEngine, SamplingParams

# "module:name" or "module:Class.name" of what does native work. A function that another module imported by name is
# wrapped where it is called.
NATIVE = ("evensong._native:Engine.submit", "evensong._native:Engine.wait")
WARM_UP_STEPS = 10
# Tokens that the first requests may get while the last one's prompt waits; and seconds of a step, as `LLM` has it.
START_TOKENS, STEP_SECONDS = 500, 1.0


class NativeTime:
    """Seconds inside the wrapped functions, whatever thread calls them; one within another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._lock = threading.Lock()
        self._depth = threading.local()

    def wrap(self, name: str) -> None:
        """Replaces the function by one with a timer. Raises AttributeError or ImportError where there is none."""
        owner, attribute = find(name)
        setattr(owner, attribute, self._timed(getattr(owner, attribute)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        # A native method has no __dict__ and may have no __doc__ to copy: only the call counts.
        @functools.wraps(call, assigned=(), updated=())
        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._depth, "inside", False):
                return call(*args, **kwargs)
            self._depth.inside = True
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                taken = time.perf_counter() - begun
                self._depth.inside = False
                with self._lock:
                    self.seconds += taken
                    self.calls += 1

        return timed


def find(name: str) -> tuple[Any, str]:
    """The owner of "module:Class.name" and the last name. Raises AttributeError or ImportError."""
    module, _, path = name.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, attribute = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    getattr(owner, attribute)
    return owner, attribute


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Of microseconds."""
    cuts = statistics.quantiles(values, n=10)
    return {name: round(value, 1) for name, value in (("p10", cuts[0]), ("p50", cuts[4]), ("p90", cuts[8]))}


def decode_steps(engine: LLMEngine, streams: int, prompt_len: int, steps: int, native: NativeTime) -> dict[str, Any]:
    """Starts `streams` requests and times `steps` steps in which each of them gets a token."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=START_TOKENS + steps, ignore_eos=True)
    for number in range(streams):
        prompt = {"prompt_token_ids": [rng.randrange(10, 40_000) for _ in range(prompt_len)]}
        engine.add_request(str(number), prompt, params)
    full = 0
    while full < WARM_UP_STEPS:
        full = full + 1 if len(engine.step()) == streams else 0
        if engine.get_num_unfinished_requests() < streams:
            raise SystemExit(f"the {streams} requests never decoded together")
    whole, inside, calls = [], [], native.calls
    for _ in range(steps):
        before, begun = native.seconds, time.perf_counter()
        changed = engine.step()
        whole.append(1e6 * (time.perf_counter() - begun))
        inside.append(1e6 * (native.seconds - before))
        if len(changed) != streams:
            raise SystemExit(f"a step gave {len(changed)} of {streams} requests a token")
    if native.calls == calls:
        raise SystemExit("no wrapped function was called: give the right ones with --native")
    engine.abort_all()
    outside = [step - within for step, within in zip(whole, inside, strict=True)]
    return {
        "step_us": percentiles(whole),
        "native_us": percentiles(inside),
        "python_us": percentiles(outside),
        "native_calls_per_step": (native.calls - calls) / steps,
    }


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON: more of EngineArgs")
    parser.add_argument(
        "--native", default=None, help="module:Class.name of the functions to take off, comma-separated"
    )
    options = parser.parse_args()
    names = NATIVE if options.native is None else options.native.split(",")
    native = NativeTime()
    for name in names:
        try:
            native.wrap(name)
        except (AttributeError, ImportError) as error:
            raise SystemExit(f"{name} cannot be timed: {error}") from error
    settings = {
        "dtype": "bfloat16", "kv_cache_memory_bytes": KV_BYTES, "max_num_seqs": MAX_STREAMS, "log_level": "warning",
        "step_seconds": STEP_SECONDS,
    }  # fmt: skip
    engine = LLMEngine.from_engine_args(EngineArgs(options.model, **(settings | options.settings)), multiprocess=False)
    try:
        report: dict[str, Any] = {"streams": options.streams, "taken_off": list(names)}
        report |= decode_steps(engine, options.streams, options.prompt_len, options.steps, native)
    finally:
        engine.shutdown()
    for name in ("step_us", "native_us", "python_us"):
        print(f"  {name:<12}{report[name]}")
    print(f"  {report['native_calls_per_step']:g} native calls a step: {', '.join(names)}", file=sys.stderr)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
