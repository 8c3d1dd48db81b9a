"""`evensong chat [MODEL] [--url U]`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from evensong.entrypoints.cli.terminal import Messages, make_parser, open_source, show
from evensong.protocol.errors import RequestError


def run(arguments: Sequence[str]) -> int:
    """Until end of input; returns the exit code."""
    parser = make_parser("evensong chat", "Chat with a model; an empty line or Ctrl-D ends it.", max_tokens=None)
    parser.add_argument("--system", default=None, help="the system message")
    options = parser.parse_args(list(arguments))
    messages: Messages = [{"role": "system", "content": options.system}] if options.system else []
    source = open_source(options)
    try:
        for line in _lines():
            asked: Messages = [*messages, {"role": "user", "content": line}]
            try:
                answer = show(source.chat(asked))
            except RequestError as error:
                if not sys.stdin.isatty():
                    raise
                # The conversation goes on without what was refused.
                sys.stderr.write(f"{error}\n")
                continue
            messages = [*asked, {"role": "assistant", "content": answer}]
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
