"""A profile of an engine of this command's own."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evensong.entrypoints.cli.bench.datasets import load_samples
from evensong.entrypoints.cli.bench.offline import engine_settings, random_ids
from evensong.entrypoints.llm import LLM
from evensong.protocol.errors import ConfigError
from evensong.protocol.sampling_params import SamplingParams

DEFAULT_OUTPUT = "./evensong-trace.json.gz"
# As many streams as will be profiled, so that whatever is made at a first step of that width is made.
WARM_UP_PROMPT, WARM_UP_TOKENS = 16, 8


def profile_own(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The trace's path, and what the load took. Raises ConfigError where --output cannot be written."""
    output = Path(options.output or DEFAULT_OUTPUT).expanduser()
    settings = engine_settings(options)
    with _folder_beside(output) as folder, LLM(**settings | {"torch_profiler_dir": str(folder)}) as llm:
        samples = load_samples(options, lambda: random_ids(llm))
        params = [SamplingParams(temperature=0.0, max_tokens=s.output_len, ignore_eos=True) for s in samples]
        _warm_up(llm, len(samples))
        llm.start_profile()  # type: ignore[attr-defined]  # control verbs are made from a table
        start = time.perf_counter()
        outputs = llm.generate([sample.prompt for sample in samples], params, use_tqdm=sys.stderr.isatty())
        elapsed = time.perf_counter() - start
        (trace,) = llm.stop_profile()  # type: ignore[attr-defined]
        os.replace(trace, output)
    tokens = sum(len(choice.token_ids) for one in outputs for choice in one.outputs)
    return str(output), {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "output_tokens_per_second": tokens / elapsed,
    }


def _warm_up(llm: LLM, num_streams: int) -> None:
    prompts = [[1 + stream % 7] * WARM_UP_PROMPT for stream in range(num_streams)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=WARM_UP_TOKENS, ignore_eos=True), use_tqdm=False)


@contextmanager
def _folder_beside(output: Path) -> Iterator[Path]:
    """A folder on the disk of the output, gone at the end. Known before an engine starts: whether it can be written."""
    try:
        if output.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".evensong-profile-", dir=output.parent))
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
