"""Command-line flags made from the config dataclasses: names, help, types and defaults are theirs."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from evensong.config.sections import ENGINE_SECTIONS

USAGE = 2


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, ()) else super()._get_help_string(action)


class _Listed(argparse.Action):
    """Values of a flag that may come several times; the first one replaces the default."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        given = f"_given_{self.dest}"
        before = getattr(namespace, self.dest) if hasattr(namespace, given) else ()
        setattr(namespace, given, True)
        setattr(namespace, self.dest, (*before, *values))


class Parser(argparse.ArgumentParser):
    """One line for a mistake, naming the nearest flag; exit code 2. Flags are never abbreviated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _Help)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Says what is wrong and ends the process."""
        unknown = re.match(r"unrecognized arguments: (.*)", message)
        if unknown:
            word = next((w for w in unknown[1].split() if w.startswith("-")), unknown[1].split()[0])
            name = word.split("=")[0]
            message = f"there is no flag {name}" if word.startswith("-") else f"unexpected argument {name!r}"
            known = [option for action in self._actions for option in action.option_strings]
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            if close and word.startswith("-"):
                message += f"; did you mean {close[0]}?"
        sys.stderr.write(f"{self.prog}: {message}\n")
        raise SystemExit(USAGE)


def add_section_flags(parser: argparse.ArgumentParser, section: type, *, skip: Sequence[str] = ()) -> None:
    """One flag a field: `--max-model-len N`; for a switch that is on by default `--no-…` as well."""
    hints = typing.get_type_hints(section)
    group = parser.add_argument_group(section.__name__.removesuffix("Config").lower())
    for field in dataclasses.fields(section):
        if field.name in skip:
            continue
        names = field.metadata.get("flags") or (f"--{field.name.replace('_', '-')}",)
        options: dict[str, Any] = {"dest": field.name, "default": field.default, "help": field.metadata["help"]}
        if hints[field.name] is bool:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **options)
            continue
        if typing.get_origin(hints[field.name]) is tuple:
            options |= {"action": _Listed, "type": _read_list, "metavar": field.metadata.get("metavar") or None}
            group.add_argument(*names, **options)
            continue
        if field.metadata.get("choices"):
            options["choices"] = field.metadata["choices"]
        else:
            options["type"] = _reader(hints[field.name])
            options["metavar"] = field.metadata.get("metavar") or None
        if field.default is None:
            # "(default: None)" tells nobody anything; the help line says what happens.
            options["default"] = argparse.SUPPRESS
        group.add_argument(*names, **options)


def section_values(namespace: argparse.Namespace, section: type) -> dict[str, Any]:
    """The values of one section's flags, by field name."""
    values: Mapping[str, Any] = vars(namespace)
    return {f.name: values[f.name] for f in dataclasses.fields(section) if f.name in values}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every section of the engine, but for the model, which each command takes in its own way."""
    for section in ENGINE_SECTIONS.values():
        add_section_flags(parser, section, skip=("model",))


def engine_values(namespace: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings, the model with them, as `resolve` and EngineArgs take them."""
    values: dict[str, Any] = {}
    for section in ENGINE_SECTIONS.values():
        values |= section_values(namespace, section)
    return values


def _read_list(text: str) -> tuple[str, ...]:
    """A JSON list of texts, or texts with commas between."""
    if not text.startswith("["):
        return tuple(part.strip() for part in text.split(","))
    try:
        items = json.loads(text)
    except ValueError:
        items = None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of texts")
    return tuple(items)


def _reader(hint: Any) -> Any:
    """argparse's `type` for a field: a number, a text, or either a number or one of some words."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if any(typing.get_origin(option) is dict for option in options):
        return _json_object
    words = [w for o in options if typing.get_origin(o) is typing.Literal for w in typing.get_args(o)]
    kind = next((o for o in options if o in (int, float)), str)

    def read(text: str) -> Any:
        return text if text in words else kind(text)

    read.__name__ = {int: "integer", float: "number"}.get(kind, "text")  # argparse names it in its message
    return read


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


_json_object.__name__ = "JSON object"
