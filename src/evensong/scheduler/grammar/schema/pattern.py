"""`pattern` of JSON Schema (ECMA-262, searched anywhere in the text) as the backend's regular expression.

The translation matches the same texts: `\\d`, `\\w`, `\\s` and `.` mean what ECMA-262 says, anchors are resolved, and
classes are written out (in the backend's syntax `[[`, `&&` and `--` would be operators). What has no such translation
(look-around, back references, anchors inside of a pattern) raises PatternError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PATTERN_CHARACTERS = 10_000
MAX_PATTERN_DEPTH = 40
# Characters that a pattern has once its counted repetitions are written out.
MAX_PATTERN_SIZE = 20_000
ANY_TEXT = "(?s:.*)"
_LAST = 0x10FFFF
_DIGIT = [(48, 57)]
_WORD = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE = [
    (9, 13),
    (32, 32),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
]
_LINE_ENDS = [(10, 10), (13, 13), (0x2028, 0x2029)]
_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
# General categories, the property names on which ECMA-262 and the backend agree.
_CATEGORIES = frozenset(
    [
        "L",
        "Lu",
        "Ll",
        "Lt",
        "Lm",
        "Lo",
        "M",
        "Mn",
        "Mc",
        "Me",
        "N",
        "Nd",
        "Nl",
        "No",
        "P",
        "Pc",
        "Pd",
        "Ps",
        "Pe",
        "Pi",
        "Pf",
        "Po",
        "S",
        "Sm",
        "Sc",
        "Sk",
        "So",
        "Z",
        "Zs",
        "Zl",
        "Zp",
    ]
)
Ranges = list[tuple[int, int]]


class PatternError(ValueError):
    """A pattern that is malformed, or that cannot be enforced; the message says which and why."""


@dataclass(frozen=True)
class _Atom:
    """One element of a sequence: an anchor (`^` or `$`), a group, or text of the backend's syntax."""

    text: str = ""
    size: int = 1
    anchor: str = ""
    group: tuple[tuple[_Atom, ...], ...] | None = None


def translate_pattern(pattern: str) -> str:
    """The backend's regular expression, anchored at both ends, for the texts in which `pattern` is found."""
    return f"^(?:{search_body(pattern)})$"


def search_body(pattern: str) -> str:
    """As `translate_pattern`, without the anchors around it."""
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise PatternError(f"it has {len(pattern)} characters, at most {MAX_PATTERN_CHARACTERS} are allowed")
    alternatives = _Parser(pattern).parse()
    if sum(atom.size for sequence in alternatives for atom in sequence) > MAX_PATTERN_SIZE:
        raise PatternError("its counted repetitions are too large")
    return "|".join(dict.fromkeys(_searched(sequence) for sequence in _unwrapped(alternatives)))


def literal(text: str) -> str:
    """A regular expression that matches `text` and nothing else."""
    if "\0" in text:
        raise PatternError("U+0000 cannot be enforced")
    return "".join(_character(ord(character)) for character in text)


def none_of(names: Sequence[str]) -> str:
    """The body of a regular expression that matches every text but `names`. Its size follows theirs."""
    trie: dict[str, object] = {}
    for name in names:
        node = trie
        for character in name:
            node = node.setdefault(character, {})  # type: ignore[assignment]  # a trie: every value is a node
        node[""] = {}
    return _outside(trie)


def _outside(node: dict[str, object]) -> str:
    children = sorted(key for key in node if key)
    options = [_class([(ord(child), ord(child)) for child in children], negated=True) + ANY_TEXT]
    options += [literal(child) + _outside(node[child]) for child in children]  # type: ignore[arg-type]  # nodes, as above
    return f"(?:{'|'.join(options)})" + ("" if "" in node else "?")


def _unwrapped(alternatives: Sequence[Sequence[_Atom]]) -> list[Sequence[_Atom]]:
    """Alternatives with `(^a|b$)` taken apart, where a group is all that there is."""
    result: list[Sequence[_Atom]] = []
    for sequence in alternatives:
        if len(sequence) == 1 and sequence[0].group is not None:
            result += _unwrapped(sequence[0].group)
        else:
            result.append(sequence)
    return result


def _searched(sequence: Sequence[_Atom]) -> str:
    """One alternative with its anchors resolved."""
    first, last = 0, len(sequence)
    while first < last and sequence[first].anchor == "^":
        first += 1
    while last > first and sequence[last - 1].anchor == "$":
        last -= 1
    left, right = "" if first else ANY_TEXT, "" if last < len(sequence) else ANY_TEXT
    if left and right and first == last:
        return ANY_TEXT
    return left + "".join(map(_text, sequence[first:last])) + right


def _text(atom: _Atom) -> str:
    if atom.anchor:
        raise PatternError(f"{atom.anchor!r} stands inside of it")
    if atom.group is None:
        return atom.text
    return f"(?:{'|'.join(''.join(map(_text, sequence)) for sequence in atom.group)})"


def _character(point: int) -> str:
    if point < 128 and chr(point).isalnum():
        return chr(point)
    if 0xD800 <= point <= 0xDFFF:
        raise PatternError("it holds half of a surrogate pair")
    if point == 0:
        return "\\x{0}"
    return f"\\x{{{point:X}}}"


def _class(ranges: Ranges, properties: Sequence[str] = (), *, negated: bool = False) -> str:
    """A character class; without `ranges` and `properties`, and negated, any character.

    The backend takes a class with nearly all control characters for one with all characters, `"` and `\\` among them.
    One that lacks either is spelled without U+0000, which avoids that; no U+0000 is ever written in such a place.
    """
    if not ranges and not properties:
        if not negated:
            raise PatternError("it has an empty class, which nothing matches")
        return "(?s:.)"
    if negated:
        punctuation = any(name in ("\\p{P}", "\\p{Po}") for name in properties)
        if (punctuation or _holds(ranges, 34) or _holds(ranges, 92)) and not _holds(ranges, 0):
            ranges = [(0, 0), *ranges]
    else:
        if any(name in ("\\P{P}", "\\P{Po}") for name in properties):
            raise PatternError("all but punctuation cannot be part of a class")
        if not (_holds(ranges, 34) and _holds(ranges, 92)):
            ranges = [(max(low, 1), high) for low, high in ranges if high > 0]
            if not ranges and not properties:
                raise PatternError("U+0000 cannot be enforced")
    parts = []
    for low, high in ranges:
        # Surrogates are no characters: a range may span them, not end in them.
        low, high = (0xE000 if 0xD800 <= low <= 0xDFFF else low), (0xD7FF if 0xD800 <= high <= 0xDFFF else high)
        if low <= high:
            parts.append(_character(low) if low == high else f"{_character(low)}-{_character(high)}")
    return f"[{'^' if negated else ''}{''.join(parts)}{''.join(properties)}]"


def _holds(ranges: Ranges, point: int) -> bool:
    return any(low <= point <= high for low, high in ranges)


def _complement(ranges: Ranges) -> Ranges:
    result, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            result.append((start, low - 1))
        start = max(start, high + 1)
    return [*result, (start, _LAST)] if start <= _LAST else result


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def parse(self) -> list[tuple[_Atom, ...]]:
        """The alternatives of the whole pattern."""
        alternatives = self._alternatives()
        if self._at < len(self._pattern):
            raise PatternError("it has an unmatched ')'")
        return alternatives

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _next(self) -> str:
        if self._at >= len(self._pattern):
            raise PatternError("it ends too early")
        self._at += 1
        return self._pattern[self._at - 1]

    def _alternatives(self) -> list[tuple[_Atom, ...]]:
        self._depth += 1
        if self._depth > MAX_PATTERN_DEPTH:
            raise PatternError(f"its groups are nested more than {MAX_PATTERN_DEPTH} deep")
        found: list[tuple[_Atom, ...]] = []
        sequence: list[_Atom] = []
        while (character := self._peek()) and character != ")":
            if character == "|":
                self._at += 1
                found.append(tuple(sequence))
                sequence = []
            else:
                sequence.append(self._quantified(self._atom()))
        self._depth -= 1
        return [*found, tuple(sequence)]

    def _atom(self) -> _Atom:
        character = self._next()
        match character:
            case "^" | "$":
                return _Atom(anchor=character, size=0)
            case "(":
                return self._group()
            case "[":
                return _Atom(self._bracket())
            case ".":
                return _Atom(_class(_LINE_ENDS, negated=True))
            case "\\":
                ranges, properties, negated = self._escape(in_class=False)
                if properties and properties[0][1] == "P":
                    properties, negated = [f"\\p{properties[0][2:]}"], True
                return _Atom(_class(ranges, properties, negated=negated))
            case "*" | "+" | "?":
                raise PatternError(f"{character!r} has nothing to repeat")
            case "\0":
                raise PatternError("U+0000 cannot be enforced")
            case _:
                return _Atom(_character(ord(character)))

    def _group(self) -> _Atom:
        if self._peek() == "?":
            self._at += 1
            kind = self._next()
            if kind == "<" and self._peek() not in ("=", "!"):
                while self._next() != ">":
                    pass
            elif kind != ":":
                raise PatternError("look-around and inline flags cannot be enforced")
        inner = self._alternatives()
        if self._peek() != ")":
            raise PatternError("it has an unmatched '('")
        self._at += 1
        return _Atom(size=sum(atom.size for sequence in inner for atom in sequence) + 1, group=tuple(inner))

    def _quantified(self, atom: _Atom) -> _Atom:
        character = self._peek()
        low, high = 0, -1
        if character == "{":
            counts = self._counts()
            if counts is None:
                return atom
            low, high = counts
        elif character and character in "*+?":
            self._at += 1
            low, high = (1 if character == "+" else 0), (1 if character == "?" else -1)
        else:
            return atom
        if self._peek() == "?":
            self._at += 1  # a lazy repetition matches the same texts
        if self._peek() in ("*", "+", "?"):
            raise PatternError(f"{self._peek()!r} has nothing to repeat")
        if atom.anchor:
            raise PatternError(f"{atom.anchor!r} is repeated")
        text = _text(atom)
        if atom.group is None and len(text) > 1 and not text.startswith(("[", "(", "\\")):
            text = f"(?:{text})"
        suffix = {(0, -1): "*", (1, -1): "+", (0, 1): "?"}.get((low, high))
        suffix = suffix or (f"{{{low},}}" if high < 0 else f"{{{low}}}" if low == high else f"{{{low},{high}}}")
        return _Atom(text + suffix, size=min(atom.size * max(low, high, 1), MAX_PATTERN_SIZE + 1))

    def _counts(self) -> tuple[int, int] | None:
        """The bounds of `{m}`, `{m,}` or `{m,n}`; None where the brace is only a character."""
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at + 1 : max(end, self._at)].partition(",")
        if end < 0 or not _is_count(low) or (high and not _is_count(high)):
            return None
        self._at = end + 1
        if len(low) > 6 or len(high) > 6:
            raise PatternError("its counted repetitions are too large")
        bounds = int(low), int(high) if high else (-1 if comma else int(low))
        if 0 <= bounds[1] < bounds[0]:
            raise PatternError("a repetition's bounds are out of order")
        return bounds

    def _bracket(self) -> str:
        negated = self._peek() == "^"
        self._at += negated
        ranges: Ranges = []
        properties: list[str] = []
        while self._peek() != "]":
            found, names, inverted = self._class_member()
            if names:
                properties += names
                continue
            found = _complement(found) if inverted else found
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                upper, upper_names, upper_inverted = self._class_member()
                if upper_names or upper_inverted or inverted or len(found) != 1 or len(upper) != 1:
                    raise PatternError("a class has a range between classes")
                if found[0][0] != found[0][1] or upper[0][0] != upper[0][1]:
                    raise PatternError("a class has a range between classes")
                found = [(found[0][0], upper[0][0])]
                if found[0][1] < found[0][0]:
                    raise PatternError("a class's range is out of order")
            ranges += found
        self._at += 1
        return _class(ranges, properties, negated=negated)

    def _class_member(self) -> tuple[Ranges, list[str], bool]:
        character = self._next()
        if character == "\\":
            ranges, properties, negated = self._escape(in_class=True)
            return ranges, properties, negated
        return [(ord(character), ord(character))], [], False

    def _escape(self, *, in_class: bool) -> tuple[Ranges, list[str], bool]:
        """What stands after a backslash: ranges, property classes, and whether the ranges are negated."""
        character = self._next()
        lower = character.lower()
        if lower in ("d", "w", "s"):
            return {"d": _DIGIT, "w": _WORD, "s": _SPACE}[lower], [], character.isupper()
        if lower == "p":
            return [], [self._property(character)], False
        if character in _CONTROL:
            return _one(_CONTROL[character])
        if character == "b" and in_class:
            return _one(8)
        if character == "c" and self._peek().isalpha() and self._peek().isascii():
            return _one(ord(self._next()) % 32)
        if character == "0" and not self._peek().isdigit():
            return _one(0)
        if character in ("x", "u"):
            return _one(self._code(character))
        if character in ("b", "B"):
            raise PatternError("word boundaries cannot be enforced")
        if character.isdigit() or character == "k":
            raise PatternError("back references cannot be enforced")
        if character.isalpha():
            raise PatternError(f"'\\{character}' is no escape of ECMA-262")
        return _one(ord(character))

    def _property(self, kind: str) -> str:
        if self._next() != "{":
            raise PatternError("'\\p' needs a property in braces")
        end = self._pattern.find("}", self._at)
        name = self._pattern[self._at : max(end, self._at)]
        name = name.removeprefix("General_Category=").removeprefix("gc=")
        if name == "Letter":
            name = "L"
        if name not in _CATEGORIES:
            raise PatternError(f"the property {name!r:.40} is none of the general categories")
        self._at = end + 1
        return f"\\{kind}{{{name}}}"

    def _code(self, kind: str) -> int:
        """The code point of `\\xHH`, `\\uHHHH`, `\\u{H...}` or a pair of surrogates."""
        if kind == "u" and self._peek() == "{":
            end = self._pattern.find("}", self._at)
            digits, self._at = self._pattern[self._at + 1 : max(end, self._at)], end + 1
            point = _hexadecimal(digits, range(1, 7))
        else:
            width = 2 if kind == "x" else 4
            digits, self._at = self._pattern[self._at : self._at + width], self._at + width
            point = _hexadecimal(digits, range(width, width + 1))
        if 0xD800 <= point <= 0xDBFF and self._pattern[self._at : self._at + 2] == "\\u":
            low = self._pattern[self._at + 2 : self._at + 6]
            if low[:2].lower() in ("dc", "dd", "de", "df"):
                self._at += 6
                return 0x10000 + ((point - 0xD800) << 10) + _hexadecimal(low, range(4, 5)) - 0xDC00
        if point > _LAST or 0xD800 <= point <= 0xDFFF:
            raise PatternError("it holds half of a surrogate pair, or no character")
        return point


def _one(point: int) -> tuple[Ranges, list[str], bool]:
    return [(point, point)], [], False


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _hexadecimal(digits: str, widths: range) -> int:
    if len(digits) not in widths or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
        raise PatternError("it has an escape without its hexadecimal digits")
    return int(digits, 16)
