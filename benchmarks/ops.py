"""Times of the op set and of whole model steps: python benchmarks/ops.py [MODEL] [--dtype D] [--repeats N]

A table, then one JSON line. Times are the best of several runs in milliseconds: on a shared machine the least disturbed
run says most about the code.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch

from evensong.kernels.dispatch import make_linear, ops_for
from evensong.kernels.linear import RowProver
from evensong.kernels.mode import NumericMode, numeric_mode
from evensong.layers.attention.metadata import AttentionMetadata, build_attention_metadata
from evensong.models.base import CausalLM
from evensong.models.loader import load_model
from evensong.protocol.kv_spec import KVCacheConfig
from evensong.sources.model_config import ModelDescription, load_model_description
from evensong.sources.resolve import resolve_model
from evensong.sources.weights import open_weights
from evensong.worker.kv_memory import KVMemory

BLOCK_SIZE = 16
# (name, requests, new tokens of each, tokens of each already in the cache)
STEPS = (
    ("decode 1 @ 100", 1, 1, 100),
    ("decode 8 @ 100", 8, 1, 100),
    ("decode 32 @ 192", 32, 1, 192),
    ("decode 64 @ 192", 64, 1, 192),
    ("decode 1 @ 2000", 1, 1, 2000),
    ("prefill 1 x 512", 1, 512, 0),
    ("prefill 4 x 128", 4, 128, 0),
    ("prefill 512 @ 1500", 1, 512, 1500),
)


def best_ms(call: Callable[[], object], repeats: int) -> float:
    """The shortest of `repeats` calls, after one that warms up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def op_times(config: ModelDescription, mode: NumericMode, device: torch.device, repeats: int) -> dict[str, float]:
    """Each op at 1, 32 and 512 rows, in the model's shapes."""
    ops, prover = ops_for(device), RowProver()
    hidden, width = config.hidden_size, config.intermediate_size
    heads = config.num_heads + config.num_kv_heads
    weights = {
        "linear qkv": ((heads + config.num_kv_heads) * config.head_dim, hidden),
        "linear o": (hidden, config.num_heads * config.head_dim),
        "linear gate_up": (2 * width, hidden),
        "linear down": (hidden, width),
    }
    linears = {
        name: make_linear(ops, prover, torch.randn(shape, device=device).to(mode.compute), None)
        for name, shape in weights.items()
    }
    norm = torch.ones(hidden, device=device)
    times: dict[str, float] = {}
    for rows in (1, 32, 512):
        for name, linear in linears.items():
            x = torch.randn(rows, weights[name][1], device=device).to(mode.compute)
            times[f"{name} x{rows}"] = best_ms(lambda: linear(x), repeats)  # noqa: B023
        x = torch.randn(rows, hidden, device=device).to(mode.compute)
        gate_up = torch.randn(rows, 2 * width, device=device).to(mode.compute)
        q = torch.randn(rows, heads, config.head_dim, device=device).to(mode.compute)
        cos = torch.randn(rows, 1, config.head_dim, device=device).to(mode.compute)
        times[f"rms_norm x{rows}"] = best_ms(lambda: ops.rms_norm(x, norm, 1e-5, mode.compute), repeats)  # noqa: B023
        times[f"silu_mul x{rows}"] = best_ms(lambda: ops.silu_mul(gate_up), repeats)  # noqa: B023
        times[f"rotary x{rows}"] = best_ms(lambda: ops.rotary(q, cos, cos), repeats)  # noqa: B023
    return times


class StepBench:
    """Whole steps of a loaded model, with as much cache as the largest of them needs."""

    def __init__(self, model: CausalLM, mode: NumericMode, device: torch.device) -> None:
        self._model = model
        self._device = device
        tokens = max(requests * (new + cached) for _, requests, new, cached in STEPS)
        self._num_blocks = 2 * (tokens // BLOCK_SIZE + 1)
        pool = KVCacheConfig(self._num_blocks, BLOCK_SIZE)
        self._caches = KVMemory(model.kv_specs(), pool, mode.kv, device).caches
        for cache in self._caches:
            cache[:-1].normal_()

    def run(self, requests: int, new: int, cached: int, repeats: int) -> dict[str, float]:
        """Milliseconds of building the metadata, of the layers, and of the output head for one row a request."""
        rng = np.random.default_rng(0)
        per_request = -(-(new + cached) // BLOCK_SIZE)
        blocks = rng.permutation(self._num_blocks)[: requests * per_request].reshape(requests, per_request)
        positions = torch.arange(cached, cached + new, device=self._device).repeat(requests)
        token_ids = torch.randint(1, 1000, (requests * new,), device=self._device)

        def metadata() -> list[AttentionMetadata]:
            return build_attention_metadata(
                [new] * requests,
                [cached] * requests,
                list(blocks[:, None]),
                BLOCK_SIZE,
                self._num_blocks * BLOCK_SIZE,
                self._device,
            )

        layers = metadata() * len(self._caches)
        hidden = self._model.forward(token_ids, positions, self._caches, layers)[::new]
        result = {
            "metadata": best_ms(metadata, repeats),
            "layers": best_ms(lambda: self._model.forward(token_ids, positions, self._caches, layers), repeats),
            "head": best_ms(lambda: self._model.compute_logits(hidden), repeats),
        }
        result["step"] = sum(result.values())
        result["tokens_per_second"] = requests * new / result["step"] * 1e3
        return result


@torch.inference_mode()
def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    device = torch.device(args.device)
    mode = numeric_mode(args.dtype, device)
    source = resolve_model(args.model, progress=False)
    config = load_model_description(source)
    start = time.perf_counter()
    model = load_model(config, open_weights(source), mode, device)
    load_seconds = time.perf_counter() - start
    print(f"{args.model}: {mode.name}, {torch.get_num_threads()} threads, loaded in {load_seconds:.2f} s")
    ops = op_times(config, mode, device, 4 * args.repeats)
    for name, ms in ops.items():
        print(f"{name:24} {ms:9.3f} ms")
    bench = StepBench(model, mode, device)
    steps = {}
    print(f"{'step':20} {'metadata':>9} {'layers':>9} {'head':>9} {'step ms':>9} {'tokens/s':>9}")
    for name, requests, new, cached in STEPS:
        if new + cached > config.max_position_embeddings:
            continue
        r = steps[name] = bench.run(requests, new, cached, args.repeats)
        parts = " ".join(f"{r[key]:9.2f}" for key in ("metadata", "layers", "head", "step", "tokens_per_second"))
        print(f"{name:20} {parts}")
    print(json.dumps({"mode": mode.name, "load_seconds": load_seconds, "ops_ms": ops, "steps": steps}))


if __name__ == "__main__":
    main()
