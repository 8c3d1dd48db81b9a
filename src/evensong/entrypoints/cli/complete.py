"""`evensong complete [MODEL] [--url U] --prompt TEXT`: the text that follows a prompt."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from evensong.entrypoints.cli.terminal import make_parser, open_source, show
from evensong.protocol.errors import RequestError


def run(arguments: Sequence[str]) -> int:
    """One completion, of `--prompt` or of standard input; returns the exit code."""
    parser = make_parser("evensong complete", "Continue a text.", max_tokens=128)
    parser.add_argument("--prompt", default=None, help="the text; without it standard input is read")
    options = parser.parse_args(list(arguments))
    prompt = options.prompt if options.prompt is not None else sys.stdin.read()
    if not prompt:
        raise RequestError("there is no prompt: give --prompt TEXT or pipe it in")
    source = open_source(options)
    try:
        show(source.complete(prompt))
    finally:
        source.close()
    return 0
