"""Logits processors that the test's server loads; the children find this folder in PYTHONPATH."""

from __future__ import annotations

import numpy as np

from evensong import LogitsProcessor, SamplingParams
from evensong.sampling.processor import RequestView
from evensong.sampling.row import Float32


class Stride(LogitsProcessor):
    """Only token ids of one remainder, which moves on with each token of output: depends on the view alone."""

    def wanted(self, params: SamplingParams) -> bool:
        return "stride" in (params.extra_args or {})

    def check(self, params: SamplingParams) -> None:
        stride = (params.extra_args or {})["stride"]
        if not isinstance(stride, int) or not 1 <= stride <= 100:
            raise ValueError(f"stride must be in 1..100, got {stride!r:.40}")

    def apply(self, view: RequestView, logits: Float32) -> None:
        stride = view.extra_args["stride"]
        keep = np.arange(len(logits)) % stride == (len(view.output_token_ids) + len(view.prompt_token_ids)) % stride
        logits[~keep] = -np.inf


class Breaks(LogitsProcessor):
    """Fails in the way that a request asks for, after as many tokens as it says."""

    def wanted(self, params: SamplingParams) -> bool:
        return "break" in (params.extra_args or {})

    def check(self, params: SamplingParams) -> None:
        if (params.extra_args or {})["break"] == "check":
            raise KeyError("on admission")

    def apply(self, view: RequestView, logits: Float32) -> None:
        if len(view.output_token_ids) < view.extra_args.get("after", 0):
            return
        match view.extra_args["break"]:
            case "raise":
                raise ZeroDivisionError("in the middle")
            case "exit":
                raise SystemExit(5)
            case "nan":
                logits[0] = np.nan
