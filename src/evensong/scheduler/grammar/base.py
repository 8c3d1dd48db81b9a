"""What a grammar library is to the rest: a small interface, behind which each has one file."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from evensong.protocol.errors import RequestError
from evensong.protocol.structured import PARAM, StructuredOutputsParams

# [num_words]: a bit for each token id, the lowest first.
Bitmask = np.ndarray[Any, np.dtype[np.uint32]]


def invalid_grammar(message: str) -> RequestError:
    """The refusal of what cannot be made a grammar."""
    return RequestError(message, param=PARAM, code="invalid_grammar")


def alternatives(texts: Sequence[str]) -> str:
    """One of `texts`, as a rule's body in Lark and in GBNF alike."""
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def never() -> bool:
    """Somebody waits."""
    return False


class GrammarFault(Exception):
    """A grammar cannot be followed any further: a limit was reached at this point of the output."""


class Matcher(ABC):
    """Where one output stands in its grammar."""

    @abstractmethod
    def fill(self, row: Bitmask) -> bool:
        """Sets in `row` the bits of the tokens that may come next, and no others; True where the output may end.

        Raises GrammarFault.
        """

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Goes on behind a token; False for one that may not come next."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Goes back before the last tokens."""


class CompiledGrammar(ABC):
    """A grammar, compiled once and used by many outputs."""

    @abstractmethod
    def start(self) -> Matcher:
        """A matcher at the beginning; what others do changes nothing of what it says. Called in any thread."""


class Backend(ABC):
    """One grammar library, for one vocabulary."""

    @abstractmethod
    def compile(self, params: StructuredOutputsParams, cancelled: Callable[[], bool] = never) -> CompiledGrammar:
        """Compiles what `params` ask for, in a thread; `cancelled` turns True where nobody waits for it any more.

        Raises RequestError for what is malformed, too large, or not enforced.
        """
