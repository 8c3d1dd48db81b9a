"""`evensong profile MODEL | --url U`: a load, one Chrome trace of all ranks while it runs, and what the trace says."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evensong.entrypoints.cli.bench.datasets import add_dataset_flags, check_dataset_flags
from evensong.entrypoints.cli.bench.report import check_plot, show
from evensong.entrypoints.cli.flags import Parser, add_engine_flags, engine_values
from evensong.entrypoints.cli.profile.own import DEFAULT_OUTPUT, profile_own
from evensong.entrypoints.cli.profile.picture import draw
from evensong.entrypoints.cli.profile.server import profile_server
from evensong.observe.trace_figures import TraceError, figures_of, read_trace, table_of
from evensong.protocol.errors import ConfigError

FAILURE = 1
# What `--url` makes use of, of the engine's flags: prompts are made of it.
_SHARED = ("seed", "model")


def make_parser() -> Parser:
    """The load's flags are those of the benchmarks; the engine's are for MODEL."""
    parser = Parser(prog="evensong profile", description="Load, and one Chrome trace of all ranks while it runs.")
    parser.add_argument("model", nargs="?", default=None, metavar="MODEL", help="profile an engine of its own")
    parser.add_argument("--url", default=None, help="profile this running server, started with --torch-profiler-dir")
    parser.add_argument(
        "--api-key", default=argparse.SUPPRESS, help="with --url: the server's key (default: $EVENSONG_API_KEY)"
    )
    parser.add_argument(
        "--output", default=None, metavar="FILE", help=f"with MODEL: the trace (default: {DEFAULT_OUTPUT})"
    )
    parser.add_argument("--png", default=None, metavar="FILE.png", help="draw the trace (needs evensong[plot])")
    parser.add_argument(
        "--png-ms", type=float, default=None, metavar="MS", help="time in the picture (default: 40, or four steps)"
    )
    parser.add_argument("--output-json", default=None, metavar="FILE", help="write the figures to this file as well")
    add_dataset_flags(parser, num_prompts=32, input_len=32, output_len=64)
    add_engine_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Profiles, prints a table and one JSON line. Exit code 1 when a trace was made that cannot be read here."""
    parser = make_parser()
    options = parser.parse_args(list(arguments))
    _check(options, parser)
    check_dataset_flags(options)
    check_plot(options.png, "--png")
    if options.url is None:
        trace, result = profile_own(options)
    else:
        trace, result = profile_server(options)
    result = {"trace": trace, **result}
    try:
        processes = read_trace(trace)
    except (OSError, TraceError) as error:
        # On another machine, or none of our business: what was asked for is done, and said.
        sys.stderr.write(f"evensong profile: the trace is written, but cannot be read here: {error}\n")
        show(f"trace: {trace}", result, options.output_json)
        return FAILURE if options.png is not None or options.url is None else 0
    figures = figures_of(processes)
    # Shown first: a picture that cannot be written must not cost the figures.
    show(f"{table_of(figures)}\n\ntrace: {trace}", result | figures, options.output_json)
    if options.png is not None:
        draw(Path(options.png), processes, figures, options.png_ms)
    return 0


def _check(options: argparse.Namespace, parser: Parser) -> None:
    """One of MODEL and --url, and nothing that has no effect beside it. Raises ConfigError."""
    if (options.model is None) == (options.url is None):
        raise ConfigError("name a MODEL to profile an engine of its own, or a running server with --url: one of them")
    if options.png_ms is not None and not options.png_ms > 0:
        raise ConfigError("--png-ms must be greater than 0")
    if options.url is None:
        if "api_key" in options:
            raise ConfigError("--api-key goes with --url")
        if getattr(options, "torch_profiler_dir", None) is not None:
            raise ConfigError("--torch-profiler-dir is a server's; with MODEL the trace goes to --output")
        return
    given = [name for name, value in engine_values(options).items() if value != _default(parser, name)]
    given = [name for name in given if name not in _SHARED]
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} is the server's to be told, not this command's with --url")
    if options.output is not None:
        raise ConfigError("--output goes with MODEL; a server writes to the folder that it was started with")


def _default(parser: Parser, name: str) -> Any:
    with contextlib.suppress(KeyError):
        default = parser.get_default(name)
        return None if default is argparse.SUPPRESS else default
    return None
