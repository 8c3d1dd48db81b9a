"""What a grammar library is to the rest: a small interface, behind which each has one file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from evensong.protocol.structured import StructuredOutputsParams

# [num_words]: a bit for each token id, the lowest first.
Bitmask = np.ndarray[Any, np.dtype[np.uint32]]


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
