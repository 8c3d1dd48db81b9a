"""`not`, and `if` with `then` and `else`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from evensong.scheduler.grammar.schema_errors import refused

if TYPE_CHECKING:
    from evensong.scheduler.grammar.schema_rewrite import Rewriter


def conditions(
    rewriter: Rewriter, node: dict[str, Any], path: str, inner: Callable[..., Any], written: dict[str, Any]
) -> None:
    """Writes the conditions of `node` as alternatives."""
    if "not" in node:
        raise refused("not", path, "a grammar says what may come")
    if "if" in node and ("then" in node or "else" in node):
        raise refused("if", path, "a grammar says what may come")
