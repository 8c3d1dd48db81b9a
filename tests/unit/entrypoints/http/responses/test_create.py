"""/v1/responses on the real application: store, background, cancel, streams that fail, keys, clients that leave."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

import httpx

from tests.unit.entrypoints.http.serving import ANSWER, Served, TalkingClient, Visitor, run, until

PATH = "/v1/responses"


def events_of(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.split("\n\n")[:-1]:
        name, _, data = block.partition("\ndata: ")
        events.append(json.loads(data))
        assert name == f"event: {events[-1]['type']}"
    return events


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


async def created(served: Served, **fields: Any) -> dict[str, Any]:
    answer = await served.post(PATH, **{"input": "hi", **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def ended(served: Served, response_id: str) -> dict[str, Any]:
    """A response of the background, once it has ended."""
    for _ in range(2000):
        answer = (await served.http.get(f"{PATH}/{response_id}")).json()
        if answer["status"] != "in_progress":
            return dict(answer)
        await asyncio.sleep(0.002)
    raise AssertionError("it did not end")


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    """Without ids and times."""
    name = response["id"].removeprefix("resp_")
    text = json.dumps(response | {"created_at": 0, "completed_at": 0}).replace(name, "ID")
    return dict(json.loads(text))


def test_whole_streamed_and_background_are_the_same() -> None:
    async def body(served: Served) -> None:
        whole = await created(served, seed=1)
        assert text_of(whole) == ANSWER and whole["seed"] == 1 and whole["status"] == "completed"
        events = events_of((await served.post(PATH, input="hi", seed=1, stream=True)).text)
        assert events[-1]["type"] == "response.completed"
        assert comparable(events[-1]["response"]) == comparable(whole)
        background = await created(served, seed=1, background=True)
        assert background["status"] == "in_progress" and background["output"] == []
        last = await ended(served, background["id"])
        assert comparable(last) == comparable(whole) | {"background": True}
        for response in (whole, events[-1]["response"]):
            assert (await served.http.get(f"{PATH}/{response['id']}")).json() == response
        assert served.state.num_active == 0

    run(body)


def test_what_is_not_stored_is_not_there() -> None:
    async def body(served: Served) -> None:
        response = await created(served, store=False)
        for call in (
            served.http.get(f"{PATH}/{response['id']}"),
            served.http.delete(f"{PATH}/{response['id']}"),
            served.http.post(f"{PATH}/{response['id']}/cancel"),
            served.http.get(f"{PATH}/{response['id']}/input_items"),
            served.post(PATH, input="a", previous_response_id=response["id"]),
        ):
            answer = await call
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "response_not_found"

    run(body)


def test_a_refused_request_leaves_nothing() -> None:
    async def body(served: Served) -> None:
        headers = {"X-Request-Id": "mine"}
        for fields in ({"background": True}, {"stream": True}, {}):
            refused = await served.http.post(PATH, json={"input": "hi" * 5000, **fields}, headers=headers)
            assert refused.status_code == 400, refused.text
            assert (await served.http.get(f"{PATH}/resp_mine")).status_code == 404
        assert served.state.num_active == 0

    run(body)


def test_one_request_id_twice() -> None:
    async def body(served: Served) -> None:
        headers = {"X-Request-Id": "mine"}
        answers = [await served.http.post(PATH, json={"input": "hi"}, headers=headers) for _ in range(2)]
        ids = [answer.json()["id"] for answer in answers]
        assert ids[0] == "resp_mine" and ids[1] != ids[0]
        for response_id in ids:
            assert (await served.http.get(f"{PATH}/{response_id}")).json()["id"] == response_id

    run(body)


def test_continuing_and_items() -> None:
    async def body(served: Served) -> None:
        first = await created(served, input=[{"role": "user", "content": "one"}], instructions="Be brief.")
        second = await created(served, input="two", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"] and second["instructions"] is None
        by_hand = [
            {"role": "user", "content": "one"},
            {"type": "item_reference", "id": first["output"][0]["id"]},
            {"role": "user", "content": "two"},
        ]
        await created(served, input=by_hand)
        prompts = [request.prompt_token_ids for request in served.core.script.added]
        assert prompts[1] == prompts[2] != prompts[0]
        listed = (await served.http.get(f"{PATH}/{second['id']}/input_items")).json()
        (item,) = listed["data"]
        assert item["content"] == [{"type": "input_text", "text": "two"}] and not listed["has_more"]
        many = await created(served, input=[{"role": "user", "content": str(i)} for i in range(5)])
        query = f"{PATH}/{many['id']}/input_items?limit=2&order=asc"
        page = (await served.http.get(query)).json()
        assert [item["content"][0]["text"] for item in page["data"]] == ["0", "1"] and page["has_more"]
        page = (await served.http.get(f"{query}&after={page['last_id']}")).json()
        assert [item["content"][0]["text"] for item in page["data"]] == ["2", "3"]
        for wrong in ("limit=0", "limit=x", "order=up", "after=nothing", "colour=1", "limit=1&limit=2"):
            answer = await served.http.get(f"{PATH}/{many['id']}/input_items?{wrong}")
            assert answer.status_code in (400, 404), wrong
        deleted = await served.http.delete(f"{PATH}/{first['id']}")
        assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
        gone = await served.post(PATH, input="three", previous_response_id=second["id"])
        assert gone.status_code == 404 and gone.json()["error"]["param"] == "previous_response_id"

    run(body)


def test_cancelling() -> None:
    async def body(served: Served) -> None:
        running = await created(served, background=True)
        await until(lambda: served.core.script.added)
        early = await served.post(PATH, input="a", previous_response_id=running["id"])
        assert early.status_code == 400
        cancelled = (await served.http.post(f"{PATH}/{running['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        assert len(served.core.script.aborted) == 1 and served.state.num_active == 0
        again = (await served.http.post(f"{PATH}/{running['id']}/cancel")).json()
        assert again == cancelled == (await served.http.get(f"{PATH}/{running['id']}")).json()
        # One that is deleted while it runs is ended too.
        other = await created(served, background=True)
        assert (await served.http.delete(f"{PATH}/{other['id']}")).status_code == 200
        assert len(served.core.script.aborted) == 2
        assert (await served.http.get(f"{PATH}/{other['id']}")).status_code == 404

    run(body, lambda: TalkingClient(hold_after=3))


def test_an_operator_aborts_by_the_response_s_id() -> None:
    async def body(served: Served) -> None:
        running = await created(served, background=True)
        aborted = await served.post("/abort_requests", request_ids=[running["id"]])
        assert aborted.json() == {"aborted": 1}
        assert (await ended(served, running["id"]))["status"] == "cancelled"

    run(body, lambda: TalkingClient(hold_after=3))


def test_a_server_that_keeps_none() -> None:
    async def body(served: Served) -> None:
        response = await created(served)
        assert (await served.http.get(f"{PATH}/{response['id']}")).status_code == 404
        refused = await served.post(PATH, input="a", background=True)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "background"

    run(body, responses_store_bytes=0)


def test_only_what_runs_in_the_background_can_be_cancelled() -> None:
    async def body(served: Served) -> None:
        response = await created(served)
        assert (await served.http.post(f"{PATH}/{response['id']}/cancel")).status_code == 400
        assert (await served.http.get(f"{PATH}/{response['id']}?stream=true")).status_code == 400
        assert (await served.http.get(f"{PATH}/{response['id']}?starting_after=1")).status_code == 400

    run(body)


def test_a_stream_can_be_taken_up_again() -> None:
    async def body(served: Served) -> None:
        answer = await served.post(PATH, input="hi", background=True, stream=True)
        events = events_of(answer.text)
        response_id = events[0]["response"]["id"]
        assert events[-1]["type"] == "response.completed" and text_of(events[-1]["response"]) == ANSWER
        for start in (0, 5, len(events) - 2, len(events) + 7):
            rest = await served.http.get(f"{PATH}/{response_id}?stream=true&starting_after={start}")
            assert events_of(rest.text) == events[start + 1 :]
        assert events_of((await served.http.get(f"{PATH}/{response_id}?stream=true")).text) == events

    run(body)


def test_an_engine_that_dies_fails_what_runs() -> None:
    async def body(served: Served) -> None:
        background = await created(served, background=True)
        stream = asyncio.create_task(served.post(PATH, input="hi", stream=True))
        whole = asyncio.create_task(served.post(PATH, input="hi"))
        await until(lambda: len(served.core.script.added) == 3)
        await asyncio.sleep(0.05)
        served.core.script.die()
        last = events_of((await stream).text)[-1]
        assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"
        assert (await whole).status_code == 500
        failed = await ended(served, background["id"])
        assert failed["status"] == "failed" and "died" in failed["error"]["message"]
        assert served.state.num_active == 0

    run(body, lambda: TalkingClient(hold_after=3))


def test_a_client_that_leaves() -> None:
    """A stream is aborted, and what came is kept; what runs in the background goes on."""

    async def body(served: Served) -> None:
        visitor = Visitor(served.app, PATH, {"input": "hi", "stream": True})
        await until(lambda: any(b"Gr" in m.get("body", b"") for m in visitor.messages))
        visitor.leave()
        await asyncio.wait([visitor.task])
        assert len(served.core.script.aborted) == 1 and served.state.num_active == 0
        first = next(m["body"] for m in visitor.messages if m.get("body"))
        kept = await ended(served, events_of(first.decode())[0]["response"]["id"])
        assert kept["status"] == "cancelled" and text_of(kept) == ANSWER[: len(text_of(kept))]
        visitor = Visitor(served.app, PATH, {"input": "hi", "stream": True, "background": True})
        await until(lambda: visitor.statuses)
        visitor.leave()
        await asyncio.wait([visitor.task])
        assert len(served.core.script.aborted) == 1 and served.state.num_active == 1

    run(body, lambda: TalkingClient(hold_after=3))


def test_responses_belong_to_keys() -> None:
    async def body(served: Served) -> None:
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        answer = await served.http.post(PATH, json={"input": "hi"}, headers=mine)
        path = f"{PATH}/{answer.json()['id']}"
        assert (await served.http.get(path, headers=mine)).status_code == 200

        async def status(call: Any) -> int:
            response: httpx.Response = await call
            return response.status_code

        assert await status(served.http.get(path)) == 401
        assert await status(served.http.get(path, headers=other)) == 404
        assert await status(served.http.delete(path, headers=other)) == 404
        body = {"input": "a", "previous_response_id": answer.json()["id"]}
        assert await status(served.http.post(PATH, json=body, headers=other)) == 404
        assert await status(served.http.get(path, headers=mine)) == 200

    run(body, api_key=("one", "two"))


def test_memory_is_bounded() -> None:
    async def body(served: Served) -> None:
        ids = [(await created(served, metadata={"a": "b" * 500}))["id"] for _ in range(8)]
        found = [(await served.http.get(f"{PATH}/{response_id}")).status_code for response_id in ids]
        assert found[-1] == 200 and found[0] == 404 and found == sorted(found, reverse=True)

    run(body, responses_store_bytes=8000)


def test_numbers_of_any_size_come_back() -> None:
    async def body(served: Served) -> None:
        tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}, "x-limit": 10**40}}
        answer = await served.post(PATH, input="hi", tools=[tool], tool_choice="none")
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 200:
            stored = (await served.http.get(f"{PATH}/{answer.json()['id']}")).json()
            assert stored["tools"] == answer.json()["tools"] == [tool]

    run(body)


def test_log_probabilities() -> None:
    async def body(served: Served) -> None:
        fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        whole = await created(served, **fields)
        entries = whole["output"][0]["content"][0]["logprobs"]
        assert len(entries) == whole["usage"]["output_tokens"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
        events = events_of((await served.post(PATH, input="hi", stream=True, **fields)).text)
        assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == entries
        too_many = await served.post(PATH, input="hi", **{**fields, "top_logprobs": 21})
        assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "top_logprobs"
        assert (await created(served, top_logprobs=2))["output"][0]["content"][0]["logprobs"] == []

    run(body)


THOUGHT = "<think>\nOne and one.\n</think>\n\n"
TEXT = "Let me add."
CALLS = "".join(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {i}}}}}\n</tool_call>\n' for i in (1, 2))
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
THINKING: Any = functools.partial(TalkingClient, answer=THOUGHT + TEXT + CALLS)
REASONS = {"reasoning_parser": "qwen3"}


def test_reasoning_and_calls() -> None:
    async def body(served: Served) -> None:
        whole = await created(served, tools=[ADD], input="add")
        events = events_of((await served.post(PATH, input="add", tools=[ADD], stream=True)).text)
        seeds = {"seed": None}
        assert comparable(events[-1]["response"]) | seeds == comparable(whole) | seeds
        reasoning, message, *calls = whole["output"]
        assert reasoning["type"] == "reasoning" and reasoning["content"][0]["text"] == "One and one."
        assert message["content"][0]["text"].strip() == TEXT
        assert [call["arguments"] for call in calls] == ['{"a": 1}', '{"a": 2}']
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len(THOUGHT.rstrip())
        # The next turn: reasoning and calls go back as they came.
        outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "2"} for call in calls]
        await created(served, input=outputs, previous_response_id=whole["id"], tools=[ADD])
        by_hand = [{"role": "user", "content": "add"}, *whole["output"], *outputs]
        await created(served, input=by_hand, tools=[ADD], store=False)
        prompts = [request.prompt_token_ids for request in served.core.script.added]
        assert prompts[-1] == prompts[-2]
        missing = await served.post(PATH, input="so?", previous_response_id=whole["id"], tools=[ADD])
        assert missing.status_code == 400 and calls[0]["call_id"] in missing.json()["error"]["message"]
        refused = await served.post(PATH, input="add", tools=[ADD], include=["message.output_text.logprobs"])
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "include"

    run(body, THINKING, engine=REASONS)
