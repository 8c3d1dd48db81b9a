"""Settings of vLLM that scripts pass and evensong has no use for: accepted where they ask for nothing else.

A script that changes its import should run. A value that asks for something that evensong does not do is refused, since
going on without it would not be what the caller asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evensong.protocol.errors import ConfigError


@dataclass(frozen=True)
class ForeignSetting:
    """`harmless` says whether a value may be left out; `instead` what to know or do where it may not."""

    harmless: Callable[[Any], bool]
    instead: str


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(known) and value == known for known in values)


_ONE_DEVICE = ForeignSetting(_one_of(1), "an engine runs on one device so far")
_MEMORY = ForeignSetting(_number, "expected a number; set the size of the KV cache with kv_cache_memory_bytes")
_OWN_CHOICE = ForeignSetting(_flag, "expected True or False")

FOREIGN: dict[str, ForeignSetting] = {
    "data_parallel_size": _ONE_DEVICE,
    "gpu_memory_utilization": _MEMORY,
    "swap_space": _MEMORY,
    "cpu_offload_gb": ForeignSetting(_one_of(0, 0.0), "weights stay on one device"),
    # No code of a model's folder ever runs, nothing is compiled at start, no kernel is picked by hand.
    "trust_remote_code": _OWN_CHOICE,
    "disable_custom_all_reduce": _OWN_CHOICE,
    "disable_log_requests": _OWN_CHOICE,
    "enable_log_requests": ForeignSetting(_one_of(False), "requests are not logged so far"),
    "skip_tokenizer_init": ForeignSetting(_one_of(False), "the tokenizer is always loaded"),
    "tokenizer_mode": ForeignSetting(_one_of("auto"), "there is one kind of tokenizer"),
    "tokenizer": ForeignSetting(_one_of(None), "the tokenizer is read from the model's files"),
    "quantization": ForeignSetting(_one_of(None, "none", "auto"), "weights are dequantised to dtype so far"),
    "load_format": ForeignSetting(_one_of("auto"), "the format is read from the files"),
    "tokenizer_revision": ForeignSetting(_one_of(None), "the tokenizer is read from the model's files"),
    "download_dir": ForeignSetting(_one_of(None), "files from a hub go where HF_HOME or HF_HUB_CACHE says"),
    "enable_sleep_mode": ForeignSetting(_flag, "sleep needs no flag"),
    "enable_lora": ForeignSetting(_one_of(False), "there are no adapters so far"),
}


def is_foreign(name: str, value: Any) -> bool:
    """True for a setting that can be left out; raises ConfigError where its value asks for what evensong lacks."""
    known = FOREIGN.get(name)
    if known is None:
        return False
    if not known.harmless(value):
        raise ConfigError(f"{name} cannot be {value!r}: {known.instead}")
    return True
