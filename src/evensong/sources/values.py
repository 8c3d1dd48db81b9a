"""Values out of files that others wrote: each checked for its kind as it is taken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from evensong.protocol.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return value


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number; True and False, which are numbers in Python, are none in files."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The whole number under `key`. Raises KeyError where it is missing without a default, ValueError for others."""
    value = values.get(key)
    if value is None:
        if default is None:
            raise KeyError(key)
        return default
    if not is_whole(value):
        raise ValueError(f"{key} is {value!r:.80}, not a whole number")
    return value


def number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """The number under `key`, like `whole`."""
    value = values.get(key)
    if value is None:
        if default is None:
            raise KeyError(key)
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{key} is {value!r:.80}, not a number")
    return float(value)


def numbers(values: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """The list of numbers under `key`, like `whole`."""
    items = values[key]
    if not isinstance(items, list):
        raise ValueError(f"{key} is {items!r:.80}, not a list of numbers")
    return tuple(number({key: item}, key) for item in items)


def token_ids(value: Any) -> list[int]:
    """Token ids from nothing, one id or a list. Raises ValueError."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_whole(item) for item in ids):
        raise ValueError(f"{value!r:.80} where token ids belong")
    return list(ids)
