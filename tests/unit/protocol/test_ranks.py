"""Errors that cross from a rank to its core."""

from __future__ import annotations

import msgspec
import pytest

from evensong.protocol.errors import ConfigError, RequestError
from evensong.protocol.ranks import Fault, error_of, fault_of


class OwnError(Exception):
    """What a part of another's may raise."""


class OwnConfigError(ConfigError):
    """A kind of it."""


def crossed(error: BaseException, place: str = "") -> Exception:
    return error_of(msgspec.msgpack.decode(msgspec.msgpack.encode(fault_of(error)), type=Fault), place)


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (ConfigError("damaged"), ConfigError, "rank 1: damaged"),
        (OwnConfigError("damaged"), ConfigError, "rank 1: damaged"),
        (ValueError("bad"), ValueError, "rank 1: bad"),
        (MemoryError("none left"), MemoryError, "rank 1: none left"),
        (OwnError("odd"), RuntimeError, "rank 1: OwnError: odd"),
        (SystemExit(5), RuntimeError, "rank 1: SystemExit: 5"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), RuntimeError, "rank 1: UnicodeDecodeError: 'utf-8' codec"),
        (OSError(28, "No space left"), OSError, "rank 1: [Errno 28] No space left"),
        (ValueError("\udcff"), ValueError, "rank 1: ?"),
    ],
)
def test_classes_and_words_stay(error: BaseException, kind: type[Exception], says: str) -> None:
    got = crossed(error, "rank 1")
    assert type(got) is kind and str(got).startswith(says)


def test_a_keys_name_is_not_quoted_twice() -> None:
    assert str(crossed(KeyError("wrong"))) == "'wrong'"


def test_a_refusal_stays_whole() -> None:
    got = crossed(RequestError("no", status=422, param="n", code="c", retry_after=3), "rank 1")
    assert isinstance(got, RequestError) and str(got) == "no"
    assert (got.status, got.param, got.code, got.retry_after) == (422, "n", "c", 3)


def test_without_a_place_the_words_alone() -> None:
    assert str(crossed(OwnError("odd"))) == "OwnError: odd" and str(crossed(ValueError("bad"))) == "bad"
