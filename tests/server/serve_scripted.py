"""`evensong serve` with its real HTTP process and a core of scripted tokens: PORT SHUTDOWN_TIMEOUT MODEL."""

from __future__ import annotations

import functools
import sys

from evensong.config.resolve import resolve
from evensong.config.sections import ServerConfig
from evensong.engine.launch_table import CORE, HTTP, PROCESS_TABLE, ProcessRow
from evensong.entrypoints.cli import serve

TABLE = {
    HTTP: PROCESS_TABLE[HTTP],
    CORE: ProcessRow(CORE, "evensong:core-{index}", "tests.engine.scripted_core"),
}


def main() -> int:
    port, timeout, model = sys.argv[1:]
    serve.Server = functools.partial(serve.Server, table=TABLE)  # type: ignore[assignment,misc]
    config = resolve({"model": model, "served_model_name": "scripted", "num_kv_blocks_override": 256})
    return serve.serve(config, ServerConfig(port=int(port), shutdown_timeout=float(timeout)))


if __name__ == "__main__":
    sys.exit(main())
