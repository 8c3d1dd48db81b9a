"""The store of responses: bounded, by owner, a conversation's items in order, events for whoever follows."""

from __future__ import annotations

import asyncio

import pytest

from evensong.entrypoints.http.forms_out import encode
from evensong.entrypoints.http.responses.store import EventLog, ResponseStore, Stored
from evensong.protocol.errors import RequestError


def put(store: ResponseStore, name: str, previous: str | None = None, owner: str | None = None, size: int = 0) -> None:
    item = {"type": "message", "id": f"in_{name}_0", "role": "user", "content": f"{name}?"}
    stored = Stored(name, owner, previous and f"resp_{previous}", encode([item]))
    store.open(stored)
    output = [{"type": "message", "id": f"msg_{name}_0", "role": "assistant", "content": f"{name}!" + " " * size}]
    store.close(stored, {"id": stored.id, "status": "completed", "output": output})


def test_a_conversation_and_its_items() -> None:
    store = ResponseStore(10_000)
    put(store, "a")
    put(store, "b", "a")
    items = store.items_before(None, "resp_b")
    assert [item["content"] for item in items] == ["a?", "a!", "b?", "b!"]
    assert store.item(None, "msg_a_0")["content"] == "a!" and store.item(None, "in_b_0")["content"] == "b?"
    for unknown in ("msg_a_1", "msg_c_0", "nothing", ""):
        with pytest.raises(RequestError) as caught:
            store.item(None, unknown)
        assert caught.value.status == 404


def test_what_was_not_used_for_longest_goes_first() -> None:
    store = ResponseStore(10_000, max_responses=3)
    for name in "abc":
        put(store, name)
    store.find(None, "resp_a")
    put(store, "d")
    assert [store.holds(name) for name in "abcd"] == [True, False, True, True]
    with pytest.raises(RequestError) as caught:
        store.items_before(None, "resp_b")
    assert caught.value.status == 404 and caught.value.param == "previous_response_id"


def test_bytes_are_bounded_and_counted() -> None:
    store = ResponseStore(2000)
    for name in "abcdefgh":
        put(store, name, size=400)
        assert store.num_bytes <= 2000
    assert 2 <= len(store) < 8
    put(store, "z", size=5000)
    assert not store.holds("z") and len(store) == 0 and store.num_bytes == 0
    put(store, "y")
    store.drop(store.find(None, "resp_y"))
    assert store.num_bytes == 0


def test_what_runs_stays() -> None:
    store = ResponseStore(0)
    running = Stored("a", None, None, b"[]")
    store.open(running)
    put(store, "b")
    assert store.holds("a") and not store.holds("b")
    with pytest.raises(RequestError) as caught:
        store.items_before(None, "resp_a")
    assert caught.value.status == 400


def test_others_do_not_see_it() -> None:
    store = ResponseStore(10_000)
    put(store, "a", owner="key-1")
    assert store.find("key-1", "resp_a").name == "a"
    for owner, given in (("key-2", "resp_a"), (None, "resp_a"), ("key-1", "a")):
        with pytest.raises(RequestError) as caught:
            store.find(owner, given)
        assert caught.value.status == 404


def test_failed_responses_cannot_be_continued() -> None:
    store = ResponseStore(10_000)
    stored = Stored("a", None, None, b"[]")
    store.open(stored)
    store.close(stored, {"id": "resp_a", "status": "failed", "output": []})
    with pytest.raises(RequestError) as caught:
        store.items_before(None, "resp_a")
    assert caught.value.status == 400 and "failed" in caught.value.message


def test_events_can_be_followed_from_any_on() -> None:
    async def main() -> None:
        log = EventLog()

        async def follow(start: int) -> list[bytes]:
            return [event async for event in log.follow(start)]

        log.append(b"0")
        followers = [asyncio.create_task(follow(start)) for start in (0, 1, 2, 9)]
        await asyncio.sleep(0)
        for event in (b"1", b"2"):
            log.append(event)
            await asyncio.sleep(0)
        log.append(b"3")
        log.close()
        found = await asyncio.wait_for(asyncio.gather(*followers), 5)
        assert found == [[b"0", b"1", b"2", b"3"], [b"1", b"2", b"3"], [b"2", b"3"], []]

    asyncio.run(main())
