"""`make bench`: start-up and throughput of evensong; flags are passed on to pair.py (for a peer: --peer-python ...)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Runs both; the exit code is the first that is not 0."""
    for words in (["startup.py"], ["pair.py", *sys.argv[1:]]):
        code = subprocess.run([sys.executable, str(HERE / words[0]), *words[1:]], check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
