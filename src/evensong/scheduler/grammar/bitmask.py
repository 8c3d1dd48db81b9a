"""Bitmasks: the masks of one step's constrained requests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from evensong.protocol.step import GrammarBitmask
from evensong.scheduler.grammar.base import Bitmask
from evensong.scheduler.request import Request


class Bitmasks:
    """Memory for the rows of a step; it grows and stays."""

    def __init__(self) -> None:
        self._rows: Bitmask | None = None

    def fill(self, requests: Iterable[Request]) -> GrammarBitmask | None:
        """The masks of those that are constrained at this point; None where none is.

        A request whose grammar cannot be followed notes that and gets no mask.
        """
        request_ids: list[str] = []
        rows = self._rows
        for request in requests:
            grammar = request.grammar
            if grammar is None:
                continue
            if rows is None or len(request_ids) == len(rows):
                rows = self._rows = _grown(rows, grammar.num_words)
            if grammar.fill(rows[len(request_ids)]):
                request_ids.append(request.request_id)
        if rows is None or not request_ids:
            return None
        return GrammarBitmask(request_ids, rows[: len(request_ids)].tobytes())


def _grown(rows: Bitmask | None, num_words: int) -> Bitmask:
    old = np.zeros((0, num_words), dtype=np.uint32) if rows is None else rows
    grown: Bitmask = np.concatenate([old, np.zeros((max(len(old), 8), num_words), dtype=np.uint32)])
    return grown
