"""StructuredOutputManager: compiles grammars in threads of its own, and remembers those that were compiled."""

from __future__ import annotations

import importlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from evensong.protocol.errors import RequestError
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.structured import StructuredOutputsParams
from evensong.scheduler.grammar.base import Backend, CompiledGrammar, never
from evensong.scheduler.grammar.reasoning import ReasoningGate
from evensong.scheduler.grammar.state import RequestGrammar
from evensong.scheduler.grammar.vocabulary import Vocabulary

NUM_THREADS = 2
# Compiled grammars that are kept; the least lately used goes first.
MAX_CACHED = 64
MAX_CACHED_CHARACTERS = 16 * 1024 * 1024

# Loaded by name: a core whose requests are not constrained loads no grammar library.
_BACKENDS = {
    "auto": "llguidance_backend:LLGuidance",
    "llguidance": "llguidance_backend:LLGuidance",
    "xgrammar": "xgrammar_backend:XGrammar",
}


def needs_grammar(request: EngineCoreRequest) -> bool:
    """Whether anything constrains the request's tokens position by position."""
    params = request.params
    return params.structured_outputs is not None or (
        params.thinking_token_budget is not None and request.reasoning is not None
    )


class StructuredOutputManager:
    """Nothing is loaded and no thread is started before the first request that needs it."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, Backend] = {}
        self._compiled: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._num_characters = 0

    def submit(self, request: EngineCoreRequest, cancelled: Callable[[], bool] = never) -> Future[RequestGrammar]:
        """The request's grammar, at the end of the tokens that it comes with. The future raises RequestError.

        One that no thread has taken yet can be cancelled; `cancelled` ends others early.
        """
        return self._threads.submit(self._build, request, cancelled)

    def shutdown(self) -> None:
        """Takes nothing more; what is being compiled is left to end by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _build(self, request: EngineCoreRequest, cancelled: Callable[[], bool]) -> RequestGrammar:
        params = request.params
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            vocabulary = self._vocabulary
        outputs, spec = params.structured_outputs, request.reasoning
        matcher = None if outputs is None else self._compile(outputs, vocabulary, cancelled).start()
        first_token_on = outputs is not None and outputs.enable_in_reasoning
        gate = None if spec is None or first_token_on else ReasoningGate(spec, params.thinking_token_budget, vocabulary)
        grammar = RequestGrammar(request, matcher, vocabulary, gate)
        if grammar.fault is not None:
            raise RequestError(f"the output so far does not fit: {grammar.fault}", param="structured_outputs")
        return grammar

    def _compile(
        self, outputs: StructuredOutputsParams, vocabulary: Vocabulary, cancelled: Callable[[], bool]
    ) -> CompiledGrammar:
        key = msgspec.msgpack.encode(outputs)
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found
            backend = self._backends.get(outputs.backend)
            if backend is None:
                backend = self._backends[outputs.backend] = _load_backend(outputs.backend, vocabulary)
        compiled = backend.compile(outputs, cancelled)
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = compiled
                self._num_characters += len(key)
            while len(self._compiled) > MAX_CACHED or self._num_characters > MAX_CACHED_CHARACTERS:
                old, _ = self._compiled.popitem(last=False)
                self._num_characters -= len(old)
        return compiled


def _load_backend(name: str, vocabulary: Vocabulary) -> Backend:
    module, _, class_name = _BACKENDS[name].partition(":")
    backend: Backend = getattr(importlib.import_module(f"evensong.scheduler.grammar.{module}"), class_name)(vocabulary)
    return backend
