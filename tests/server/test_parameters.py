"""Every parameter through HTTP and through LLM: the same bytes both ways, and the effect that its name promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from evensong.entrypoints.llm import LLM
from evensong.protocol.errors import RequestError
from evensong.protocol.request_output import CompletionOutput
from evensong.protocol.sampling_params import RequestOutputKind, SamplingParams
from tests.server.harness import Server

PROMPT = "Once upon a time, in a small village by the sea, there lived"
MAX_TOKENS = 48
MAX_MODEL_LEN = 512
EOS = 2


@dataclass(frozen=True)
class Answer:
    """What both ways must agree on."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    seed: int | None


Answers = dict[str, Answer]
Holds = Callable[[Answer, Answers], bool]
Case = tuple[dict[str, Any], Holds]


def differs(answer: Answer, all: Answers) -> bool:
    """The setting changed the plain sample."""
    return answer.token_ids != all["sampled"].token_ids


SAMPLED = {"temperature": 1.0, "seed": 7, "ignore_eos": True}
CASES: dict[str, Case] = {
    "greedy": ({"temperature": 0}, lambda a, _: len(a.token_ids) == MAX_TOKENS and a.finish_reason == "length"),
    "sampled": (SAMPLED, lambda a, all: a.seed == 7 and a.token_ids != all["greedy"].token_ids),
    "seed": (SAMPLED | {"seed": -(2**63)}, lambda a, all: differs(a, all) and a.seed == -(2**63)),
    "temperature": (SAMPLED | {"temperature": 0.3}, differs),
    "top_p": (SAMPLED | {"top_p": 1e-4}, lambda a, all: a.token_ids == all["ignore_eos"].token_ids),
    "top_k": (SAMPLED | {"top_k": 1}, lambda a, all: a.token_ids == all["ignore_eos"].token_ids),
    "top_k of all": (SAMPLED | {"top_k": -1}, lambda a, all: not differs(a, all)),
    # 1.0 would leave exact ties, which bfloat16 products make, to the noise.
    "min_p": (SAMPLED | {"min_p": 0.9}, lambda a, all: differs(a, all) and a.text[:7] == all["greedy"].text[:7]),
    "repetition_penalty": (
        {"temperature": 0, "repetition_penalty": 1.9},
        lambda a, all: len(set(a.token_ids)) > len(set(all["greedy"].token_ids)),
    ),
    "presence_penalty": (
        {"temperature": 0, "presence_penalty": 2.0},
        lambda a, all: len(set(a.token_ids)) > len(set(all["greedy"].token_ids)),
    ),
    "frequency_penalty": (
        {"temperature": 0, "frequency_penalty": 2.0},
        lambda a, all: len(set(a.token_ids)) > len(set(all["greedy"].token_ids)),
    ),
    "logit_bias": ({"temperature": 0, "logit_bias": {"504": 100}}, lambda a, _: set(a.token_ids) == {504}),
    "max_tokens": ({"temperature": 0, "max_tokens": 5}, lambda a, all: a.token_ids == all["greedy"].token_ids[:5]),
    "eos": (
        {"temperature": 0, "logit_bias": {str(EOS): 100}},
        lambda a, _: (a.token_ids, a.text, a.finish_reason, a.stop_reason) == ([EOS], "", "stop", None),
    ),
    "min_tokens": (
        {"temperature": 0, "logit_bias": {str(EOS): 100}, "min_tokens": 9},
        lambda a, _: len(a.token_ids) == 10 and a.token_ids.index(EOS) == 9,
    ),
    "ignore_eos": ({"temperature": 0, "ignore_eos": True}, lambda a, _: len(a.token_ids) == MAX_TOKENS),
    "ignored eos": (
        {"temperature": 0, "ignore_eos": True, "logit_bias": {str(EOS): 100}, "max_tokens": 6},
        lambda a, _: (a.token_ids, a.text, a.finish_reason) == ([EOS] * 6, "", "length"),
    ),
    "skip_special_tokens": (
        {
            "temperature": 0,
            "ignore_eos": True,
            "logit_bias": {str(EOS): 100},
            "max_tokens": 3,
            "skip_special_tokens": False,
        },
        lambda a, _: a.text == "<|im_end|>" * 3,
    ),
    "stop": (
        {"temperature": 0, "stop": [" a", "zzz"]},
        lambda a, all: a.text == all["greedy"].text.split(" a")[0] and a.stop_reason == " a",
    ),
    "include_stop_str_in_output": (
        {"temperature": 0, "stop": " a", "include_stop_str_in_output": True},
        lambda a, all: a.text == all["greedy"].text.split(" a")[0] + " a" and a.finish_reason == "stop",
    ),
    "stop_token_ids": (
        {"temperature": 0, "logit_bias": {"504": 100}, "stop_token_ids": [504]},
        lambda a, _: (a.token_ids, a.text, a.stop_reason) == ([504], "", 504),
    ),
    "allowed_token_ids": (
        SAMPLED | {"temperature": 9.0, "allowed_token_ids": [504, 260, 28, 30]},
        lambda a, _: set(a.token_ids) <= {504, 260, 28, 30} and len(set(a.token_ids)) > 1,
    ),
    "bad_words": (
        {"temperature": 0, "bad_words": ["a", "of the", "the"]},
        lambda a, all: not {" a", " the"} & {f" {word}" for word in a.text.split()} and " a " in all["greedy"].text,
    ),
    "repetition_detection": (
        {
            "temperature": 0,
            "logit_bias": {"504": 100},
            "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 4},
        },
        lambda a, _: (a.token_ids, a.finish_reason, a.stop_reason) == ([504] * 8, "stop", "repetition_detected"),
    ),
    "every token forbidden in the middle": (
        {"temperature": 0, "allowed_token_ids": [504], "bad_words": ["TheThe"]},
        lambda a, _: (a.text, a.finish_reason, a.stop_reason) == ("The", "stop", "no_token_allowed"),
    ),
}


def http_answer(server: Server, fields: dict[str, Any]) -> Answer:
    """By HTTP."""
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "return_token_ids": True, **fields}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return Answer(choice["text"], choice["token_ids"], choice["finish_reason"], choice["stop_reason"], choice["seed"])


def llm_answer(choice: CompletionOutput) -> Answer:
    """By LLM."""
    return Answer(choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason, choice.seed)


@pytest.fixture(scope="module")
def server_flags() -> list[str]:
    return ["--max-model-len", str(MAX_MODEL_LEN)]


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(str(demo_model), multiprocess=False, max_model_len=MAX_MODEL_LEN, disable_log_stats=True) as made:
        yield made


@pytest.fixture(scope="module")
def by_http(server: Server) -> Answers:
    with ThreadPoolExecutor(len(CASES)) as pool:
        asked = {name: pool.submit(http_answer, server, fields) for name, (fields, _) in CASES.items()}
        return {name: future.result() for name, future in asked.items()}


@pytest.fixture(scope="module")
def by_llm(llm: LLM) -> Answers:
    params = [SamplingParams(**({"max_tokens": MAX_TOKENS} | fields)) for fields, _ in CASES.values()]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    return {name: llm_answer(output.outputs[0]) for name, output in zip(CASES, outputs, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_the_parameter_does_what_it_says_both_ways(name: str, by_http: Answers, by_llm: Answers) -> None:
    answer, offline = by_http[name], by_llm[name]
    if "seed" in CASES[name][0]:
        assert answer == offline
    else:
        assert answer.token_ids == offline.token_ids and answer.text == offline.text
        assert (answer.finish_reason, answer.stop_reason) == (offline.finish_reason, offline.stop_reason)
    assert CASES[name][1](answer, by_http), answer


def test_masks_hold_in_every_choice(server: Server) -> None:
    body = {
        "model": "demo",
        "prompt": PROMPT,
        "max_tokens": 16,
        "n": 4,
        "seed": 3,
        "temperature": 9.0,
        "return_token_ids": True,
    }
    allowed = [504, 260, 28, 30, 284]
    answer = server.post("/v1/completions", {**body, "allowed_token_ids": allowed, "bad_words": ["the"]}).json()
    choices = [choice["token_ids"] for choice in answer["choices"]]
    assert all(set(ids) <= set(allowed) - {260} for ids in choices) and len(set(map(tuple, choices))) == 4


def test_prompts_are_scored_alike_both_ways(server: Server, llm: LLM) -> None:
    """Twice over HTTP, so that the second meets the first's blocks; the echo holds the same numbers."""
    prompts = [PROMPT, "The capital of France is Paris, and the capital of Italy is"]
    params = SamplingParams(temperature=0, max_tokens=48, prompt_logprobs=2, logprobs=2)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    body = {"model": "demo", "prompt": prompts, "max_tokens": 48, "temperature": 0, "prompt_logprobs": 2, "logprobs": 2}
    for _ in range(2):
        answer = server.post("/v1/completions", body).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for choice, output in zip(answer["choices"], outputs, strict=True):
            assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
            assert choice["prompt_logprobs"] == [
                None
                if at is None
                else {
                    str(i): {"logprob": p.logprob, "rank": p.rank, "decoded_token": p.decoded_token}
                    for i, p in at.items()
                }
                for at in output.prompt_logprobs
            ]
            assert choice["text"] == output.outputs[0].text
    echoed = server.post("/v1/completions", body | {"echo": True, "max_tokens": 0}).json()
    assert echoed["usage"]["completion_tokens"] == 0
    for choice, output in zip(echoed["choices"], outputs, strict=True):
        assert choice["text"] == output.prompt and choice["finish_reason"] == "length"
        ids, positions = output.prompt_token_ids, output.prompt_logprobs or []
        own = [at and at[token_id].logprob for token_id, at in zip(ids, positions, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == own
    # Of a sentence that everyone knows, the name that belongs there is likelier than another.
    cities = [f"The capital of France is {city}" for city in ("Paris", "Lima")]
    scores = server.post("/v1/completions", body | {"prompt": cities, "echo": True, "max_tokens": 0}).json()
    paris, lima = (choice["logprobs"]["token_logprobs"][-1] for choice in scores["choices"])
    assert paris > -3 > lima


def test_a_prompt_that_filled_the_cache_serves_others(server: Server) -> None:
    body = {"model": "demo", "prompt": "Twelve little sheep went out to sea. " * 8, "max_tokens": 4, "temperature": 0}
    server.post("/v1/completions", body | {"prompt_logprobs": 0})
    usage = server.post("/v1/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 64


def test_truncation_and_special_tokens(server: Server, llm: LLM) -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 48, "temperature": 0, "return_token_ids": True}
    ids = llm.get_tokenizer().encode(PROMPT)
    cut = server.post("/v1/completions", body | {"truncate_prompt_tokens": 5, "echo": True}).json()["choices"][0]
    tail = llm.get_tokenizer().decode(ids[-5:])
    assert cut["prompt_token_ids"] == ids[-5:] and cut["text"].startswith(tail)
    assert cut["text"] == tail + server.text(body | {"prompt": ids[-5:]})
    (offline,) = llm.generate(PROMPT, SamplingParams(temperature=0, truncate_prompt_tokens=5), use_tqdm=False)
    assert offline.prompt_token_ids == ids[-5:]
    long = body | {"prompt": "word " * 1000, "truncate_prompt_tokens": -1}
    assert server.post("/v1/completions", long).json()["usage"]["prompt_tokens"] == MAX_MODEL_LEN - 48


def test_a_salt_keeps_the_cache_to_those_who_know_it(server: Server) -> None:
    body = {"model": "demo", "prompt": "A secret that nobody may time. " * 8, "max_tokens": 48, "temperature": 0}
    answers = [
        server.post("/v1/completions", body | fields).json()
        for fields in ({"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {})
    ]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert (cached[0], cached[1], cached[3]) == (0, 0, 0) and cached[2] >= 48
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1


def test_prompts_in_lists_and_choices_in_order(server: Server, llm: LLM) -> None:
    texts = [PROMPT, "The capital of Italy is"]
    ids = [llm.get_tokenizer().encode(text) for text in texts]
    body = {"model": "demo", "max_tokens": 16, "seed": 5, "n": 2, "return_token_ids": True}
    by_text = server.post("/v1/completions", body | {"prompt": texts}).json()["choices"]
    by_ids = server.post("/v1/completions", body | {"prompt": ids}).json()["choices"]
    assert [choice["index"] for choice in by_text] == [0, 1, 2, 3]
    assert [choice["text"] for choice in by_text] == [choice["text"] for choice in by_ids]
    assert [by_ids[0]["prompt_token_ids"], by_ids[2]["prompt_token_ids"]] == ids
    outputs = llm.generate(texts, SamplingParams(n=2, seed=5, max_tokens=16), use_tqdm=False)
    assert [c.text for output in outputs for c in output.outputs] == [choice["text"] for choice in by_text]
    assert [c.seed for output in outputs for c in output.outputs] == [choice["seed"] for choice in by_text]


def test_tokens_that_are_asked_for_by_id(server: Server, llm: LLM) -> None:
    ids = [504, 260, 28]
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprob_token_ids": ids}
    whole = server.post("/v1/completions", {**body, "logprobs": 20, "return_tokens_as_token_ids": True}).json()
    positions = whole["choices"][0]["logprobs"]["top_logprobs"]
    params = SamplingParams(temperature=0, max_tokens=4, logprob_token_ids=ids)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    for own, top, sampled in zip(output.outputs[0].logprobs, positions, output.outputs[0].token_ids, strict=True):
        assert set(own) == {sampled, *ids}
        assert all(top[f"token_id:{token_id}"] == item.logprob for token_id, item in own.items())
        assert own[sampled].rank == 1 and all(own[i].rank is None for i in ids if i != sampled)
    refused = server.post("/v1/completions", body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprob_token_ids"


def test_a_prompt_can_be_computed_without_the_cache(llm: LLM) -> None:
    for skip, cached in ((None, False), (None, True), (True, False), (False, True)):
        params = SamplingParams(temperature=0, max_tokens=2, skip_reading_prefix_cache=skip)
        (output,) = llm.generate([[9] * 65], params, use_tqdm=False)
        assert output.num_cached_tokens == (64 if cached else 0)


def test_output_kinds_and_no_text_at_all(llm: LLM) -> None:
    seen: dict[RequestOutputKind, list[str]] = {}
    for kind in RequestOutputKind:
        params = SamplingParams(temperature=0, max_tokens=8, output_kind=kind, prompt_logprobs=0)
        llm.llm_engine.add_request(kind.name, PROMPT, params)
        scored: list[bool] = []
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                seen.setdefault(kind, []).append(output.outputs[0].text)
                scored.append(output.prompt_logprobs is not None)
        assert scored == [kind is not RequestOutputKind.DELTA or index == 0 for index in range(len(scored))]
    (whole,) = seen[RequestOutputKind.FINAL_ONLY]
    assert "".join(seen[RequestOutputKind.DELTA]) == seen[RequestOutputKind.CUMULATIVE][-1] == whole
    assert all(whole.startswith(text) for text in seen[RequestOutputKind.CUMULATIVE])
    (bare,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, detokenize=False), use_tqdm=False)
    assert bare.outputs[0].text == "" and llm.get_tokenizer().decode(bare.outputs[0].token_ids) == whole


def test_chats_by_llm(llm: LLM) -> None:
    question = {"role": "user", "content": "Name the capital of France in one short sentence."}
    params = SamplingParams(temperature=0, max_tokens=16)
    begun = [question, {"role": "assistant", "content": "It is "}]
    (continued,) = llm.chat(begun, params, use_tqdm=False, continue_final_message=True)
    assert continued.prompt is not None and continued.prompt.endswith("<|im_start|>assistant\nIt is ")
    template = "{{ messages[0].content }} {{ style }}"
    options: dict[str, Any] = {"chat_template": template, "chat_template_kwargs": {"style": "Loudly!"}}
    (own,) = llm.chat([question], params, use_tqdm=False, **options)
    assert own.prompt == f"{question['content']} Loudly!"
    with pytest.raises(RequestError, match="chat template is damaged"):
        llm.chat([question], params, use_tqdm=False, chat_template="{% if %}")


BAD: dict[str, Any] = {
    "allowed_token_ids": [10**6],
    "bad_words": [" "],
    "logit_bias": {-1: 1.0},
    "logprob_token_ids": [49152],
    "logprobs": 21,
    "min_tokens": 600,
    "prompt_logprobs": 21,
    "stop": [""],
    "stop_token_ids": [49152],
    "temperature": float("nan"),
    "top_p": 0,
    "truncate_prompt_tokens": MAX_MODEL_LEN + 1,
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused_by_name_and_leaves_nothing(llm: LLM, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate([PROMPT] * 2, SamplingParams(**{"max_tokens": None, name: BAD[name]}), use_tqdm=False)
    assert (caught.value.param, caught.value.status) == (name, 400)
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.call_verb("check_kv_cache")["owned"] == 0
