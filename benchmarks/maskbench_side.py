"""One side of maskbench.py: compiles schemas and walks tokens through their masks. Jobs and results are lines of JSON.

The first line of stdin holds the tokenizer, each further one a job. `xgrammar` needs only xgrammar and its torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol


class Walk(Protocol):
    """A grammar at some token."""

    def mask(self) -> Callable[[int], bool]:
        """Which tokens may come, as a test; the time it takes is that of the mask."""
        ...

    def accept(self, token: int) -> bool:
        """Goes on by one token."""
        ...


class _Guidance:
    def __init__(self, setup: dict[str, Any], prepared: bool) -> None:
        # By name: each environment has only what its side needs.
        self._library = import_module("llguidance")
        self._tokenizer = self._library.LLTokenizer(setup["tokenizer"], eos_token=setup["end"])
        self._prepare: Callable[[str], str] = self._library.LLMatcher.grammar_from_json_schema
        self._limits = None
        if prepared:
            self._prepare = import_module("evensong.scheduler.grammar.schema.prepare").prepare_schema
            self._limits = import_module("evensong.scheduler.grammar.limits").parser_limits()

    def compile(self, schema: str) -> Callable[[], Walk]:
        grammar = self._prepare(schema)
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return lambda: _GuidanceWalk(matcher.deep_copy())


class _GuidanceWalk:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self) -> Callable[[int], bool]:
        bits = self._matcher.compute_bitmask()
        return lambda token: bool(bits[token >> 3] >> (token & 7) & 1)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))


class _XGrammar:
    def __init__(self, setup: dict[str, Any]) -> None:
        xgrammar = self._library = import_module("xgrammar")
        info = xgrammar.TokenizerInfo(
            setup["vocabulary"],
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=len(setup["vocabulary"]),
            stop_token_ids=[setup["end"]],
        )
        self._size = len(setup["vocabulary"])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> Callable[[], Walk]:
        # What a schema does not forbid is allowed, as the standard has it.
        compiled = self._compiler.compile_json_schema(schema, any_whitespace=True, strict_mode=False)
        bitmask = self._library.allocate_token_bitmask(1, self._size)
        return lambda: _XGrammarWalk(self._library.GrammarMatcher(compiled), bitmask)


class _XGrammarWalk:
    def __init__(self, matcher: Any, bitmask: Any) -> None:
        self._matcher, self._bitmask = matcher, bitmask

    def mask(self) -> Callable[[int], bool]:
        self._matcher.fill_next_token_bitmask(self._bitmask)
        words = self._bitmask[0]
        return lambda token: bool(int(words[token >> 5]) >> (token & 31) & 1)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))


def accepted(walk: Walk, tokens: list[int], end: int, seconds: list[float]) -> bool:
    """Whether every token's bit is set where it comes, and the end's behind the last."""
    for token in [*tokens, end]:
        began = time.perf_counter()
        allowed = walk.mask()
        seconds.append(time.perf_counter() - began)
        if not allowed(token):
            return False
        if token != end and not walk.accept(token):
            return False
    return True


def result(side: Any, job: dict[str, Any], end: int) -> dict[str, Any]:
    """One file's outcome: `error`, or for each instance whether it was accepted."""
    began = time.perf_counter()
    try:
        start = side.compile(job["schema"])
    except Exception as error:  # whatever a library raises for a schema is its refusal
        return {"error": str(error)[:300] or type(error).__name__, "compile": time.perf_counter() - began}
    took = time.perf_counter() - began
    seconds: list[float] = []
    try:
        outcomes = [accepted(start(), tokens, end, seconds) for tokens in job["instances"]]
    except Exception as error:  # as above
        return {"error": f"while walking: {str(error)[:300]}", "compile": took}
    return {"accepted": outcomes, "compile": took, "masks": seconds}


def main() -> int:
    """Answers jobs until stdin ends."""
    setup = json.loads(sys.stdin.readline())
    name = sys.argv[1]
    side = _XGrammar(setup) if name == "xgrammar" else _Guidance(setup, prepared=name == "evensong")
    for line in sys.stdin:
        print(json.dumps(result(side, json.loads(line), setup["end"])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
