"""Response forms: RequestOutputs to OpenAI's objects, whole or in chunks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.protocol.request_output import CompletionOutput, Logprob, PromptLogprobs, RequestOutput, SampleLogprobs


class Usage:
    """Tokens of all prompts and choices of one HTTP request; `reasoning` counts those of a choice's new ones."""

    def __init__(self, reasoning: Callable[[CompletionOutput], int] | None = None) -> None:
        self.reasoning_tokens = 0
        self._reasoning = reasoning
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._seen: set[int] = set()

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Counts the new tokens of an output; its prompt once."""
        if prompt_index not in self._seen:
            self._seen.add(prompt_index)
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens or 0
        self.completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        if self._reasoning is not None:
            self.reasoning_tokens += sum(map(self._reasoning, output.outputs))

    def form(self) -> dict[str, Any]:
        """The usage object."""
        form: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self._reasoning is not None:
            form["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return form


class Envelope:
    """What every object of one response shares."""

    def __init__(self, kind: str, response_id: str, model: str, fingerprint: str, seed: int | None) -> None:
        self._fields = {
            "id": response_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._seed = seed
        self._first = True

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """A response that is not streamed."""
        return {**self._fields, "seed": self._seed, "choices": choices, "usage": usage.form()}

    def chunk(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
        """A chunk of a stream, with `more` fields; the first one bears the seed."""
        fields: dict[str, Any] = {**self._fields, "choices": choices, **more}
        if self._first:
            self._first = False
            fields["seed"] = self._seed
        return fields


def ending(choice: CompletionOutput) -> dict[str, Any]:
    """How a choice ended, and the seed that reproduces it."""
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason, "seed": choice.seed}


class TokenNames:
    """How tokens are shown in log-probabilities: by their text, or as `token_id:N` where the request asks for that."""

    def __init__(self, texts: TokenTexts, *, as_ids: bool) -> None:
        self.texts = texts
        self._as_ids = as_ids

    def name_of(self, token_id: int) -> str:
        """What stands for a token."""
        return f"token_id:{token_id}" if self._as_ids else self.texts.text_of(token_id)


def chat_logprobs(logprobs: SampleLogprobs | None, num_top: int, names: TokenNames) -> dict[str, Any] | None:
    """Chat's logprobs object: one entry a token, with its `num_top` best alternatives."""
    if logprobs is None:
        return None
    content = []
    for position in logprobs:
        (token_id, sampled), *_ = position.items()
        best = sorted(position.items(), key=lambda item: item[1].rank or math.inf)
        entry = _chat_entry(token_id, sampled.logprob, names)
        entry["top_logprobs"] = [_chat_entry(i, item.logprob, names) for i, item in best if (item.rank or 0) <= num_top]
        content.append(entry)
    return {"content": content}


def _chat_entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    token_bytes = list(names.texts.bytes_of(token_id))
    return {"token": names.name_of(token_id), "logprob": _finite(logprob), "bytes": token_bytes}


def _finite(logprob: float) -> float:
    """JSON has no -Infinity; the API's number for "never" is -9999."""
    return max(logprob, -9999.0)


def completion_logprobs(
    logprobs: PromptLogprobs | SampleLogprobs | None,
    token_ids: list[int],
    offset: int,
    num_top: int,
    names: TokenNames,
) -> dict[str, Any] | None:
    """Completions' logprobs object for `token_ids`: parallel lists; text offsets count from `offset` characters.

    The first token of a prompt has no log-probability: null stands there.
    """
    if logprobs is None:
        return None
    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(names.texts.text_of(token_id))
    return {
        "tokens": [names.name_of(token_id) for token_id in token_ids],
        "token_logprobs": [
            None if position is None else _finite(position[token_id].logprob)
            for token_id, position in zip(token_ids, logprobs, strict=True)
        ],
        "top_logprobs": [
            {names.name_of(i): _finite(item.logprob) for i, item in _shown(position, num_top)}
            if position is not None and (num_top or len(position) > 1)
            else None
            for position in logprobs
        ],
        "text_offset": offsets,
    }


def prompt_logprobs_form(logprobs: PromptLogprobs | None, num_top: int) -> list[dict[str, Any] | None] | None:
    """vLLM's prompt_logprobs: for each token of the prompt an object by token id; null for the first."""
    if logprobs is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": _finite(item.logprob),
                "rank": item.rank,
                "decoded_token": item.decoded_token,
            }
            for token_id, item in _shown(position, num_top)
        }
        for position in logprobs
    ]


def _shown(position: dict[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The token itself, which comes first, and the `num_top` best."""
    (first, *others) = position.items()
    return [first, *((token_id, item) for token_id, item in others if (item.rank or 0) <= num_top)]
