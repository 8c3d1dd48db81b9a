"""`format` as patterns: what a text of each format looks like, as precisely as a regular expression can say it.

Nothing outside a format is let through. Inside, three rare spellings are never written: a leap second is only written
in UTC, a host name has no label in punycode (whether such a label is valid depends on what it decodes to), and an
e-mail address is ASCII.
"""

from __future__ import annotations

_HEX = "[0-9A-Fa-f]"
_ALNUM = "[A-Za-z0-9]"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_UCS = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U000efffd"


def _date() -> str:
    leap = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
    days = "(?:0[1-9]|1[0-9]|2[0-8])"
    month = f"(?:0[1-9]|1[0-2])-{days}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31"
    return f"(?:[0-9]{{4}}-(?:{month})|{leap}-02-29)"


def _time() -> str:
    clock = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
    fraction = r"(?:\.[0-9]+)?"
    return rf"(?:{clock}:[0-5][0-9]{fraction}(?:[Zz]|[+\-]{clock})|23:59:60{fraction}(?:[Zz]|[+\-]00:00))"


def _duration() -> str:
    seconds = "[0-9]+S"
    minutes = f"[0-9]+M(?:{seconds})?"
    time = f"T(?:[0-9]+H(?:{minutes})?|{minutes}|{seconds})"
    months = "[0-9]+M(?:[0-9]+D)?"
    return f"P(?:(?:[0-9]+Y(?:{months})?|{months}|[0-9]+D)(?:{time})?|{time}|[0-9]+W)"


def _ipv6() -> str:
    group = f"{_HEX}{{1,4}}"
    options = [f"(?:{group}:){{6}}(?:{group}:{group}|{_IPV4})"]
    for left in range(8):  # groups before the `::`; together with those after it at most 7
        before = "" if left == 0 else group if left == 1 else f"{group}(?::{group}){{{left - 1}}}"
        after = []
        if left < 7:
            after.append(f"(?:{group}:){{0,{6 - left}}}{group}")
        if left < 6:
            after.append(f"(?:{group}:){{0,{5 - left}}}{_IPV4}")
        options.append(f"{before}::" + (f"(?:{'|'.join(after)})?" if after else ""))
    return f"(?:{'|'.join(options)})"


def _hostname() -> str:
    inner = "[A-Za-z0-9-]"
    # `--` in third and fourth place marks punycode and what is reserved for its like.
    longer = f"{inner}{_ALNUM}(?:{inner}{{0,59}}{_ALNUM})?|{inner}-{_ALNUM}(?:{inner}{{0,58}}{_ALNUM})?"
    label = f"{_ALNUM}(?:{_ALNUM}|{longer})?"
    return rf"{label}(?:\.{label})*"


def _email() -> str:
    char = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]"
    # At most 64 characters: up to 32 with dots anywhere, more with one dot or none.
    local = rf"{char}(?:\.?{char}){{0,31}}|{char}{{33,64}}|{char}{{1,31}}\.{char}{{1,32}}"
    quoted = r'"(?:[ !#-\[\]-~]|\\[ -~]){0,31}"'
    label = f"{_ALNUM}(?:[A-Za-z0-9-]{{0,61}}{_ALNUM})?"
    return rf"(?:{local}|{quoted})@(?:{label}(?:\.{label})*|\[{_IPV4}\]|\[IPv6:{_ipv6()}\])"


def _uri(more: str, *, reference: bool) -> str:
    """A URI, with the characters `more` an IRI, with `reference` also a relative one."""
    plain = f"A-Za-z0-9._~!$&'()*+,;={more}"
    escaped = f"%{_HEX}{{2}}"
    char, no_colon = f"(?:[{plain}:@\\-]|{escaped})", f"(?:[{plain}@\\-]|{escaped})"
    host = rf"(?:\[(?:{_ipv6()}|[vV]{_HEX}+\.[A-Za-z0-9._~!$&'()*+,;=:\-]+)\]|(?:[{plain}\-]|{escaped})*)"
    authority = f"//(?:(?:[{plain}:\\-]|{escaped})*@)?{host}(?::[0-9]*)?(?:/{char}*)*"
    absolute = f"/(?:{char}+(?:/{char}*)*)?"
    private = "\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd" if more else ""
    tail = rf"(?:\?(?:[{plain}{private}:@/?\-]|{escaped})*)?(?:#(?:[{plain}:@/?\-]|{escaped})*)?"
    full = rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{authority}|{absolute}|{char}+(?:/{char}*)*)?"
    if not reference:
        return full + tail
    relative = f"(?:{authority}|{absolute}|{no_colon}+(?:/{char}*)*)?"
    return f"(?:{full}|{relative}){tail}"


def _uri_template() -> str:
    name = f"(?:[A-Za-z0-9_]|%{_HEX}{{2}})+"
    variable = rf"{name}(?:\.{name})*(?:\*|:[1-9][0-9]{{0,3}})?"
    plain = f"[!#$&-;=?-\\[\\]_a-z~{_UCS}]|%{_HEX}{{2}}"
    return rf"(?:{plain}|\{{[+#./;?&=,!@|]?{variable}(?:,{variable})*\}})*"


def _pointer() -> str:
    return "(?:/(?:[^/~]|~[01])*)*"


# Bodies in the backend's syntax, to be anchored at both ends.
TEXT_FORMATS: dict[str, str] = {
    "date": _date(),
    "time": _time(),
    "date-time": f"{_date()}[Tt]{_time()}",
    "duration": _duration(),
    "email": _email(),
    "hostname": _hostname(),
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": f"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    "uri": _uri("", reference=False),
    "uri-reference": _uri("", reference=True),
    "iri": _uri(_UCS, reference=False),
    "iri-reference": _uri(_UCS, reference=True),
    "uri-template": _uri_template(),
    "json-pointer": _pointer(),
    "byte": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_pointer()})",
}
# Longest texts, where the format bounds them.
FORMAT_LENGTHS = {"email": 254, "hostname": 253}
# OpenAPI's names for whole numbers; of 64 bits what double precision holds exactly.
_EXACT = 2**53
NUMBER_FORMATS: dict[str, tuple[int, int]] = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-_EXACT, _EXACT),
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, _EXACT),
}
# Names that ask for nothing: any text, and any number, has them. (`unknown` is the standard's example of such a name.)
FREE_FORMATS = frozenset({"binary", "double", "float", "password", "unknown"})
