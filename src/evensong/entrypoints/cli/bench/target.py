"""The server under test: where it is, what it serves, and how its tokenizer is asked. One line for each mistake."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from evensong.entrypoints.cli.bench.units import WORDS, Units, single_tokens
from evensong.entrypoints.cli.keys import API_KEY_VARIABLE, keys_in_environment
from evensong.protocol.errors import ConfigError, EngineStartError
from evensong.sources.resolve import resolve_model
from evensong.sources.tokenizer import load_tokenizer
from evensong.utils.logging import get_logger

logger = get_logger(__name__)

KEY_VARIABLES = (API_KEY_VARIABLE, "OPENAI_API_KEY")
CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.2


@dataclass
class Target:
    """An OpenAI-compatible server. `model` is set by `find_model`; `close()` it in the end."""

    base_url: str
    endpoint: str
    chat: bool
    model: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._client = httpx.Client(headers=self.headers, timeout=CONNECT_SECONDS)

    def close(self) -> None:
        """Ends its connection."""
        self._client.close()

    @property
    def url(self) -> str:
        """Where requests go. A base that ends in the /v1 with which the endpoint begins is understood."""
        return self._root + "/" + self.endpoint.lstrip("/")

    @property
    def _root(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1")

    def wait_for_model(self, wanted: str | None, seconds: float) -> None:
        """`find_model`, tried again for `seconds` while the server starts."""
        until = time.monotonic() + seconds
        while True:
            try:
                return self.find_model(wanted)
            except EngineStartError:
                if time.monotonic() >= until:
                    raise
            time.sleep(POLL_SECONDS)

    def find_model(self, wanted: str | None) -> None:
        """Asks what is served; the first model where none is wanted.

        Raises EngineStartError in one line: nobody there, no such server, a key that is wrong, a model it lacks.
        """
        response = self._ask("GET", "/v1/models")
        if response.status_code in (401, 403):
            raise EngineStartError(f"{_complaint(self._root, response)} (set {' or '.join(KEY_VARIABLES)})")
        if response.status_code >= 500:
            raise EngineStartError(_complaint(self._root, response))
        names = _model_names(response) if response.is_success else None
        if names is None and wanted is None:
            problem = "its list of models cannot be read" if response.is_success else _complaint(self._root, response)
            raise EngineStartError(f"{self._root} is no OpenAI-compatible server, or it needs --model: {problem}")
        if wanted is not None and names and wanted not in names:
            raise EngineStartError(
                f"the model {wanted!r:.200} is not served by {self._root}; it has {', '.join(names[:10])}"
            )
        if wanted is None and not names:
            raise EngineStartError(f"{self._root} serves no model")
        self.model = wanted or (names or [""])[0]

    def units(self, tokenizer: str | None) -> Units:
        """What prompts are made of: token ids, or for chat words of one token, as the server's tokenizer has them.

        `tokenizer` names a MODEL whose tokenizer is read here instead. Where there is no tokenizer at all,
        common words stand for one token each.
        """
        if tokenizer is not None:
            local = load_tokenizer(resolve_model(tokenizer, progress=False))
            ids, words = single_tokens(lambda text: local.encode(text, add_special_tokens=False))
        elif self._can_tokenize():
            ids, words = single_tokens(self._tokenize)
        else:
            logger.warning("%s has no /tokenize: prompts are words, about one token each", self._root)
            return Units(WORDS)
        if not (words if self.chat else ids):
            raise ConfigError(
                "no common word is one token for this tokenizer, so prompts of exact length cannot be made"
            )
        return Units(words if self.chat else ids)

    def _can_tokenize(self) -> bool:
        try:
            self._tokenize("a")
        except (ValueError, KeyError, TypeError, EngineStartError):
            return False
        return True

    def _tokenize(self, text: str) -> list[int]:
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        response = self._ask("POST", "/tokenize", body)
        return [int(token) for token in response.json()["tokens"]]

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return self._client.request(method, self._root + path, json=body)
        except (httpx.TransportError, httpx.InvalidURL, UnicodeError) as error:
            what = str(error) or type(error).__name__
            raise EngineStartError(f"no server answers at {self._root}: {what:.200}") from error


def key_header() -> dict[str, str]:
    """The Authorization header for the key in the environment, if there is one."""
    key = next(iter(keys_in_environment()), None) or os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def complaint_of(status: int, body: bytes) -> str:
    """What an error response says, in one line."""
    response = httpx.Response(status, content=body)
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = " ".join(response.text[:200].split())
    return f"{status}: {message}"


def _complaint(root: str, response: httpx.Response) -> str:
    return f"{root} answers {complaint_of(response.status_code, response.content)}"


def _model_names(response: httpx.Response) -> list[str] | None:
    try:
        return [str(card["id"]) for card in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return None
