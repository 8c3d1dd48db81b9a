"""prompt_logprobs and echo: whole and streamed, over texts and token lists, with nothing generated."""

from __future__ import annotations

import asyncio
from typing import Any

from evensong.protocol.output import FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.testing.byte_tokenizer import byte_ids
from evensong.testing.fake_client import tokens
from tests.unit.entrypoints.http.serving import ANSWER, Served, TalkingClient, run

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
PROMPT = "hello"


def expected(ids: list[int], k: int) -> list[dict[str, Any] | None]:
    """What the scripted core says of a prompt, in vLLM's form."""
    texts = {i + d: bytes([i + d - 10]).decode("utf-8", "replace") for i in ids for d in range(4)}
    form: list[dict[str, Any] | None] = [None]
    for i in ids[1:]:
        own = {str(i): {"logprob": -9.0, "rank": 4, "decoded_token": texts[i]}}
        best = {str(i + r): {"logprob": -float(r), "rank": r, "decoded_token": texts[i + r]} for r in range(1, k + 1)}
        form.append(own | best)
    return form


def test_prompt_logprobs_of_completions() -> None:
    async def body(served: Served) -> None:
        form = {"prompt": [byte_ids(PROMPT), byte_ids("abc")], "n": 2, "max_tokens": 3, "prompt_logprobs": 2}
        whole = await served.complete(**form)
        shown = [choice.get("prompt_logprobs") for choice in whole["choices"]]
        assert shown == [expected(byte_ids(PROMPT), 2), None, expected(byte_ids("abc"), 2), None]
        events = await served.stream(TEXT, **form)
        given = [c["prompt_logprobs"] for event in events for c in event["choices"] if "prompt_logprobs" in c]
        assert sorted(map(len, given)) == [3, 5] and all(one in shown for one in given)
        assert "prompt_logprobs" not in (await served.complete(prompt="a"))["choices"][0]
        # The first choice asks for all of them.
        asked = {r.request_id[0]: r.params.prompt_logprobs for r in served.core.script.added[:4]}
        assert asked == {"0": 2, "1": None}

    run(body)


def test_prompt_logprobs_of_chats() -> None:
    async def body(served: Served) -> None:
        whole = await served.chat(prompt_logprobs=0, n=2, max_tokens=3)
        ids = served.core.script.added[0].prompt_token_ids
        shown = whole["prompt_logprobs"]
        assert shown[0] is None and [list(at) for at in shown[1:]] == [[str(i)] for i in ids[1:]]
        events = await served.stream(CHAT, messages=HELLO, prompt_logprobs=0, n=2, max_tokens=3)
        assert [event["prompt_logprobs"] for event in events if "prompt_logprobs" in event] == [shown]

    run(body)


def test_echo() -> None:
    async def body(served: Served) -> None:
        for prompt in (PROMPT, byte_ids(PROMPT)):
            assert (await served.complete(prompt=prompt, echo=True))["choices"][0]["text"] == PROMPT + ANSWER
        both = await served.complete(prompt=[PROMPT, "abc"], n=2, echo=True)
        assert [c["text"] for c in both["choices"]] == [PROMPT + ANSWER] * 2 + ["abc" + ANSWER] * 2
        cut = await served.complete(prompt=PROMPT, echo=True, truncate_prompt_tokens=2)
        assert cut["choices"][0]["text"] == "lo" + ANSWER and cut["usage"]["prompt_tokens"] == 2

    run(body)


def test_echo_with_logprobs_covers_prompt_and_output() -> None:
    async def body(served: Served) -> None:
        form = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 4}
        logprobs = (await served.complete(**form))["choices"][0]["logprobs"]
        assert logprobs["tokens"][:5] == list(PROMPT) and len(logprobs["tokens"]) == 9
        assert logprobs["token_logprobs"] == [None, -9.0, -9.0, -9.0, -9.0, -0.5, -0.5, -0.5, -0.5]
        assert logprobs["top_logprobs"][:2] == [None, {"e": -9.0, "f": -1.0}]
        # The last two tokens are the two bytes of one character: both begin where it does.
        assert logprobs["text_offset"] == [*range(8), 7]
        assert logprobs["tokens"][5:] == ["G", "r", "bytes:\\xc3", "bytes:\\xbc"]
        joined: dict[str, list[Any]] = {name: [] for name in logprobs}
        text = ""
        for event in await served.stream(TEXT, **form):
            text += event["choices"][0]["text"]
            for name, part in event["choices"][0]["logprobs"].items():
                joined[name] += part
        assert joined == logprobs and text.startswith(PROMPT)
        named = await served.complete(**form, return_tokens_as_token_ids=True)
        assert named["choices"][0]["logprobs"]["tokens"][:2] == [f"token_id:{i}" for i in byte_ids("he")]
        assert named["choices"][0]["logprobs"]["text_offset"] == logprobs["text_offset"]

    run(body)


def test_every_choice_echoes_the_prompt() -> None:
    async def body(served: Served) -> None:
        form = {"prompt": [PROMPT, "abc"], "echo": True, "logprobs": 2, "max_tokens": 3, "n": 3}
        whole = await served.complete(**form)
        alone = [(await served.complete(**form | {"prompt": one, "n": 1}))["choices"][0] for one in form["prompt"]]
        assert [choice["logprobs"] for choice in whole["choices"]] == [one["logprobs"] for one in alone for _ in "123"]
        joined: dict[int, dict[str, list[Any]]] = {}
        texts: dict[int, str] = {}
        for event in await served.stream(TEXT, **form):
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                for name, part in choice["logprobs"].items():
                    joined.setdefault(choice["index"], {}).setdefault(name, []).extend(part)
        for choice in whole["choices"]:
            assert (joined[choice["index"]], texts[choice["index"]]) == (choice["logprobs"], choice["text"])

    run(body)


def test_an_echo_that_would_be_too_much_is_refused_and_leaves_nothing() -> None:
    async def body(served: Served) -> None:
        form = {"prompt": [20] * 1000, "echo": True, "logprobs": 4, "max_tokens": 1}
        for stream in (False, True):
            refused = await served.post(TEXT, **form, n=81, stream=stream)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
        assert served.state.require_engine(None).front.outputs.num_requests == 0
        assert (await served.post(TEXT, **form, n=2)).status_code == 200

    run(body)


def test_a_prompt_is_scored_and_nothing_generated() -> None:
    async def body(served: Served) -> None:
        form = {"prompt": [PROMPT, "abc"], "echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
        whole = await served.complete(**form)
        for choice, prompt in zip(whole["choices"], (PROMPT, "abc"), strict=True):
            assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (prompt, "length", [])
            assert choice["prompt_token_ids"] == byte_ids(prompt)
            assert choice["logprobs"]["token_logprobs"] == [None] + [-9.0] * (len(prompt) - 1)
            assert choice["logprobs"]["top_logprobs"] == [None] * len(prompt)
        assert (whole["usage"]["completion_tokens"], whole["usage"]["prompt_tokens"]) == (0, 8)
        events = await served.stream(TEXT, **form)
        assert sorted(event["choices"][0]["text"] for event in events) == ["abc", PROMPT]
        scored = await served.complete(prompt=PROMPT, prompt_logprobs=1, max_tokens=0, n=2)
        assert [choice["text"] for choice in scored["choices"]] == ["", ""]
        assert scored["choices"][0]["prompt_logprobs"] == expected(byte_ids(PROMPT), 1)
        chat = await served.chat(prompt_logprobs=1, max_completion_tokens=0)
        assert chat["choices"][0]["message"]["content"] == "" and len(chat["prompt_logprobs"]) > 1
        assert (await served.post(CHAT, messages=HELLO, max_tokens=0)).status_code == 400
        plain = await served.complete(prompt=PROMPT, echo=True, max_tokens=0)
        assert plain["choices"][0]["text"] == PROMPT and plain["choices"][0]["logprobs"] is None
        assert (await served.post(TEXT, prompt=PROMPT, max_tokens=0)).status_code == 400

    run(body)


def test_an_echo_that_is_ended_before_the_prompt_was_scored() -> None:
    class Silent(TalkingClient):
        async def _score_prompt(self, request: EngineCoreRequest) -> None:
            self.send(tokens(request, 0, [], FinishReason.ABORT))
            await asyncio.Event().wait()

    async def body(served: Served) -> None:
        for most in (0, 5):
            whole = await served.complete(prompt=PROMPT, echo=True, logprobs=1, max_tokens=most, prompt_logprobs=1)
            choice = whole["choices"][0]
            assert (choice["text"], choice["finish_reason"], choice["prompt_logprobs"]) == (PROMPT, "abort", None)
            assert choice["logprobs"]["token_logprobs"] == [None] * 5

    run(body, Silent)


def test_limits() -> None:
    async def body(served: Served) -> None:
        for path, form in ((TEXT, {"prompt": PROMPT}), (CHAT, {"messages": HELLO})):
            for bad in (-1, 21, 10**30, 1.5, True):
                refused = await served.post(path, **form, prompt_logprobs=bad)
                assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"
        assert (await served.post(CHAT, messages=HELLO, echo=True)).status_code == 400

    run(body)


def test_the_callers_own_id() -> None:
    async def body(served: Served) -> None:
        answer = await served.complete(request_id="mine:1", max_tokens=1)
        assert answer["id"] == "cmpl-mine:1" and served.core.script.added[0].request_id.startswith("mine:1-")
        assert (await served.chat(request_id="mine:1", max_tokens=1))["id"] == "chatcmpl-mine:1"
        for bad in ("", "a b", "x" * 129, "a\n", "é", 7):
            refused = await served.post(TEXT, prompt="a", request_id=bad)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "request_id"

    run(body)


def test_priority_and_special_tokens_reach_the_engine() -> None:
    async def body(served: Served) -> None:
        await served.complete(priority=-3, max_tokens=1)
        await served.chat(priority=5, max_tokens=1)
        assert [request.priority for request in served.core.script.added] == [-3, 5]
        for bad in (2**63, 1.5, "high"):
            assert (await served.post(TEXT, prompt="a", priority=bad)).status_code == 400

    run(body)
