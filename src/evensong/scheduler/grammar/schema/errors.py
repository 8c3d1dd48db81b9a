"""How a schema is refused: one message that names the keyword, the place and the reason."""

from __future__ import annotations

from evensong.protocol.errors import RequestError
from evensong.protocol.structured import PARAM


def refused(keyword: str, path: str, why: str) -> RequestError:
    """The schema is well-formed, but `keyword` at `path` (a JSON pointer) cannot be enforced."""
    return RequestError(
        f"the JSON schema's keyword {keyword!r:.60} at {_short(path)} cannot be enforced: {why}", param=PARAM
    )


def malformed(keyword: str, path: str, why: str) -> RequestError:
    """`keyword` at `path` is no JSON Schema."""
    return RequestError(f"the JSON schema is malformed: {keyword!r:.60} at {_short(path)} {why}", param=PARAM)


def too_large(why: str) -> RequestError:
    """The schema exceeds a limit."""
    return RequestError(f"the JSON schema is too large: {why}", param=PARAM)


def step(path: str, key: str | int) -> str:
    """The JSON pointer of the member `key` of `path`."""
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"


def _short(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:140]}...{path[-50:]}"
