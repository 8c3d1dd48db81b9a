"""`evensong serve [MODEL]`: its flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evensong.config.resolve import build_section, check_server, resolve
from evensong.config.sections import ENGINE_SECTIONS, ServerConfig
from evensong.engine.frontend.front import read_template
from evensong.entrypoints.cli.flags import Parser, add_section_flags, section_values
from evensong.entrypoints.cli.serve import serve


def make_parser() -> Parser:
    """Flags of the engine's sections and of the server."""
    parser = Parser(prog="evensong serve", description="Serve a model over the OpenAI HTTP API.")
    parser.add_argument(
        "model", nargs="?", default="demo", metavar="MODEL", help="a folder, a .gguf file, a name on the hub, or demo"
    )
    add_section_flags(parser, ServerConfig)
    for section in ENGINE_SECTIONS.values():
        add_section_flags(parser, section, skip=("model",))
    return parser


def run(arguments: Sequence[str]) -> int:
    """Serves; returns the exit code."""
    namespace = make_parser().parse_args(list(arguments))
    settings: dict[str, Any] = {}
    for section in ENGINE_SECTIONS.values():
        settings |= section_values(namespace, section)
    server = check_server(build_section(ServerConfig, section_values(namespace, ServerConfig)))
    if server.chat_template is not None:
        read_template(server.chat_template)  # what is wrong with it is said before anything starts
    return serve(resolve(settings), server)
