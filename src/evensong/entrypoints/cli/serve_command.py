"""`evensong serve [MODEL]`: its flags."""

from __future__ import annotations

from collections.abc import Sequence

from evensong.config.resolve import build_section, check_server, resolve
from evensong.config.sections import ServerConfig
from evensong.engine.frontend.front import read_template
from evensong.entrypoints.cli.flags import Parser, add_engine_flags, add_section_flags, engine_values, section_values
from evensong.entrypoints.cli.serve import serve


def make_parser() -> Parser:
    """Flags of the engine's sections and of the server."""
    parser = Parser(prog="evensong serve", description="Serve a model over the OpenAI HTTP API.")
    parser.add_argument(
        "model", nargs="?", default="demo", metavar="MODEL", help="a folder, a .gguf file, a name on the hub, or demo"
    )
    add_section_flags(parser, ServerConfig)
    add_engine_flags(parser)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Serves; returns the exit code."""
    namespace = make_parser().parse_args(list(arguments))
    server = check_server(build_section(ServerConfig, section_values(namespace, ServerConfig)))
    if server.chat_template is not None:
        read_template(server.chat_template)  # what is wrong with it is said before anything starts
    return serve(resolve(engine_values(namespace)), server)
