"""Response forms: RequestOutputs to OpenAI's objects, whole or in chunks."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.protocol.request_output import CompletionOutput, Logprob, PromptLogprobs, RequestOutput, SampleLogprobs
from evensong.protocol.sampling_params import SamplingParams


def encode(value: Any) -> bytes:
    """JSON. Integers of any size may stand in what a caller sent and gets back."""
    try:
        return msgspec.json.encode(value)
    except OverflowError:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_raw).encode()


def _raw(value: Any) -> Any:
    return json.loads(bytes(value))


def sse(event: dict[str, Any]) -> bytes:
    """A server-sent event under its own name, which is its type."""
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + encode(event) + b"\n\n"


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
        for choice in output.outputs:
            self.completion_tokens += len(choice.token_ids)
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
        # All events of a stream begin with the same bytes.
        self._opening = b"data: " + encode(self._fields)[:-1] + b',"choices":'

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """A response that is not streamed."""
        return {**self._fields, "seed": self._seed, "choices": choices, "usage": usage.form()}

    def event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        """An event with a chunk of a stream, with `more` fields; the first one bears the seed."""
        if self._first:
            self._first = False
            more = {**more, "seed": self._seed}
        rest = b"," + msgspec.json.encode(more)[1:] if more else b"}"
        return b"".join((self._opening, msgspec.json.encode(choices), rest, b"\n\n"))


def ending(choice: CompletionOutput) -> dict[str, Any]:
    """How a choice ended, and the seed that reproduces it."""
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason, "seed": choice.seed}


class TokenNames:
    """How tokens are shown in log-probabilities: by their text, or as `token_id:N` where the request asks for that.

    `shown` are special tokens that the output's text shows all the same.
    """

    def __init__(self, texts: TokenTexts, *, as_ids: bool, shown: frozenset[int] = frozenset()) -> None:
        self.texts = texts
        self.shown = shown
        self._as_ids = as_ids

    def name_of(self, token_id: int) -> str:
        """What stands for a token."""
        return _id_name(token_id) if self._as_ids else self.texts.text_of(token_id)

    def exact_name_of(self, token_id: int) -> str:
        """The same where no bytes stand beside it: part of a character is shown by its bytes, as OpenAI does."""
        if not self._as_ids:
            token_bytes = self.texts.bytes_of(token_id)
            try:
                return token_bytes.decode()
            except UnicodeDecodeError:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
        return _id_name(token_id)

    def by_name(self, items: Iterable[tuple[int, Logprob]]) -> dict[str, float]:
        """Log-probabilities by `exact_name_of`; of several tokens with one text the later ones are shown by id."""
        named: dict[str, float] = {}
        for token_id, item in items:
            name = self.exact_name_of(token_id)
            named[_id_name(token_id) if name in named else name] = _finite(item.logprob)
        return named


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


class TextOffsets:
    """Where each token of a text begins, in characters; one that goes on with a character begins where that does.

    `before` comes first in the text. What a stop string cut off counts, as its tokens are there.
    """

    def __init__(self, texts: TokenTexts, skip_special_tokens: bool, before: str = "") -> None:
        self._texts = texts
        self._hidden = texts.tokenizer.special_ids if skip_special_tokens else frozenset()
        self._length = len(before)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            own = b"" if token_id in self._hidden else self._texts.bytes_of(token_id)
            if own and not self._goes_on(own):
                # What was begun is no character: it shows as U+FFFD before this token.
                self._length += len(self._decoder.decode(b"", final=True))
            offsets.append(self._length)
            self._length += len(self._decoder.decode(own))
        return offsets

    def _goes_on(self, own: bytes) -> bool:
        """False where a character was begun and these bytes are not more of it."""
        begun = self._decoder.getstate()[0]
        if not begun:
            return True
        try:
            codecs.getincrementaldecoder("utf-8")().decode(begun + own[:1])
        except UnicodeDecodeError:
            return False
        return True


def chat_logprobs(choice: CompletionOutput, params: SamplingParams, names: TokenNames) -> dict[str, Any] | None:
    """Chat's logprobs object: one entry a token of the choice, with its best alternatives, and those asked for by id.

    A token that the text leaves out (a special one, or the one that ended it) has empty `bytes`: joined, they are the
    text, and what a stop string cut off it.
    """
    if choice.logprobs is None:
        return None
    content = []
    for position in choice.logprobs:
        (token_id, sampled), *_ = position.items()
        entry = _chat_entry(token_id, sampled.logprob, names)
        if params.skip_special_tokens and token_id in names.texts.tokenizer.special_ids and token_id not in names.shown:
            entry["bytes"] = []
        entry["top_logprobs"] = [_chat_entry(i, one.logprob, names) for i, one in _best(position, params.logprobs or 0)]
        content.append(entry)
    stopped_by_token = choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)
    if content and stopped_by_token and not params.include_stop_str_in_output:
        content[-1]["bytes"] = []
    return {"content": content}


def _best(position: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` best tokens in order, then those that were asked for by id.

    The sampled token stands first in `position`, and among the best only if one of their ranks is missing: a tie gives
    it the rank of another.
    """
    first, *others = position.items()
    asked = [item for item in others if item[1].rank is None]
    best = [item for item in others if item[1].rank is not None and item[1].rank <= count]
    missing = next((rank for rank, item in enumerate(best, 1) if item[1].rank != rank), len(best) + 1)
    if missing <= count and (first[1].rank or 0) <= missing:
        best.insert(missing - 1, first)
    return best + asked


def _chat_entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    token_bytes = list(names.texts.bytes_of(token_id))
    return {"token": names.name_of(token_id), "logprob": _finite(logprob), "bytes": token_bytes}


def _finite(logprob: float) -> float:
    """JSON has no -Infinity; the API's number for "never" is -9999."""
    return max(logprob, -9999.0)


def completion_logprobs(
    logprobs: PromptLogprobs | SampleLogprobs,
    token_ids: list[int],
    offsets: list[int],
    num_top: int,
    names: TokenNames,
) -> dict[str, list[Any]]:
    """Completions' logprobs object for `token_ids`, which begin at these `offsets`: parallel lists.

    The first token of a prompt has no log-probability: null stands there.
    """
    shown = [None if position is None else _shown(position, num_top) for position in logprobs]
    return {
        "tokens": [names.exact_name_of(token_id) for token_id in token_ids],
        "token_logprobs": [
            None if position is None else _finite(position[token_id].logprob)
            for token_id, position in zip(token_ids, logprobs, strict=True)
        ],
        "top_logprobs": [
            names.by_name(items) if items is not None and (num_top or len(items) > 1) else None for items in shown
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
