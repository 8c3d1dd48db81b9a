"""`evensong serve` with scripted children: python -m tests.engine.serve_fakes PORT [TIMEOUT] [MODEL]."""

from __future__ import annotations

import functools
import sys

from evensong.config.resolve import resolve
from evensong.config.sections import ServerConfig
from evensong.engine.launch_table import ProcessRow
from evensong.entrypoints.cli import serve
from tests.engine.launching import FAKE_TABLE, SHORT

TABLE = {**FAKE_TABLE, "http": ProcessRow("http", "evensong:http-{index}", "tests.engine.fake_http")}


def main() -> int:
    port, timeout, model = [*sys.argv[1:], *["0", "30", ""][len(sys.argv) - 1 :]][:3]
    serve.Server = functools.partial(serve.Server, table=TABLE, limits=SHORT)  # type: ignore[assignment,misc]
    config = resolve({"model": model or sys.executable + ".gguf"})
    if not model:
        serve.resolve_model = lambda name, **_: None  # type: ignore[assignment]
        serve.load_generation_defaults = lambda *_: {}  # type: ignore[assignment]
    return serve.serve(config, ServerConfig(port=int(port), shutdown_timeout=float(timeout)))


if __name__ == "__main__":
    sys.exit(main())
