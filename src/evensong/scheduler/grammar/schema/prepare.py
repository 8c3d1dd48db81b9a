"""A user's JSON schema, checked and made into a grammar of llguidance.

The rule: whatever the backend gets wrong, or ignores, is refused by name (RequestError with status 400); nothing is
passed on in the hope that it holds. Work is bounded by what is counted, never by a clock: bytes, nesting, subschemas,
and the backend's own counts (limits.py).
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from llguidance import LLMatcher

from evensong.protocol.errors import RequestError
from evensong.protocol.structured import PARAM, StructuredOutputsParams
from evensong.scheduler.grammar.limits import parser_limits
from evensong.scheduler.grammar.schema.errors import malformed, refused, too_large
from evensong.scheduler.grammar.schema.names import never_both
from evensong.scheduler.grammar.schema.pattern import PatternError, search_body
from evensong.scheduler.grammar.schema.rewrite import Rewriter

MAX_BYTES = 96 * 1024
MAX_JSON_DEPTH = 200
# Between tokens of JSON: one space, or a new line and what indents it. A model cannot go on with it for ever.
WHITESPACE = r"[ ]|\r?\n(?:[ ]{0,40}|\t{0,10})"
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}


def schema_options(params: StructuredOutputsParams) -> dict[str, Any]:
    """How a request wants its schemas to be enforced: the keywords of `prepare_schema`."""
    return {
        "any_whitespace": not params.disable_any_whitespace,
        "whitespace_pattern": params.whitespace_pattern,
        "additional_properties": not params.disable_additional_properties,
    }


def prepare_schema(
    text: str,
    *,
    any_whitespace: bool = True,
    whitespace_pattern: str | None = None,
    additional_properties: bool = True,
) -> str:
    """The grammar, as LLMatcher takes it, of the values of the schema `text`.

    `any_whitespace` False: compact, with at most one space after a comma or colon; `whitespace_pattern`: what may stand
    between tokens instead. `additional_properties` False: objects have the properties that they name, unless they say
    otherwise. Raises RequestError that names the keyword and its place.
    """
    schema = prepare_schema_object(
        text,
        any_whitespace=any_whitespace,
        whitespace_pattern=whitespace_pattern,
        additional_properties=additional_properties,
    )
    return LLMatcher.grammar_from_json_schema(schema)


def prepare_schema_object(
    text: str,
    *,
    any_whitespace: bool = True,
    whitespace_pattern: str | None = None,
    additional_properties: bool = True,
) -> str:
    """As `prepare_schema`, but the schema's own JSON text: what `%json` of a Lark grammar takes."""
    root = _parse(text)
    options = _whitespace(any_whitespace, whitespace_pattern)
    refusal: RequestError | None = None
    for guarded, split in ((True, False), (False, False), (False, True)):
        rewriter = Rewriter(root, closed=not additional_properties, guarded=guarded, split=split)
        answer = _attempt(rewriter, options)
        if isinstance(answer, str):
            return answer
        refusal = answer or refusal
        if not guarded and "oneOf" not in rewriter.places:
            break
    assert refusal is not None
    raise refusal


def _attempt(rewriter: Rewriter, options: dict[str, Any]) -> str | RequestError | None:
    """The schema rewritten, what the backend says against it, or None where keys cannot be guarded."""
    written = rewriter.rewrite()
    if written is False:
        return RequestError("no value satisfies the JSON schema", param=PARAM)
    if not isinstance(written, dict):
        written = {}
    if rewriter.plain_keys:
        if rewriter.guarded:
            return None
        options = {**options, "json_allowed_escapes": 'nrbtf\\"'}
    else:
        options = {**options, "json_allow_general_unicode_escapes": True}
    # Last: where it is taken out the backend moves the last key, and the order of properties follows that of keys.
    schema = json.dumps({**written, "x-guidance": options}, ensure_ascii=False, separators=(",", ":"))
    complaint = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema), limits=parser_limits())
    return _explained(complaint, rewriter) if complaint else schema


def _parse(text: str) -> Any:
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_BYTES:
        raise too_large(f"it has {size} bytes, at most {MAX_BYTES} are allowed")
    if _deepest(text) > MAX_JSON_DEPTH:
        raise too_large(f"its JSON is nested more than {MAX_JSON_DEPTH} levels deep")
    try:
        root = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is no JSON: {error}", param=PARAM) from error
    if not isinstance(root, (dict, bool)):
        raise malformed("#", "#", "must be an object, true or false")
    return root


def _deepest(text: str) -> int:
    """How deep brackets are nested, at most; those inside of texts count too."""
    depth = deepest = 0
    for character in text:
        if character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise malformed(twice, "#", "stands twice in one object")
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _whitespace(any_whitespace: bool, pattern: str | None) -> dict[str, Any]:
    if pattern is None:
        return {"whitespace_pattern": WHITESPACE} if any_whitespace else dict(_SEPARATORS)
    # Of what `\s` is, JSON knows four.
    for spelled in (pattern, pattern.replace("\\s", r"[ \t\r\n]")):
        try:
            body = search_body(f"^(?:{spelled})$")
        except PatternError as error:
            raise RequestError(f"{PARAM}.whitespace_pattern cannot be enforced: {error}", param=PARAM) from error
        if never_both(f"^(?:{body})$", r"[^\x00 \t\r\n]"):
            return {"whitespace_pattern": body}
    raise RequestError(f"{PARAM}.whitespace_pattern matches more than white space", param=PARAM)


def _explained(complaint: str, rewriter: Rewriter) -> RequestError:
    """What the backend says, in the schema's words."""
    line = complaint.split("\n", 1)[0].removeprefix("ERROR: ")
    lower = line.lower()
    for sign, keywords, why in _SIGNS:
        if sign in lower:
            keyword = next((each for each in keywords if each in rewriter.places), keywords[0])
            places = rewriter.places.get(keyword, ["#"])
            return refused(keyword, ", ".join(places[:3]) + (", ..." if len(places) > 3 else ""), why)
    if "unsatisfiable" in lower:
        return RequestError(f"no value satisfies the JSON schema: {line:.200}", param=PARAM)
    if "too large" in lower or "stack level" in lower or "fuel" in lower or "too many" in lower or "limit" in lower:
        return too_large(f"its combinations exceed the grammar's limits ({line:.120})")
    return RequestError(f"the JSON schema cannot be enforced: {line:.200}", param=PARAM)


_SIGNS = (
    ("oneof constraints", ("oneOf",), "its options are not provably apart"),
    ("not disjoint", ("patternProperties",), "its patterns are not provably apart"),
    ("regex is empty", ("pattern", "format"), "whether any text satisfies it beside the other keywords is unclear"),
    ("circular references", ("$ref",), "it is recursive, and keywords stand beside it"),
    ("minproperties", ("minProperties", "maxProperties"), "it counts properties that are optional"),
    ("maxproperties", ("maxProperties", "minProperties"), "it counts properties that are optional"),
    ("integer range", ("minimum", "maximum", "enum", "const"), "the range of numbers has no grammar"),
    ("float range", ("minimum", "maximum", "enum", "const"), "the range of numbers has no grammar"),
    ("multipleof", ("multipleOf",), "the divisor has no grammar"),
)
