"""MODEL, as a person types it, to files on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evensong.protocol.errors import ConfigError
from evensong.sources.demo import fetch_demo
from evensong.sources.hub import fetch_from_hub, find_in_cache, parse_hub_name

GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are. `name` is what the user typed."""

    kind: Literal["folder", "gguf"]
    path: Path
    name: str


def resolve_model(
    model: str, *, revision: str | None = None, progress: bool = True, fetched: bool = False
) -> ModelSource:
    """The files behind MODEL: `demo`, a .gguf file, a folder with config.json, tokenizer.json and safetensors, or a
    model's name on a hub; what lies here under that name comes first.

    `fetched`: another process has fetched the model, so a hub is not asked again, whose answer may have changed. Raises
    ConfigError in one line that says what was looked for.
    """
    if model == "demo":
        return ModelSource("gguf", fetch_demo(progress=progress), model)
    if not model or "\x00" in model:
        raise ConfigError("MODEL must be a folder, a .gguf file, a name on the hub (org/name), or demo")
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _folder(path, model)
        if path.is_file():
            return _gguf(path, model)
    except (OSError, RuntimeError) as error:  # names too long, folders closed to us, a home that is not known
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read the model {model!r:.200}: {reason}") from error
    name = parse_hub_name(model, revision)
    if name is None:
        kind = "file" if model.endswith(".gguf") else "folder or .gguf file, and it is no name on a hub (org/name)"
        raise ConfigError(f"no model {model!r:.200}: there is no such {kind}")
    path = find_in_cache(name, "it was fetched before") if fetched else fetch_from_hub(name)
    return _folder(path, model) if path.is_dir() else _gguf(path, model)


def _folder(path: Path, model: str) -> ModelSource:
    for needed in ("config.json", "tokenizer.json"):
        if not (path / needed).is_file():
            raise ConfigError(f"the model folder {model!r} has no {needed}")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"the model folder {model!r} has no .safetensors file")
    return ModelSource("folder", path, model)


def _gguf(path: Path, model: str) -> ModelSource:
    with open(path, "rb") as file:
        magic = file.read(len(GGUF_MAGIC))
    if magic != GGUF_MAGIC:
        raise ConfigError(f"the model {model!r} is not a GGUF file (it starts with {magic!r})")
    return ModelSource("gguf", path, model)
