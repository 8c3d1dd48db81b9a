"""The numeric mode: in which dtypes a model computes on this machine. It belongs to the fingerprint."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NumericMode:
    """`stored`: the dtype that weights are rounded to; `compute`: of products and activations; `kv`: of the cache.

    A CPU without bfloat16 products computes a bfloat16 model in float32: the weights keep their bfloat16 values and
    are widened once, which loses nothing.
    """

    name: str
    stored: torch.dtype
    compute: torch.dtype
    kv: torch.dtype


def numeric_mode(dtype: str, device: torch.device) -> NumericMode:
    """The mode for a run dtype (`bfloat16`, `float16` or `float32`) on a device; float16 on a CPU is bfloat16."""
    if dtype == "float32":
        return NumericMode("float32", torch.float32, torch.float32, torch.float32)
    if dtype == "float16" and device.type != "cpu":
        return NumericMode("float16", torch.float16, torch.float16, torch.float16)
    if device.type == "cpu" and not cpu_multiplies_bfloat16():
        return NumericMode("bfloat16-widened", torch.bfloat16, torch.float32, torch.bfloat16)
    return NumericMode("bfloat16", torch.bfloat16, torch.bfloat16, torch.bfloat16)


def cpu_multiplies_bfloat16() -> bool:
    """True where the processor has bfloat16 dot products (AVX-512 BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def describe_kernels(device: torch.device) -> dict[str, str]:
    """What bits depend on besides the mode: library build and instruction set."""
    if device.type == "cpu":
        # Within these the libraries still choose by cache sizes and more: start-up's trials tell (kernels/linear.py).
        return {"torch": str(torch.__version__), "isa": torch.backends.cpu.get_cpu_capability(), "deterministic": "yes"}
    name = torch.cuda.get_device_name(device)
    # The library's products may depend on the number of rows.
    return {"torch": str(torch.__version__), "isa": name, "deterministic": "no"}
