"""Ranks find the first one's file by shared memory, and tokens that another rank publishes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from evensong.distributed.grid import RankGrid
from evensong.distributed.meeting import Meeting
from evensong.distributed.token_table import TokenTable, token_table_bytes

GRID = RankGrid(3)


def test_all_open_the_first_ranks_file() -> None:
    memory = np.zeros(4096, np.uint8)
    found: list[Meeting] = []
    later = [threading.Thread(target=lambda i=i: found.append(Meeting(memory, GRID.rank(i), 10))) for i in (1, 2)]
    for thread in later:
        thread.start()
    first = Meeting(memory, GRID.rank(0), 10)
    for thread in later:
        thread.join()
    assert {meeting.path for meeting in found} == {first.path}
    Path(found[0].path).write_text("here")
    assert Path(first.path).read_text() == "here"
    found.clear()
    path = first.path
    assert Path(path).read_text() == "here"
    del first
    assert not os.path.exists(path)


def test_a_first_rank_that_does_not_come() -> None:
    with pytest.raises(TimeoutError, match="first rank"):
        Meeting(np.zeros(4096, np.uint8), GRID.rank(1), 0.02)


def test_a_first_rank_that_is_gone() -> None:
    memory = np.zeros(4096, np.uint8)
    Meeting(memory, GRID.rank(0), 1)
    with pytest.raises(OSError, match="No such file"):
        Meeting(memory, GRID.rank(1), 1)


def table() -> TokenTable:
    return TokenTable(np.zeros(token_table_bytes(4), np.uint8))


def test_tokens_by_slot_once_they_are_published() -> None:
    tokens = table()
    asked = np.array([7, -1, -4, 9])
    with pytest.raises(TimeoutError, match="step 5"):
        tokens.resolve(asked, 5, 0.01)
    assert tokens.resolve(asked[:1], 5, 0.0).tolist() == [7]  # nothing to wait for
    publisher = threading.Thread(target=lambda: (time.sleep(0.02), tokens.publish(5, {0: 100, 3: 300})))
    publisher.start()
    assert tokens.resolve(asked, 5, 10).tolist() == [7, 100, 300, 9]
    publisher.join()
    tokens.publish(3, {})  # never falls
    assert tokens.resolve(np.array([-4]), 5, 0.0).tolist() == [300]
