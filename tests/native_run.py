"""`make test-native`: the kernels' tests on a build of the extension with sanitizers, in a folder of its own.

python -m tests.native_run [pytest arguments]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "sanitized"
TESTS = "tests/unit/kernels/cpu"
_READY = "EVENSONG_SANITIZED_RUN"


def build() -> None:
    """Installs the package, its extension compiled with sanitizers, into build/sanitized."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-deps", "--upgrade"]
    command += ["--target", str(BUILD), "-C", "build-dir=build/native-sanitized"]
    command += ["-C", "cmake.define.EVENSONG_SANITIZE=ON", "-C", "cmake.build-type=RelWithDebInfo", str(ROOT)]
    subprocess.run(command, check=True)


def runtime() -> str:
    """What must be loaded before all else: the sanitizer, and the library whose exceptions it watches."""
    names = ("libasan.so", "libstdc++.so")
    found = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in names
    ]
    return ":".join(one.stdout.strip() for one in found)


def main() -> int:
    """Builds, then runs the tests in an interpreter that starts with the sanitizer's runtime."""
    if os.environ.get(_READY) != "1":
        build()
        environment = {
            **os.environ,
            _READY: "1",
            "LD_PRELOAD": runtime(),
            # The interpreter itself frees little at its end.
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        }
        return subprocess.run(
            [sys.executable, "-m", "tests.native_run", *sys.argv[1:]], env=environment, check=False
        ).returncode
    # The editable install's finder would hand out the usual build.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
    sys.path.insert(0, str(BUILD))
    return int(pytest.main(["-p", "no:cacheprovider", TESTS, *sys.argv[1:]]))


if __name__ == "__main__":
    raise SystemExit(main())
