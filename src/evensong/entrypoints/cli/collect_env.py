"""`evensong collect-env`: what a bug report needs to know of this machine. A part that cannot be read says so."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

import evensong
from evensong.entrypoints.cli.flags import Parser
from evensong.utils.machine import available_memory_bytes, memory_limit_bytes, usable_cpus

TORCH_SECONDS = 60
PACKAGES = (
    "torch", "numpy", "tokenizers", "safetensors", "gguf", "msgspec", "pyzmq", "fastapi", "starlette", "pydantic",
    "uvicorn", "uvloop", "httptools", "httpx", "jinja2", "huggingface-hub", "prometheus-client", "psutil",
    "transformers", "llguidance", "openai",
)  # fmt: skip
ISA_FLAGS = (
    "sse4_2", "avx", "fma", "f16c", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "sve", "bf16", "i8mm",
)  # fmt: skip
VARIABLES = re.compile(r"(EVENSONG|OMP|GOMP|KMP|MKL|ONEDNN|DNNL|CUDA|TORCH|HF)_|LD_PRELOAD$|MALLOC_")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
# In a process of its own: it loads for a second, and a broken install must not take the report with it.
TORCH_PROGRAM = """
import json, torch
build = {line.split(":")[0].strip(" -"): line.strip(" -") for line in torch.__config__.show().splitlines()}
print(json.dumps({
    "version": torch.__version__,
    "threads": torch.get_num_threads(),
    "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    "onednn": torch.backends.mkldnn.is_available(),
    "build": [line for line in build.values() if any(w in line for w in ("oneDNN", "OpenMP", "GCC", "MKL-DNN"))],
    "cuda": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
}))
"""


def collect() -> dict[str, Any]:
    """Every part by name; one that cannot be read is a text that starts with `not known`."""
    parts: dict[str, Callable[[], Any]] = {
        "evensong": _evensong,
        "python": lambda: {"version": sys.version.replace("\n", " "), "executable": sys.executable},
        "system": _system,
        "cpu": _cpu,
        "memory": _memory,
        "torch": _torch,
        "packages": lambda: {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "environment": lambda: masked(os.environ),
    }
    return {name: _guarded(part) for name, part in parts.items()}


def masked(variables: Any) -> dict[str, str]:
    """The variables that matter here; the values of secrets are hidden, and keys within addresses too."""
    found = {name: variables[name] for name in sorted(variables) if VARIABLES.match(name)}
    return {
        name: "(set, not shown)" if SECRET.search(name) and value else re.sub(r"//[^/@\s]*@", "//(not shown)@", value)
        for name, value in found.items()
    }


def _guarded(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception as error:  # the report is for machines on which something is wrong
        return f"not known ({type(error).__name__}: {error})"[:300]


def _evensong() -> dict[str, Any]:
    here = Path(evensong.__file__).resolve().parent
    return {"version": evensong.__version__, "folder": str(here), "commit": _commit(here)}


def _commit(folder: Path) -> str | None:
    """The checkout's commit, with a note where files differ from it; None outside a checkout of evensong."""
    if not (folder.parent.parent / ".git").exists():
        return None
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}{' (changed)' if changed else ''}"


def _system() -> dict[str, Any]:
    names = _guarded(platform.freedesktop_os_release)
    return {
        "os": names.get("PRETTY_NAME", platform.system()) if isinstance(names, dict) else platform.system(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
    }


def _cpu() -> dict[str, Any]:
    fields: dict[str, str] = {}
    text = _guarded(lambda: Path("/proc/cpuinfo").read_text())
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable": usable_cpus(),
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def _memory() -> dict[str, str]:
    machine = psutil.virtual_memory()
    values = {
        "machine": machine.total,
        "limit": memory_limit_bytes(),
        "available": available_memory_bytes(),
        "swap": psutil.swap_memory().total,
    }
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    more = {"transparent_hugepages": huge.read_text().strip()} if huge.exists() else {}
    return {name: f"{value / 2**30:.2f} GiB" for name, value in values.items()} | more


def _torch() -> Any:
    """What torch says of itself, in a process of its own."""
    text = _output(sys.executable, "-c", TORCH_PROGRAM, seconds=TORCH_SECONDS)
    return json.loads(text.splitlines()[-1])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str, seconds: float = 10) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip().rpartition("\n")[2] or f"{command[0]} ended with code {done.returncode}")
    return done.stdout.strip()


def as_text(report: dict[str, Any]) -> str:
    """For a person: one part after another."""
    lines = []
    for name, part in report.items():
        if not isinstance(part, dict):
            lines.append(f"{name}: {part}")
            continue
        lines.append(f"{name}:")
        for key, value in part.items():
            shown = " ".join(map(str, value)) if isinstance(value, list) else "-" if value is None else value
            lines.append(f"  {key}: {shown}")
    return "\n".join(lines)


def run(arguments: Sequence[str]) -> int:
    """Writes the report; exit code 0 whatever is missing."""
    parser = Parser(prog="evensong collect-env", description="What a bug report needs to know of this machine.")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    options = parser.parse_args(list(arguments))
    report = collect()
    sys.stdout.write(f"{json.dumps(report, indent=2) if options.json else as_text(report)}\n")
    return 0
