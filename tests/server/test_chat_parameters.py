"""Chat on a server that has a template of its own, takes templates from requests, and has its own sampling defaults."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.harness import Server, Survivors

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# The demo's form of a conversation, without the system message that its own template puts first.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOUD = TEMPLATE.replace("{{ m.content }}", "{{ m.content | upper }} {{ suffix }}")
HELLO = [{"role": "user", "content": "Name the capital of France in one short sentence."}]
BASE: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 48}
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"


@pytest.fixture(scope="module")
def server_flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(TEMPLATE)
    defaults = json.dumps({"temperature": 0, "max_new_tokens": 7})
    return [
        *("--chat-template", str(file), "--trust-request-chat-template", "--max-model-len", "1024"),
        *("--override-generation-config", defaults),
    ]


def answer(server: Server, **fields: Any) -> str:
    """The text of a chat."""
    response = server.post(CHAT, BASE | fields)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def prompt_of(messages: list[dict[str, str]], ending: str = "<|im_start|>assistant\n") -> str:
    """What the server's template makes of messages."""
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + ending


def completed(server: Server, prompt: str) -> str:
    """The text that follows a prompt as it stands."""
    return server.text({"model": "demo", "prompt": prompt, "max_tokens": 48, "add_special_tokens": False})


def test_the_servers_template_is_used(server: Server) -> None:
    assert answer(server) == completed(server, prompt_of(HELLO))
    assert answer(server, add_generation_prompt=False) == completed(server, prompt_of(HELLO, ""))


def test_roles_and_text_parts_reach_the_template(server: Server) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]},
        {"role": "tool", "content": "Paris", "tool_call_id": "c1"},
        *HELLO,
    ]
    flat = [{"role": "developer", "content": "Be brief.\nBe kind."}, {"role": "tool", "content": "Paris"}, *HELLO]
    assert answer(server, messages=messages) == completed(server, prompt_of(flat))


def test_a_requests_template_is_used(server: Server) -> None:
    loud = [{"role": "user", "content": HELLO[0]["content"].upper() + " NOW"}]
    given = answer(server, chat_template=LOUD, chat_template_kwargs={"suffix": "NOW"})
    assert given == completed(server, prompt_of(loud))


def test_the_final_message_goes_on_exactly(server: Server) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The capital of France is "}]
    fields = {"messages": messages, "continue_final_message": True}
    expected = completed(server, prompt_of(HELLO) + "The capital of France is ")
    assert answer(server, **fields) == answer(server, **fields, add_generation_prompt=False) == expected
    assert answer(server, **fields, chat_template=TEMPLATE) == expected
    refused = server.post(CHAT, BASE | fields | {"add_generation_prompt": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "continue_final_message"


def test_the_tokens_of_a_chat_are_those_that_tokenize_tells(server: Server) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "It is "}]
    for fields in (
        {},
        {"continue_final_message": True},
        {"chat_template": LOUD, "chat_template_kwargs": {"suffix": "!"}},
    ):
        told = server.post("/tokenize", {"messages": messages, **fields}).json()["tokens"]
        asked = server.post(CHAT, BASE | {"messages": messages, "max_tokens": 1, "return_token_ids": True, **fields})
        assert asked.json()["prompt_token_ids"] == told


def test_the_servers_sampling_defaults(server: Server) -> None:
    """Greedy and seven tokens, unless the request says otherwise."""
    for path, form in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "Once upon a time"})):
        bare = [server.post(path, {"model": "demo", **form, "ignore_eos": True}).json() for _ in range(2)]
        assert bare[0]["usage"]["completion_tokens"] == 7 and bare[0]["seed"] != bare[1]["seed"]
        texts = [json.dumps(one["choices"][0].get("message", one["choices"][0].get("text"))) for one in bare]
        assert texts[0] == texts[1]
        own = {"model": "demo", **form, "max_tokens": 48, "temperature": 9, "ignore_eos": True}
        drawn = [server.post(path, own).json() for _ in range(2)]
        assert drawn[0]["usage"]["completion_tokens"] == 48
        assert drawn[0]["choices"] != drawn[1]["choices"]


def test_templates_that_never_end_or_grow_are_refused_and_harm_nobody(server: Server, survivors: Survivors) -> None:
    bad: list[dict[str, Any]] = [
        {"chat_template": ENDLESS},
        {"chat_template": DOUBLING},
        {"chat_template": "{{ 'a' * 10 ** 10 }}", "stream": True},
        {"chat_template": "{% if %}"},
        {"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"},
        {"chat_template": "x" * 70_000},
        {"chat_template": "{{ raise_exception('no') }}"},
        {"chat_template": 5},
    ]
    with survivors.watch(), ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            for refused in pool.map(lambda fields: server.post(CHAT, BASE | fields), bad):
                assert refused.status_code == 400, refused.text
                assert refused.json()["error"]["message"]
