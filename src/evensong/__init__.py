"""evensong: an LLM inference engine that always gives the same request the same bytes.

Public names load on first use, so that `import evensong` stays fast.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "LLM": "evensong.entrypoints.llm",
    "LLMEngine": "evensong.engine.llm_engine",
    "AsyncLLM": "evensong.engine.async_llm",
    "EngineArgs": "evensong.config.resolve",
    "SamplingParams": "evensong.protocol.sampling_params",
    "BeamSearchParams": "evensong.protocol.beam_search",
    "LogitsProcessor": "evensong.sampling.processor",
    "RequestOutput": "evensong.protocol.request_output",
    "CompletionOutput": "evensong.protocol.request_output",
    "EngineDeadError": "evensong.protocol.errors",
    "RequestError": "evensong.protocol.errors",
}
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'evensong' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
