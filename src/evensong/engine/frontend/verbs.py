"""Control verbs for front ends: one method a verb, generated from protocol/control.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from evensong.protocol.control import VERBS, Verb

T = TypeVar("T", bound=type)

# Front ends have these in another form: ids are theirs, not the core's.
OWN = ("abort_requests",)


def control_verbs(target: T) -> T:
    """Class decorator: each verb becomes a method that calls `self.call_verb(name, **args)`.

    On a class whose `call_verb` is a coroutine function, the methods return what is to be awaited.
    """
    for verb in VERBS.values():
        if verb.name not in OWN:
            for name in (verb.name, *verb.aliases):
                setattr(target, name, _method(verb))
    return target


def _method(verb: Verb) -> Callable[..., Any]:
    def method(self: Any, *values: Any, **args: Any) -> Any:
        if len(values) > len(verb.args):
            raise TypeError(f"{verb.name} takes {len(verb.args)} arguments, got {len(values)}")
        return self.call_verb(verb.name, **dict(zip(verb.args, values, strict=False)), **args)

    method.__name__ = verb.name
    method.__doc__ = verb.doc
    return method
