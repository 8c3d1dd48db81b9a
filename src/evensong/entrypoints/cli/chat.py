"""`evensong chat [MODEL] [--url U]`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from evensong.entrypoints.cli.terminal import Messages, make_parser, open_source, show


def run(arguments: Sequence[str]) -> int:
    """Until end of input; returns the exit code."""
    parser = make_parser("evensong chat", "Chat with a model; an empty line or Ctrl-D ends it.", max_tokens=None)
    parser.add_argument("--system", default=None, help="the system message")
    options = parser.parse_args(list(arguments))
    messages: Messages = [{"role": "system", "content": options.system}] if options.system else []
    source = open_source(options)
    try:
        for line in _lines():
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": show(source.chat(messages))})
    finally:
        source.close()
    return 0


def _lines() -> Iterator[str]:
    """What the user says: typed lines at a terminal, the whole of a pipe as one."""
    if not sys.stdin.isatty():
        text = sys.stdin.read().strip()
        if text:
            yield text
        return
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
        if not line:
            return
        yield line
