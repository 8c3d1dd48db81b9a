"""StructuredOutputsParams: what a request's output must look like. Field names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from evensong.protocol.errors import RequestError
from evensong.protocol.text import has_lone_surrogate

BACKENDS = ("auto", "llguidance", "xgrammar")
# Other names under which users know them.
_BACKEND_ALIASES = {"guidance": "llguidance"}
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHOICES = 4096
# Whatever describes an output is bounded before anything reads it: a schema of 100 KB is one that somebody generated.
MAX_CHARACTERS = 256 * 1024
# The field that is to blame.
PARAM = "structured_outputs"


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, array_like=True):
    """Exactly one of `json` (a schema), `regex`, `choice`, `grammar` (Lark, or GBNF/EBNF), `json_object` and
    `structural_tag` (a JSON object, as text).

    The whole output matches it. Raises RequestError naming the field. `json` and `structural_tag` may be given as
    objects or as JSON text; they are text afterwards. `whitespace_pattern` is a regular expression for what may stand
    between the tokens of JSON; `disable_any_whitespace` allows nothing there but one space after a comma or colon.
    `disable_additional_properties` forbids keys that a schema does not name, unless it says otherwise.
    `enable_in_reasoning`: the constraint holds from the first token on, also where a model reasons first.
    `backend` is chosen per request: auto, llguidance (alias: guidance) or xgrammar.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    enable_in_reasoning: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        self.json = _json_text("json", self.json)
        self.structural_tag = _json_text("structural_tag", self.structural_tag)
        if self.json_object is False:
            self.json_object = None
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = "none" if not given else " and ".join(given)
            raise RequestError(f"{PARAM} needs exactly one of {', '.join(KINDS)}; it has {found}", param=PARAM)
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_text(name, getattr(self, name))
        _check_choice(self.choice)
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties", "enable_in_reasoning"):
            if not isinstance(getattr(self, name), bool | None):
                raise RequestError(f"{PARAM}.{name} must be true or false", param=PARAM)
        if not isinstance(self.backend, str) or _BACKEND_ALIASES.get(self.backend, self.backend) not in BACKENDS:
            raise RequestError(f"{PARAM}.backend must be one of {', '.join(BACKENDS)}", param=PARAM)
        self.backend = _BACKEND_ALIASES.get(self.backend, self.backend)

    @property
    def kind(self) -> str:
        """The name of the one field that is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)


class ReasoningSpec(msgspec.Struct, omit_defaults=True, array_like=True):
    """How a request's reasoning ends, as the front end knows it: constraints begin behind the text `end`.

    `end_token_ids` spell it, for a budget that is used up. Without `start_token_ids` the output begins inside the
    reasoning; with them it reasons if it begins with these tokens.
    """

    end: str
    end_token_ids: list[int]
    start_token_ids: list[int] = []


def structured_outputs(value: object) -> StructuredOutputsParams | None:
    """`value` checked, whether it is the engine's own form or a JSON object. Raises RequestError."""
    if value is None:
        return None
    if isinstance(value, StructuredOutputsParams):
        return msgspec.structs.replace(value)
    known = set(StructuredOutputsParams.__struct_fields__)
    if not isinstance(value, Mapping):
        raise RequestError(f"{PARAM} must be an object", param=PARAM)
    unknown = sorted(str(key) for key in value if key not in known)
    if unknown:
        raise RequestError(f"{PARAM} cannot hold {unknown[0]!r:.60}", param=PARAM)
    return StructuredOutputsParams(**value)


def _json_text(name: str, value: object) -> str | None:
    """A JSON value as text, whose keys keep their order."""
    if value is None:
        return None
    if not isinstance(value, (str, Mapping, bool)):
        raise RequestError(f"{PARAM}.{name} must be an object, or its JSON text", param=PARAM)
    if not isinstance(value, str):
        try:
            value = msgspec.json.encode(value).decode()
        except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
            raise RequestError(f"{PARAM}.{name} is no JSON value: {error}", param=PARAM) from error
    _check_text(name, value)
    return value


def _check_text(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise RequestError(f"{PARAM}.{name} must be text", param=PARAM)
    if not value.strip():
        raise RequestError(f"{PARAM}.{name} is empty", param=PARAM)
    if len(value) > MAX_CHARACTERS:
        raise RequestError(
            f"{PARAM}.{name} has {len(value)} characters, at most {MAX_CHARACTERS} are allowed", param=PARAM
        )
    if has_lone_surrogate(value):
        raise RequestError(f"{PARAM}.{name} holds a lone surrogate, which no text can contain", param=PARAM)


def _check_choice(choice: object) -> None:
    if choice is None:
        return
    if not isinstance(choice, (list, tuple)) or not choice or len(choice) > MAX_CHOICES:
        raise RequestError(f"{PARAM}.choice must be a list of 1 to {MAX_CHOICES} texts", param=PARAM)
    if sum(len(text) if isinstance(text, str) else 1 for text in choice) > MAX_CHARACTERS:
        raise RequestError(f"{PARAM}.choice has more than {MAX_CHARACTERS} characters", param=PARAM)
    for text in choice:
        _check_text("choice", text)
