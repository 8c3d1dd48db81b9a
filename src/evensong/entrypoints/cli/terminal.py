"""What chat and complete share: where the answer comes from, a server's stream or an engine of one's own."""

from __future__ import annotations

import argparse
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import httpx

from evensong.entrypoints.cli.flags import Parser
from evensong.entrypoints.cli.keys import keys_in_environment
from evensong.entrypoints.llm import LLM
from evensong.protocol.errors import EngineStartError, RequestError
from evensong.protocol.sampling_params import RequestOutputKind, SamplingParams

DEFAULT_URL = "http://127.0.0.1:8000/v1"
Messages = list[dict[str, str]]


class Source(ABC):
    """Answers, piece by piece."""

    @abstractmethod
    def chat(self, messages: Messages) -> Iterator[str]:
        """The assistant's next message."""

    @abstractmethod
    def complete(self, prompt: str) -> Iterator[str]:
        """The text that follows `prompt`."""

    @abstractmethod
    def close(self) -> None:
        """Ends what was started."""


class ServerSource(Source):
    """An OpenAI-compatible server."""

    def __init__(self, url: str, api_key: str | None, options: dict[str, Any]) -> None:
        self._url = url.rstrip("/")
        self._options = options
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A long answer of a slow model is no error; a server that is not there is.
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(None, connect=5.0))
        self._model = self._first_model()

    def chat(self, messages: Messages) -> Iterator[str]:
        for choice in self._stream("/chat/completions", {"messages": messages}):
            yield choice["delta"].get("content") or ""

    def complete(self, prompt: str) -> Iterator[str]:
        for choice in self._stream("/completions", {"prompt": prompt}):
            yield choice["text"]

    def close(self) -> None:
        self._client.close()

    def _first_model(self) -> str:
        try:
            response = self._client.get(f"{self._url}/models")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise EngineStartError(f"no server answers at {self._url}: {error}") from error
        if response.status_code >= 400:
            raise EngineStartError(self._complaint(response))
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise EngineStartError(f"what answers at {self._url} is no OpenAI-compatible server") from error

    def _complaint(self, response: httpx.Response) -> str:
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = " ".join(response.text[:200].split())
        return f"{self._url} answers {response.status_code}: {message}"

    def _stream(self, path: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        body = {"model": self._model, "stream": True, **self._options, **fields}
        try:
            with self._client.stream("POST", f"{self._url}{path}", json=body) as response:
                if response.status_code >= 400:
                    response.read()
                    # Refused as sent; a next message may be taken.
                    raise RequestError(self._complaint(response), status=response.status_code)
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise EngineStartError(event["error"]["message"])
                    yield from event["choices"]
        except httpx.TransportError as error:
            raise EngineStartError(f"the connection to {self._url} broke: {error}") from error


class OwnSource(Source):
    """An engine started for this command."""

    def __init__(self, model: str, given: dict[str, Any]) -> None:
        self._llm = LLM(model, log_level="warning")
        self._params = SamplingParams(**{"max_tokens": None, **self._llm.llm_engine.front.sampling_defaults, **given})
        self._number = 0

    def chat(self, messages: Messages) -> Iterator[str]:
        prompt = self._llm.llm_engine.front.inputs.chat_template.render(messages)
        return self._run(prompt, add_special_tokens=False)

    def complete(self, prompt: str) -> Iterator[str]:
        return self._run(prompt, add_special_tokens=True)

    def close(self) -> None:
        self._llm.shutdown()

    def _run(self, prompt: str, *, add_special_tokens: bool) -> Iterator[str]:
        engine = self._llm.llm_engine
        params = self._params.clone()
        params.output_kind = RequestOutputKind.DELTA
        self._number += 1
        engine.add_request(str(self._number), prompt, params, add_special_tokens=add_special_tokens)
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    yield output.outputs[0].text
        finally:
            engine.abort_all()


def make_parser(prog: str, description: str, *, max_tokens: int | None) -> Parser:
    """The flags of both commands."""
    parser = Parser(prog=prog, description=description)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="run this model here; without it a server is asked")
    parser.add_argument("--url", default=DEFAULT_URL, help="the server's address")
    parser.add_argument("--api-key", default=argparse.SUPPRESS, help="the server's key (default: $EVENSONG_API_KEY)")
    parser.add_argument(
        "--temperature", type=float, default=argparse.SUPPRESS, help="0 is greedy (default: the model's, else 1)"
    )
    parser.add_argument(
        "--top-p", type=float, default=argparse.SUPPRESS, help="nucleus sampling (default: the model's, else off)"
    )
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="longest answer in tokens")
    parser.add_argument("--seed", type=int, default=argparse.SUPPRESS, help="the same seed gives the same answer")
    return parser


def open_source(options: argparse.Namespace) -> Source:
    """The server, or the engine, that the flags ask for. Raises EngineStartError or ConfigError in one line."""
    given = {name: vars(options)[name] for name in ("temperature", "top_p", "seed") if name in options}
    if options.max_tokens is not None:
        given["max_tokens"] = options.max_tokens
    SamplingParams(**{"max_tokens": None, **given})  # checked before anything starts
    if options.model is not None:
        return OwnSource(options.model, given)
    key = getattr(options, "api_key", None) or next(iter(keys_in_environment()), None)
    return ServerSource(options.url, key, given)


def show(pieces: Iterator[str]) -> str:
    """Writes the pieces as they come; the whole text. Ctrl-C ends the answer, and only that.

    Raises RequestError when the request is refused.
    """
    text = ""
    try:
        for piece in pieces:
            text += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return text
