"""Beam search on the real model: the naive search over the whole vocabulary, offline and over HTTP, in any company."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from evensong.entrypoints.llm import LLM
from evensong.protocol.beam_search import BeamSearchOutput, BeamSearchParams
from evensong.protocol.errors import RequestError
from evensong.protocol.sampling_params import SamplingParams
from tests.server.harness import Neighbour, Server, Survivors, events

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea, there lived", "2 + 2 ="]
ANSWERED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello! How can I help you today?"
MAX_MODEL_LEN = 256
EOS = 2


@pytest.fixture(scope="module")
def server_flags() -> list[str]:
    return ["--max-model-len", str(MAX_MODEL_LEN), "--max-n", "16", "--max-logprobs", "5"]


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    settings: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "disable_log_stats": True, "multiprocess": False}
    with LLM(str(demo_model), max_logprobs=49152, **settings) as made:
        yield made


def naive(llm: LLM, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """From the log-probabilities of the whole vocabulary after each beam: tokens of the output, and their sum."""
    whole = SamplingParams(temperature=0, max_tokens=1, logprobs=49152, detokenize=False)

    def order(beam: tuple[list[int], float]) -> tuple[float, list[int]]:
        tokens, total = beam
        length = len(prompt) + len(tokens) - (tokens[-1] == EOS)
        return -(total / length**params.length_penalty), tokens

    beams: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[tuple[list[int], float]] = []
    for _ in range(params.max_tokens):
        outputs = llm.generate([prompt + tokens for tokens, _ in beams], whole, use_tqdm=False)
        new = []
        for (tokens, total), output in zip(beams, outputs, strict=True):
            assert output.outputs[0].logprobs is not None
            values = [(-entry.logprob, token) for token, entry in output.outputs[0].logprobs[0].items()]
            assert len(values) == 49152
            new += [([*tokens, token], total - value) for value, token in sorted(values)[: 2 * params.beam_width]]
        done += [beam for beam in new if beam[0][-1] == EOS and not params.ignore_eos]
        new = [beam for beam in new if beam[0][-1] != EOS or params.ignore_eos]
        beams = sorted(new, key=order)[: params.beam_width]
    return sorted([*done, *beams], key=order)[: params.beam_width]


def found(llm: LLM, prompt: str, output: BeamSearchOutput) -> list[tuple[list[int], float]]:
    ids = llm.get_tokenizer().encode(prompt)
    for sequence in output.sequences:
        assert sequence.tokens[: len(ids)] == ids
        assert sequence.text.startswith(llm.get_tokenizer().decode(ids))
        assert len(sequence.logprobs) == len(sequence.tokens) - len(ids)
    return [(sequence.tokens[len(ids) :], sequence.cum_logprob) for sequence in output.sequences]


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        (PROMPTS[0], BeamSearchParams(3, 6)),
        (PROMPTS[1], BeamSearchParams(4, 5, length_penalty=0.0, ignore_eos=True)),
        # At once after a whole answer: EOS is among the best.
        (ANSWERED, BeamSearchParams(2, 5)),
    ],
)
def test_it_is_the_naive_search(llm: LLM, prompt: str, params: BeamSearchParams) -> None:
    (output,) = llm.beam_search([prompt], params)
    expected = naive(llm, llm.get_tokenizer().encode(prompt), params)
    assert found(llm, prompt, output) == expected
    assert len(output.sequences) == params.beam_width
    if "im_start" in prompt:
        assert any(sequence.finish_reason == "stop" for sequence in output.sequences)


def test_many_prompts_in_any_engine(llm: LLM, demo_model: Path) -> None:
    """All at once as one by one, and in a pool where they preempt each other and nothing is cached."""
    params = BeamSearchParams(4, 16)
    alone = [llm.beam_search(prompt, params)[0] for prompt in PROMPTS]
    assert llm.beam_search(PROMPTS, params) == alone
    small: dict[str, Any] = {"num_kv_blocks_override": 14, "max_num_seqs": 5, "max_num_batched_tokens": 24}
    with LLM(str(demo_model), multiprocess=False, max_model_len=200, disable_log_stats=True, **small) as other:
        assert other.beam_search(PROMPTS, params) == alone
        assert other.call_verb("check_kv_cache")["owned"] == 0
    for output in alone:
        assert len({tuple(sequence.tokens) for sequence in output.sequences}) == 4
        assert all(isinstance(s.text, str) and len(s.logprobs) <= 16 for s in output.sequences)
    # Greedy is never better than the best beam, by its score.
    (greedy,) = llm.generate(
        PROMPTS[1], SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True), False
    )
    (best, *_) = llm.beam_search(PROMPTS[1], BeamSearchParams(4, 16, ignore_eos=True))[0].sequences
    assert greedy.outputs[0].cumulative_logprob is not None
    assert best.cum_logprob >= greedy.outputs[0].cumulative_logprob


def body_of(path: str, prompt: str, width: int, most: int = 48, **more: Any) -> dict[str, Any]:
    body = {"model": "demo", "n": width, "max_tokens": most, "use_beam_search": True, "return_token_ids": True, **more}
    if path == CHAT:
        return body | {"messages": [{"role": "user", "content": prompt}]}
    return body | {"prompt": prompt}


def test_http_is_offline(server: Server, llm: LLM) -> None:
    (offline,) = llm.beam_search(PROMPTS[1], BeamSearchParams(4, 48))
    ids = llm.get_tokenizer().encode(PROMPTS[1])
    body = body_of(TEXT, PROMPTS[1], 4, logprobs=2)
    alone = server.post(TEXT, body).json()
    neighbour = Neighbour(server)
    with ThreadPoolExecutor(3) as pool:
        crowd = list(pool.map(lambda _: server.post(TEXT, body).json(), range(3)))
    neighbour.finish()
    assert all(answer["choices"] == alone["choices"] for answer in crowd)
    for index, (choice, sequence) in enumerate(zip(alone["choices"], offline.sequences, strict=True)):
        assert choice["index"] == index and choice["token_ids"] == sequence.tokens[len(ids) :]
        assert PROMPTS[1] + choice["text"] == sequence.text
        assert (choice["finish_reason"], choice["stop_reason"]) == (sequence.finish_reason, sequence.stop_reason)
        own = [next(iter(at.values())).logprob for at in sequence.logprobs]
        assert choice["logprobs"]["token_logprobs"] == own
        assert all(2 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])
    usage = alone["usage"]
    assert usage["prompt_tokens"] == len(ids)
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in alone["choices"])
    several = server.post(TEXT, body | {"prompt": [PROMPTS[0], PROMPTS[1]], "echo": True, "logprobs": None}).json()
    assert [c["text"] for c in several["choices"][4:]] == [PROMPTS[1] + c["text"] for c in alone["choices"]]


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_stream_has_everything_at_its_end(server: Server, path: str) -> None:
    more: dict[str, Any] = {"logprobs": 1} if path == TEXT else {"logprobs": True, "top_logprobs": 1}
    body = body_of(path, "Name a colour.", 3, length_penalty=0.5, **more)
    whole = server.post(path, body)
    assert whole.status_code == 200, whole.text
    joined: dict[int, dict[str, Any]] = {}
    with server.client.stream("POST", path, json=body | {"stream": True}) as response:
        for event in events(response):
            for choice in event["choices"]:
                own = joined.setdefault(choice["index"], {"text": "", "token_ids": []})
                own["text"] += choice["text"] if path == TEXT else choice["delta"].get("content") or ""
                own["token_ids"] += choice.get("token_ids") or []
                own["logprobs"] = choice["logprobs"] or own.get("logprobs")
                own["finish_reason"] = choice["finish_reason"]
    for choice in whole.json()["choices"]:
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        own = joined[choice["index"]]
        assert own == {key: choice[key] for key in ("token_ids", "logprobs", "finish_reason")} | {"text": text}


BAD: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"n": 17}, "n"),
    (TEXT, {"n": 0}, "n"),
    (TEXT, {"max_tokens": 0}, "max_tokens"),
    (TEXT, {"length_penalty": 1000}, "length_penalty"),
    (TEXT, {"length_penalty": "1"}, "length_penalty"),
    (TEXT, {"use_beam_search": False, "length_penalty": 0.5}, "length_penalty"),
    (TEXT, {"use_beam_search": "yes"}, "use_beam_search"),
    (TEXT, {"logprobs": 6}, "logprobs"),
    (TEXT, {"stop": ["a"]}, "stop"),
    (TEXT, {"logit_bias": {"1": 1}}, "logit_bias"),
    (TEXT, {"min_tokens": 2}, "min_tokens"),
    (TEXT, {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    (TEXT, {"prompt_logprobs": 1}, "prompt_logprobs"),
    (TEXT, {"echo": True, "logprobs": 1}, "echo"),
    (TEXT, {"prompt": [1] * 300}, "prompt"),
    (CHAT, {"stop": "a"}, "stop"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
]


def test_bad_values_are_a_400(server: Server, survivors: Survivors) -> None:
    with survivors.watch():
        for path, fields, param in BAD:
            for stream in (False, True):
                answer = server.post(path, body_of(path, "a", 2) | {"stream": stream} | fields)
                assert answer.status_code == 400, (fields, answer.text)
                assert answer.json()["error"]["param"] == param, (fields, answer.text)


def test_a_client_that_leaves_ends_the_search(server: Server, survivors: Survivors) -> None:
    with survivors.watch():
        for stream in (False, True):
            body = body_of(TEXT, PROMPTS[1], 16, 200, stream=stream)
            with pytest.raises(httpx.TimeoutException):
                httpx.post(server.url + TEXT, json=body, timeout=1.0)
        late = server.post(TEXT, body_of(TEXT, PROMPTS[1], 16, 200, timeout=0.3))
        assert late.status_code == 408, late.text
    # Nothing of it is left running.
    assert server.metric("num_requests_running") == 0 and server.metric("num_requests_waiting") == 0


def test_offline_mistakes_name_the_prompt_and_leave_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match="^prompt 1: ") as caught:
        llm.beam_search(["fine", "", "fine"], BeamSearchParams(2, 4))
    assert caught.value.param == "prompt"
    for width in (16385, 10**9):
        with pytest.raises(RequestError, match="beam_width must be at most"):
            llm.beam_search("a", BeamSearchParams(width, 4))
    with pytest.raises(RequestError, match="must be BeamSearchParams"):
        llm.beam_search("a", SamplingParams())  # type: ignore[arg-type]  # the mistake under test
    (late,) = llm.beam_search("a", BeamSearchParams(8, 200), timeout=0.3)
    assert {(s.finish_reason, s.stop_reason) for s in late.sequences} == {("abort", "timeout")}
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.call_verb("check_kv_cache")["owned"] == 0
    assert llm.beam_search([], BeamSearchParams(2, 4)) == []
