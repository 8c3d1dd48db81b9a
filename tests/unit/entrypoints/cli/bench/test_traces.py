"""Traces: both formats, prompts that share what the ids share, and the sharing that a cache can find."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from evensong.entrypoints.cli.bench.traces import TraceRow, block_size_of, make_prompts, read_trace, shared_tokens
from evensong.entrypoints.cli.bench.units import Units
from evensong.kvcache.hashing import extend_hashes
from evensong.protocol.errors import ConfigError

TRACES = Path(__file__).resolve().parents[6] / "shared" / "data" / "traces"
UNITS = Units(range(1000))
needs_traces = pytest.mark.skipif(not TRACES.exists(), reason="the shared traces are not beside this checkout")


def row(input_len: int, *hash_ids: int) -> TraceRow:
    return TraceRow(0.0, input_len, 1, hash_ids)


def found_in_tokens(prompts: Sequence[Sequence[int]], block: int) -> int:
    """Another way to the same figure: the cache's own hashes of the prompts' tokens."""
    known: set[bytes] = set()
    total = 0
    for prompt in prompts:
        hashes: list[bytes] = []
        extend_hashes(hashes, b"", prompt, block)
        usable = hashes[: (len(prompt) - 1) // block]
        total += block * next((i for i, h in enumerate(usable) if h not in known), len(usable))
        known.update(hashes)
    return total


def test_mooncake_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 5000, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]}\n\n'
        '{"timestamp": 3500, "input_length": 0, "output_length": 0}\n'
    )
    assert read_trace(path, 10) == [TraceRow(0.0, 1, 1), TraceRow(1.5, 20, 3, (1, 2))]
    assert len(read_trace(path, 1)) == 1


def test_azure_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,110,27\n"
    )
    first, second = read_trace(path, 10)
    assert (first, second.input_len, second.output_len) == (TraceRow(0.0, 4808, 10), 110, 27)
    assert second.arrival == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no request"),
        ("{}\n", "line 1 of"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}\nnonsense\n', "line 2 of"),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1}\n', "line 1 of"),
        ("[1]\n", "line 1 of"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2 of"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,1\n", "line 2 of"),
        ("\xff", "line 1 of"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_trace(path, 10)


def test_the_block_size_is_what_the_rows_say() -> None:
    assert block_size_of([row(40, 1, 2, 3), row(16, 1), row(17, 1, 2)]) == 16
    assert block_size_of([row(6758, *range(14))]) == 512
    assert block_size_of([row(5)]) == 0


def test_equal_ids_are_equal_tokens_and_others_are_not() -> None:
    rows = [row(40, 1, 2, 3), row(36, 1, 2, 4), row(20, 1), row(20, 1)]
    first, second, third, fourth = make_prompts(rows, 16, UNITS, seed=0)
    assert [len(p) for p in (first, second, third, fourth)] == [40, 36, 20, 20]
    assert first[:32] == second[:32] and first[32:36] != second[32:]
    # Beyond the ids nothing is shared, not even between equal rows.
    assert third[:16] == fourth[:16] and third[16:] != fourth[16:]
    assert make_prompts(rows, 16, UNITS, seed=0)[0] == first != make_prompts(rows, 16, UNITS, seed=1)[0]


def test_words_make_texts() -> None:
    texts = make_prompts([row(4, 1, 2), row(3, 1, 3)], 2, Units([f"w{i}" for i in range(100)]), seed=0)
    assert [len(text.split()) for text in texts if isinstance(text, str)] == [4, 3]


def test_sharing_by_the_caches_rules() -> None:
    # One token is always computed: of an equal prompt of 32 only the first block counts.
    assert shared_tokens([row(32, 1, 2), row(32, 1, 2)], 16, 16) == 16
    assert shared_tokens([row(33, 1, 2, 3), row(33, 1, 2, 3)], 16, 16) == 32
    # A block that is not full is not known to the cache.
    assert shared_tokens([row(31, 1, 2), row(40, 1, 2, 3)], 16, 16) == 16
    # After a block that differs nothing is found.
    assert shared_tokens([row(48, 1, 2, 3), row(64, 1, 9, 3, 4)], 16, 16) == 16
    assert shared_tokens([row(100)] * 3, 16, 16) == 0


@pytest.mark.parametrize(("trace_block", "cache_block"), [(16, 16), (512, 16), (16, 64), (24, 16), (16, 24)])
def test_sharing_is_what_the_tokens_share(trace_block: int, cache_block: int) -> None:
    ids = [(0, 1, 2, 3, 4), (0, 1, 2, 9), (0, 5), (0, 1, 2, 3, 4), (7, 1, 2), (0, 1, 2, 9, 11, 12)]
    rows = [row(trace_block * len(i) - 3 * n, *i) for n, i in enumerate(ids)]
    prompts = [p for p in make_prompts(rows, trace_block, UNITS, seed=0) if isinstance(p, list)]
    found = shared_tokens(rows, trace_block, cache_block)
    assert found == found_in_tokens(prompts, cache_block) > 0


@needs_traces
def test_the_scaled_mooncake_trace() -> None:
    rows = read_trace(TRACES / "mooncake_conversation_first200_div32.jsonl", 1000)
    assert len(rows) == 200 and block_size_of(rows) == 16
    prompts = [p for p in make_prompts(rows, 16, UNITS, seed=0) if isinstance(p, list)]
    assert [len(prompt) for prompt in prompts] == [r.input_len for r in rows]
    assert shared_tokens(rows, 16, 16) == found_in_tokens(prompts, 16) == 5152


@needs_traces
@pytest.mark.parametrize("name", ["AzureLLMInferenceTrace_code.csv", "AzureLLMInferenceTrace_conv.csv"])
def test_the_azure_traces(name: str) -> None:
    rows = read_trace(TRACES / name, 500)
    assert len(rows) == 500 and rows[0].arrival == 0 and rows[-1].arrival > 10


@needs_traces
def test_the_whole_mooncake_trace() -> None:
    rows = read_trace(TRACES / "mooncake_conversation_trace.jsonl", 300)
    assert block_size_of(rows) == 512
