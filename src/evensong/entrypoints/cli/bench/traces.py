"""Recorded arrivals: Mooncake's JSONL (lengths and block hash ids) and Azure's CSV (lengths), and what they share.

Mooncake: one object a line: `timestamp` in ms, `input_length`, `output_length`, and `hash_ids`, one id for each block
of the prompt; equal ids mean equal text from the start of the prompt to the end of the block. Azure: a CSV with
TIMESTAMP, ContextTokens, GeneratedTokens.
"""

from __future__ import annotations

import csv
import datetime
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evensong.entrypoints.cli.bench.units import Prompt, Units
from evensong.protocol.errors import ConfigError

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class TraceRow:
    """One recorded request; `arrival` in seconds after the first one, lengths in tokens."""

    arrival: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, limit: int) -> list[TraceRow]:
    """The first `limit` rows, in order of arrival. Raises ConfigError naming the line that cannot be used."""
    try:
        with path.open(encoding="utf-8") as file:
            start = file.readline()
            file.seek(0)
            reader = _azure_rows if start.strip().split(",")[0] == AZURE_COLUMNS[0] else _mooncake_rows
            rows = _take(reader(file, path), limit)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path: {path} cannot be read: {error}") from error
    if not rows:
        raise ConfigError(f"--dataset-path: {path} holds no request")
    first = min(row.arrival for row in rows)
    rows = [TraceRow(row.arrival - first, row.input_len, row.output_len, row.hash_ids) for row in rows]
    return sorted(rows, key=lambda row: row.arrival)


def block_size_of(rows: Sequence[TraceRow]) -> int:
    """Tokens of one hashed block: the power of two that explains the most rows; 0 where nothing is hashed."""
    hashed = [row for row in rows if row.hash_ids]
    if not hashed:
        return 0
    sizes = [1 << power for power in range(13)]
    return max(sizes, key=lambda size: sum(-(-row.input_len // size) == len(row.hash_ids) for row in hashed))


def make_prompts(rows: Sequence[TraceRow], block_size: int, units: Units, seed: int) -> list[Prompt]:
    """Prompts that share exactly what the trace's ids share: an id always becomes the same block of units.

    Where a row has fewer ids than its length needs, or none, the rest is drawn anew and shared with nobody.
    """
    blocks: dict[int, list[int] | list[str]] = {}
    prompts = []
    for number, row in enumerate(rows):
        pieces: list[list[int] | list[str]] = []
        left = row.input_len
        for hash_id in row.hash_ids if block_size else ():
            if left <= 0:
                break
            if hash_id not in blocks:
                blocks[hash_id] = units.draw(block_size, random.Random(f"block {seed} {hash_id}"))
            pieces.append(blocks[hash_id][:left])
            left -= block_size
        if left > 0:
            pieces.append(units.draw(left, random.Random(f"row {seed} {number}")))
        prompts.append(units.join(*pieces))
    return prompts


def shared_tokens(rows: Sequence[TraceRow], trace_block: int, cache_block: int) -> int:
    """Prompt tokens that a prefix cache without limit finds, computed from the ids alone.

    The cache's rules: it knows full blocks of `cache_block` tokens, finds a block only after all those before it, and
    leaves at least one token of each prompt to compute. Rows count in order of arrival.
    """
    chains: dict[tuple[int, int, tuple[int, ...]], int] = {}
    found = 0
    for row in rows:
        parent, hit = 0, True
        hashed = min(row.input_len, len(row.hash_ids) * trace_block)
        for index in range(hashed // cache_block):
            start, end = index * cache_block, (index + 1) * cache_block
            ids = row.hash_ids[start // trace_block : (end - 1) // trace_block + 1]
            key = (parent, start % trace_block, ids)
            hit = hit and key in chains and end < row.input_len
            found += cache_block if hit else 0
            parent = chains.setdefault(key, len(chains) + 1)
    return found


def _take(rows: Iterator[TraceRow], limit: int) -> list[TraceRow]:
    return list(itertools.islice(rows, limit))


def _mooncake_rows(file: Any, path: Path) -> Iterator[TraceRow]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            ids = tuple(int(i) for i in entry.get("hash_ids") or ())
            yield _row(float(entry["timestamp"]) / 1000, entry["input_length"], entry["output_length"], ids)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _bad(path, number, error) from error


def _azure_rows(file: Any, path: Path) -> Iterator[TraceRow]:
    for number, entry in enumerate(csv.DictReader(file), 2):
        try:
            # Seven digits of a second; the library reads six.
            moment = datetime.datetime.fromisoformat(entry["TIMESTAMP"][:26]).replace(tzinfo=datetime.UTC)
            yield _row(moment.timestamp(), entry["ContextTokens"], entry["GeneratedTokens"], ())
        except (ValueError, TypeError, KeyError) as error:
            raise _bad(path, number, error) from error


def _row(arrival: float, input_len: Any, output_len: Any, hash_ids: tuple[int, ...]) -> TraceRow:
    # A request without a token on either side cannot be asked for; such rows stand for one of one token.
    return TraceRow(arrival, max(int(input_len), 1), max(int(output_len), 1), hash_ids)


def _bad(path: Path, number: int, error: Exception) -> ConfigError:
    what = f"{type(error).__name__}: {error}"
    return ConfigError(f"--dataset-path: line {number} of {path} is no row of a trace ({what:.100})")
