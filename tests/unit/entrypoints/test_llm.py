"""LLM over a real core in this process, whose executor is scripted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from evensong.config.sections import EngineConfig
from evensong.engine import llm_engine
from evensong.engine.client.inproc import InprocClient
from evensong.engine.frontend.front import ModelFiles
from evensong.entrypoints.llm import LLM
from evensong.protocol.errors import ConfigError, EngineDeadError, RequestError
from evensong.protocol.sampling_params import SamplingParams
from evensong.testing.byte_tokenizer import byte_ids, byte_tokenizer, tiny_description
from evensong.testing.fake_executor import FakeExecutor, scripted_token


class Hook:
    """Called by the scripted executor for every token."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.at: dict[int, Any] = {}

    def __call__(self, token_ids: list[int]) -> int:
        self.num_tokens += 1
        if self.num_tokens in self.at:
            self.at[self.num_tokens]()
        return scripted_token(token_ids)


@pytest.fixture
def hook() -> Hook:
    return Hook()


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> Iterator[LLM]:
    def client(multiprocess: bool, asynchronous: bool, config: EngineConfig) -> InprocClient:
        return InprocClient(config, lambda config: FakeExecutor(next_token=hook))

    def files(config: EngineConfig) -> ModelFiles:
        return ModelFiles(byte_tokenizer(), tiny_description())

    monkeypatch.setattr(llm_engine, "make_client", client)
    monkeypatch.setattr(llm_engine, "load_model_files", files)
    with LLM("any", num_kv_blocks_override=64, max_model_len=128, max_num_seqs=8, disable_log_stats=True) as made:
        yield made


def quiet(llm: LLM) -> None:
    """Nothing runs, and every block is free."""
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.is_scheduler_empty()  # type: ignore[attr-defined]
    assert llm.check_kv_cache()["owned"] == 0  # type: ignore[attr-defined]


def script(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(scripted_token(ids))
    return ids[len(prompt) :]


def test_outputs_are_in_order_of_prompts(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=20 - index, ignore_eos=True) for index in range(20)]
    outputs = llm.generate([f"prompt {index}" for index in range(20)], params, use_tqdm=False)
    for index, output in enumerate(outputs):
        assert output.prompt == f"prompt {index}"
        assert output.outputs[0].token_ids == script(byte_ids(f"prompt {index}"), 20 - index)
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].text == byte_tokenizer().decode(output.outputs[0].token_ids)
    quiet(llm)


@pytest.mark.parametrize(
    "prompts",
    ["hi", ["hi"], byte_ids("hi"), [byte_ids("hi")], {"prompt": "hi"}, [{"prompt_token_ids": byte_ids("hi")}]],
)
def test_forms_of_one_prompt(llm: LLM, prompts: Any) -> None:
    (output,) = llm.generate(prompts, use_tqdm=False)
    assert output.outputs[0].token_ids == script(byte_ids("hi"), 16)


def test_more_prompts_than_a_servers_queue(llm: LLM) -> None:
    outputs = llm.generate([[20, 30]] * 1500, SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(outputs) == 1500


def test_choices(llm: LLM) -> None:
    (output,) = llm.generate("hi", SamplingParams(n=3, max_tokens=4, seed=5), use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert output.outputs[0].seed == 5
    assert all(choice.finished() for choice in output.outputs)


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([], use_tqdm=False) == []


@pytest.mark.parametrize("bad", ["", [], "a\ud800", [10**6], [True], 3.5, None, {"x": 1}, "y" * 200])
def test_a_bad_prompt_is_named_and_nothing_is_left(llm: LLM, bad: Any) -> None:
    with pytest.raises(RequestError, match="^prompt 1: ") as caught:
        llm.generate(["fine", bad, "fine"], use_tqdm=False)
    assert caught.value.param == "prompt"
    quiet(llm)
    assert len(llm.generate("fine", use_tqdm=False)) == 1


def test_a_prompt_that_the_core_refuses_is_named(llm: LLM) -> None:
    scheduler = llm.llm_engine._client._core.scheduler  # type: ignore[attr-defined]
    real = scheduler.add_request

    def picky(request: Any) -> Any:
        if len(request.prompt_token_ids) == 5:
            raise RequestError("five is too much", param="prompt")
        return real(request)

    scheduler.add_request = picky
    with pytest.raises(RequestError, match="^prompt 2: five is too much"):
        llm.generate(["one", "two", "three", "four"], use_tqdm=False)
    quiet(llm)


def test_params_that_cannot_be(llm: LLM) -> None:
    for params in ([SamplingParams()], {"n": 1}, [SamplingParams(), None], 3):
        with pytest.raises(RequestError) as caught:
            llm.generate(["a", "b"], params, use_tqdm=False)  # type: ignore[arg-type]
        assert caught.value.param == "sampling_params"
    quiet(llm)


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    text = "<s0>user\nhi<s1>\n<s0>assistant\n"
    ids = [0, *byte_ids("user\nhi"), 1, *byte_ids("\n"), 0, *byte_ids("assistant\n")]
    (one,) = llm.chat(conversation, use_tqdm=False)
    assert (one.prompt, one.prompt_token_ids) == (text, ids)
    two = llm.chat([conversation, conversation], SamplingParams(max_tokens=3), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in two] == [script(ids, 3)] * 2
    (bare,) = llm.chat(conversation, use_tqdm=False, add_generation_prompt=False)
    assert bare.prompt == "<s0>user\nhi<s1>\n"


def test_bad_conversations(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.chat([], use_tqdm=False)
    fine = [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match=r"^prompt 1: messages\[0\].content"):
        llm.chat([fine, [{"role": "user", "content": 3}]], use_tqdm=False)
    quiet(llm)


def test_progress(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, Any] = {"updates": 0, "closed": False}

    class Bar:
        def __init__(self, **options: Any) -> None:
            seen.update(options)

        def update(self, count: int) -> None:
            seen["updates"] += count

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            seen["text"] = text

        def close(self) -> None:
            seen["closed"] = True

    llm.generate(["a", "b"], SamplingParams(max_tokens=3), use_tqdm=Bar)
    assert (seen["total"], seen["updates"], seen["closed"]) == (2, 2, True)
    assert seen["text"] == "6 output tokens"
    llm.generate(["a"], use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["a"], use_tqdm=True)
    assert "Processed prompts" in capsys.readouterr().err


def test_ctrl_c_ends_the_call_and_the_engine_can_be_used_again(llm: LLM, hook: Hook) -> None:
    hook.at[30] = lambda: os.kill(os.getpid(), signal.SIGINT)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert hook.num_tokens < 60
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    quiet(llm)
    (output,) = llm.generate("a", SamplingParams(max_tokens=5), use_tqdm=False)
    assert output.outputs[0].token_ids == script(byte_ids("a"), 5)


def test_death_is_raised(llm: LLM) -> None:
    executor = llm.llm_engine._client._core.executor  # type: ignore[attr-defined]
    executor.fail_at_step = 3
    with pytest.raises(EngineDeadError, match="fake worker fails"):
        llm.generate(["a"], SamplingParams(max_tokens=100), use_tqdm=False)
    with pytest.raises(EngineDeadError):
        llm.generate(["a"], use_tqdm=False)


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM("demo", max_model_length=5)


def test_defaults_and_verbs(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert (params.max_tokens, params.temperature) == (16, 1.0)
    assert llm.get_tokenizer().encode("hi") == byte_ids("hi")
    assert llm.reset_prefix_cache() is True  # type: ignore[attr-defined]
    assert llm.get_supported_tasks() == ["generate"]  # type: ignore[attr-defined]
    llm.shutdown()
    llm.shutdown()


def test_where_no_settings_are_given_the_models_hold(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    llm.llm_engine.front.sampling_defaults.update(temperature=0.5, max_tokens=3)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, max_tokens=3)
    (output,) = llm.generate("hi", use_tqdm=False)
    assert output.params is not None and output.params.temperature == 0.5 and len(output.outputs[0].token_ids) == 3
    (own,) = llm.generate("hi", SamplingParams(max_tokens=5), use_tqdm=False)
    assert own.params is not None and own.params.temperature == 1.0 and len(own.outputs[0].token_ids) == 5


def test_prompts_are_scored_in_order_with_priorities(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, n=2)
    outputs = llm.generate(["abcd", byte_ids("xy")], params, use_tqdm=False, priority=[3, -1])
    for output in outputs:
        positions = output.prompt_logprobs
        assert positions is not None and positions[0] is None
        assert [list(at) for at in positions[1:] if at is not None] == [[i] for i in output.prompt_token_ids[1:]]
        assert [choice.index for choice in output.outputs] == [0, 1]
    with pytest.raises(RequestError, match="as many priorities"):
        llm.generate(["a", "b"], use_tqdm=False, priority=[1])
