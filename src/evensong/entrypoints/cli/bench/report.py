"""How results are shown: a table, files, a plot, and one JSON line last."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evensong.entrypoints.cli.bench.figures import METRICS, peaks, percentile_name, values_of
from evensong.entrypoints.cli.bench.load import Record
from evensong.protocol.errors import ConfigError

WIDTH = 50
_LINES = (
    ("completed", "Successful requests:"),
    ("failed", "Failed requests:"),
    ("unfinished", "Unfinished requests:"),
    ("duration", "Benchmark duration (s):"),
    ("total_input_tokens", "Total input tokens:"),
    ("total_output_tokens", "Total generated tokens:"),
    ("request_throughput", "Request throughput (req/s):"),
    ("request_goodput", "Request goodput (req/s):"),
    ("output_throughput", "Output token throughput (tok/s):"),
    ("max_output_tokens_per_s", "Peak output token throughput (tok/s):"),
    ("max_concurrent_requests", "Peak concurrent requests:"),
    ("total_token_throughput", "Total token throughput (tok/s):"),
)


def serving_table(result: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The table of `bench serve`."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    for key, text in _LINES:
        if result[key] is not None and (key != "unfinished" or result[key]):
            lines.append(_line(text, result[key]))
    for metric, (short, header) in METRICS.items():
        if metric in metrics:
            lines.append(header.center(WIDTH, "-"))
            names = [("mean", "Mean"), ("median", "Median")]
            names += [(percentile_name(p), percentile_name(p).upper()) for p in percentiles]
            lines += [_line(f"{word} {short} (ms):", result[f"{key}_{metric}_ms"]) for key, word in names]
    lines.append("=" * WIDTH)
    if result["first_error"]:
        lines.append(f"first error: {result['first_error']}")
    return "\n".join(lines)


def _line(text: str, value: float | int | None) -> str:
    shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{text:<40} {shown}"


def show(table: str, result: dict[str, Any], output_json: str | None = None) -> None:
    """The table, then the result as one JSON line; the same line into a file where one is named."""
    line = json.dumps(result)
    if output_json is not None:
        write(Path(output_json), f"{line}\n")
    sys.stdout.write(f"{table}\n{line}\n")
    sys.stdout.flush()


def write(path: Path, text: str, *, append: bool = False) -> None:
    """Writes a result file; its folder is made. Raises ConfigError where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def check_plot(path: str | None, flag: str = "--plot") -> None:
    """Before a run, not after it: raises ConfigError where a picture cannot be drawn."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{flag} needs matplotlib: pip install 'evensong[plot]'")


def plot(path: Path, records: Sequence[Record], title: str) -> None:
    """Four panels: latencies as shares of requests, tokens and requests in each second, and TTFT over time."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency

    done = [record for record in records if record.done]
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    (first, gaps), (rate, over) = figure.subplots(2, 2)
    for axes, metrics in ((first, ("ttft", "e2el")), (gaps, ("itl", "tpot"))):
        for metric in metrics:
            values = sorted(1000 * value for value in values_of(metric, done))
            axes.plot(values, [(i + 1) / len(values) for i in range(len(values))], label=METRICS[metric][0])
        axes.set(xlabel="ms", ylabel="share at most", ylim=(0, 1.02))
        axes.legend()
    tokens, running = peaks(done)
    rate.plot(tokens, label="output tokens in the second")
    rate.plot(running, label="requests under way")
    rate.set(xlabel="s", ylim=(0, None))
    rate.legend()
    began = min((record.start for record in done), default=0.0)
    over.plot([r.start - began for r in done], [1000 * r.ttft for r in done], ".", label="TTFT by time of sending")
    over.set(xlabel="s", ylabel="ms", ylim=(0, None))
    over.legend()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error}") from error
