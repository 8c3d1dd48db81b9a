"""LLMEngine over a client without a core."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.config.resolve import resolve
from evensong.engine.frontend.front import ModelFiles
from evensong.engine.llm_engine import LLMEngine
from evensong.protocol.errors import EngineDeadError, RequestError
from evensong.protocol.output import FinishReason
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import RequestOutputKind, SamplingParams
from evensong.testing.byte_tokenizer import byte_ids, byte_tokenizer, tiny_description
from evensong.testing.fake_client import FakeSyncClient, tokens


def make_engine(**options: Any) -> tuple[LLMEngine, FakeSyncClient]:
    client = FakeSyncClient(**options)
    files = ModelFiles(byte_tokenizer(), tiny_description())
    return LLMEngine(resolve({}), client=client, files=files), client


def refuse(*marks: str) -> Any:
    def check(request: EngineCoreRequest) -> RequestError | None:
        full = any(request.request_id.startswith(mark) for mark in marks)
        return RequestError("queue is full", status=429) if full else None

    return check


def test_step_until_nothing_is_unfinished() -> None:
    engine, client = make_engine()
    engine.add_request("a", "hi", SamplingParams(max_tokens=4))
    engine.add_request("b", byte_ids("yo"))
    first, second = client.script.added
    assert first.eos_token_ids == [1]
    assert second.params.max_tokens == 16
    client.send(tokens(first, 0, byte_ids("x")))
    client.send(tokens(first, 1, byte_ids("y"), FinishReason.LENGTH), tokens(second, 0, [1], FinishReason.STOP))
    seen = []
    while engine.has_unfinished_requests():
        seen += [(o.request_id, o.outputs[0].text, o.finished) for o in engine.step()]
    assert seen == [("a", "x", False), ("a", "xy", True), ("b", "", True)]
    assert engine.get_num_unfinished_requests() == 0


def test_a_refusal_names_its_request_and_the_others_go_on() -> None:
    engine, client = make_engine(refuse=refuse("bad"))
    engine.add_request("good", "hi")
    engine.add_request("bad", "hi")
    client.send(tokens(client.script.added[0], 0, byte_ids("x"), FinishReason.LENGTH))
    assert engine.step() == []
    with pytest.raises(RequestError, match="queue is full") as caught:
        engine.step()
    assert caught.value.request_id == "bad"
    assert [output.request_id for output in engine.step()] == ["good"]
    assert not engine.has_unfinished_requests()


def test_a_bad_request_leaves_nothing() -> None:
    engine, client = make_engine()
    with pytest.raises(RequestError):
        engine.add_request("a", "")
    assert client.script.added == []
    assert not engine.has_unfinished_requests()


def test_a_request_that_cannot_be_sent_leaves_nothing() -> None:
    engine, client = make_engine()
    client.script.die()
    with pytest.raises(EngineDeadError):
        engine.add_request("a", "x")
    assert not engine.has_unfinished_requests()


def test_stop_strings_abort_in_the_core() -> None:
    engine, client = make_engine()
    internal = engine.add_request("a", "hi", SamplingParams(stop="b"))
    engine.step()
    client.send(tokens(client.script.added[0], 0, byte_ids("abc")))
    assert engine.step()[0].outputs[0].text == "a"
    assert client.script.aborted == [internal]


def test_abort_by_the_users_id() -> None:
    engine, client = make_engine()
    internal = engine.add_request("a", "hi")
    engine.add_request("b", "hi", SamplingParams(n=2))
    engine.abort_request(["a", "nobody"])
    assert client.script.aborted == [internal]
    engine.abort_all()
    assert len(client.script.aborted) == 3
    engine.abort_all()
    assert len(client.script.aborted) == 3
    assert not engine.has_unfinished_requests()


def test_after_abort_all_nothing_old_comes_out() -> None:
    engine, client = make_engine(refuse=refuse("bad"))
    final = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("done", "hi", final)
    engine.step()
    engine.add_request("bad", "hi", final)
    done = client.script.added[0]
    client.send(tokens(done, 0, byte_ids("x"), FinishReason.LENGTH))
    with pytest.raises(RequestError):
        engine.step()
    engine.abort_all()
    engine.add_request("new", "hi", final)
    client.send(tokens(client.script.added[-1], 0, byte_ids("y"), FinishReason.LENGTH))
    outputs = [output for _ in range(3) for output in engine.step()]
    assert [output.request_id for output in outputs] == ["new"]


def test_death_ends_everything_and_is_said_again() -> None:
    engine, client = make_engine()
    engine.add_request("a", "hi")
    engine.step()
    client.script.die("killed")
    with pytest.raises(EngineDeadError, match="killed"):
        engine.step()
    assert not engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError):
        engine.add_request("b", "hi")


def test_control_verbs_and_shutdown() -> None:
    engine, client = make_engine()
    assert engine.reset_prefix_cache() == "reset_prefix_cache done"  # type: ignore[attr-defined]
    assert engine.collective_rpc("ping", args=[1])  # type: ignore[attr-defined]
    assert client.script.calls[-1] == ("collective_rpc", {"method": "ping", "args": [1]})
    engine.do_log_stats()
    engine.shutdown()
    assert client.num_shutdowns == 1
