"""Prompts from files: JSONL, or one JSON array, of the usual sets; what a file is, its first object says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evensong.protocol.errors import ConfigError


def _first_turn(entry: dict[str, Any]) -> Any:
    return entry["turns"][0]


def _first_message(entry: dict[str, Any]) -> Any:
    """ShareGPT: the human's first message."""
    return next(turn["value"] for turn in entry["conversations"] if turn["from"] in ("human", "user"))


def _last_user_message(entry: dict[str, Any]) -> Any:
    return next(m["content"] for m in reversed(entry["messages"]) if m["role"] == "user")


# key that tells the set -> the prompt in an object of it; the first key that the file's first object has decides
FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "prompt": lambda entry: entry["prompt"],  # HumanEval, vLLM's custom set
    "turns": _first_turn,  # MT-bench, Spec-Bench
    "conversations": _first_message,  # ShareGPT
    "messages": _last_user_message,
    "question": lambda entry: entry["question"],  # GSM8K
}


def read_prompts(path: Path, limit: int) -> list[tuple[str, int | None]]:
    """The first `limit` prompts, each with its own output length where the file gives one (`output_tokens`).

    Of a conversation the first turn is taken. Raises ConfigError naming the entry that cannot be used.
    """
    entries = _entries(path)
    if not entries:
        raise ConfigError(f"--dataset-path: {path} holds no prompt")
    first = entries[0]
    form = next((key for key in FORMS if isinstance(first, dict) and key in first), None)
    if form is None:
        raise ConfigError(f"--dataset-path: the entries of {path} have none of the keys {', '.join(FORMS)}")
    prompts: list[tuple[str, int | None]] = []
    for number, entry in enumerate(entries, 1):
        if len(prompts) == limit:
            break
        try:
            text, length = FORMS[form](entry), entry.get("output_tokens")
        except StopIteration:
            continue  # a conversation in which the user says nothing
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ConfigError(f"--dataset-path: entry {number} of {path} has no {form!r} as the first has") from error
        if not isinstance(text, str) or not text:
            raise ConfigError(f"--dataset-path: entry {number} of {path} holds no text under {form!r}")
        prompts.append((text, length if isinstance(length, int) and length > 0 else None))
    return prompts


def _entries(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path: {path} cannot be read: {error}") from error
    if text.lstrip().startswith("["):
        try:
            entries: list[Any] = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"--dataset-path: {path} is not JSON: {error}") from error
        return entries
    entries = []
    # Not splitlines(): a JSON text may hold other line separators.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                entries.append(json.loads(line))
            except ValueError as error:
                raise ConfigError(f"--dataset-path: line {number} of {path} is not JSON: {error}") from error
    return entries
