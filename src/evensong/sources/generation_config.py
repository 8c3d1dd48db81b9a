"""Sampling defaults that a model's authors recommend, from generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evensong.protocol.errors import ConfigError, RequestError
from evensong.protocol.sampling_params import SamplingParams
from evensong.sources.resolve import ModelSource
from evensong.sources.values import read_json

FILE_NAME = "generation_config.json"
AUTO, NONE = "auto", "vllm"
# Names in the file -> fields of SamplingParams. What else a file says is about other programs' ways of decoding.
_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def load_generation_defaults(
    source: ModelSource, setting: str = AUTO, override: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Fields of SamplingParams that a request which says nothing gets, as the setting `generation_config` picks them.

    `auto`: from the model's own generation_config.json, where its folder has one (a GGUF file has none); `vllm`: none;
    else from the folder of that name. `override`, under the file's names, goes over it. Raises ConfigError for a folder
    without the file and for names and values that cannot be.
    """
    for name in override or ():
        if name not in _FIELDS:
            raise ConfigError(f"override_generation_config cannot set {name!r:.60}; it can: {', '.join(_FIELDS)}")
    own = _fields_of(override or {}, "override_generation_config")
    return {**_from_file(source, setting), **own}


def _from_file(source: ModelSource, setting: str) -> dict[str, Any]:
    if setting == NONE:
        return {}
    if setting == AUTO:
        path = source.path / FILE_NAME
        return _fields_of(read_json(path), str(path)) if source.kind == "folder" and path.is_file() else {}
    try:
        path = Path(setting).expanduser() / FILE_NAME
        found = bool(setting) and path.is_file()
    except (OSError, RuntimeError, ValueError):  # names too long, a home that is not known
        found = False
    if not found:
        raise ConfigError(f"generation_config {setting!r:.200} is not auto, vllm or a folder with a {FILE_NAME}")
    return _fields_of(read_json(path), str(path))


def _fields_of(stored: Mapping[str, Any], where: str) -> dict[str, Any]:
    defaults = {field: stored[name] for name, field in _FIELDS.items() if stored.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ConfigError(f"{where} cannot be used: {error}") from error
    return defaults
