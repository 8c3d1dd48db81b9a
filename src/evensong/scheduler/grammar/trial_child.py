"""The process that compiles one grammar to see whether it can be (scheduler/grammar/trial.py), and ends."""

from __future__ import annotations

import json
import sys

import llguidance

from evensong.scheduler.grammar.limits import one_line, parser_limits
from evensong.scheduler.grammar.trial import CPU_SECONDS, MEMORY_BYTES
from evensong.utils.bounded_child import take_order


class _Bytes:
    """A vocabulary of all bytes, and the end: what a grammar is does not depend on a model's."""

    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    special_token_ids = [256]
    eos_token_id = 256
    bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main() -> None:
    """Reads the grammar from stdin, writes the answer to stdout."""
    grammar = take_order("evensong:grammar", cpu_seconds=CPU_SECONDS, memory_bytes=MEMORY_BYTES).decode()
    sys.stdout.write(json.dumps({"error": error_of(grammar)}))
    sys.stdout.flush()


def error_of(grammar: str) -> str | None:
    """Why a grammar cannot be compiled, or not followed to its first byte; None where it can."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=257, eos_token=256)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return one_line(matcher.get_error()) if matcher.is_error() else None


if __name__ == "__main__":
    main()
