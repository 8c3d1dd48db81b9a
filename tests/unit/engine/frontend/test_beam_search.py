"""Beam search as a state machine, on a model whose log-probabilities a test makes up."""

from __future__ import annotations

import random
from typing import Any

import pytest

from evensong.engine.frontend.beam_search import BeamSearch
from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.engine.frontend.input_processor import ProcessedRequest
from evensong.protocol.beam_search import BeamSearchParams
from evensong.protocol.errors import RequestError
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.request_output import CompletionOutput, Logprob, RequestOutput
from evensong.protocol.sampling_params import SamplingParams
from evensong.testing.byte_tokenizer import EOS_TOKEN_ID, byte_ids, byte_tokenizer

TEXTS = TokenTexts(byte_tokenizer())
PROMPT = byte_ids("ab")
VOCAB = [EOS_TOKEN_ID, *byte_ids("abcdef")]


def logprobs_after(tokens: tuple[int, ...], seed: int, coarse: bool) -> dict[int, float]:
    """Coarse ones tie often."""
    rng = random.Random(f"{seed} {tokens}")
    return {t: -rng.choice([1.0, 2.0]) if coarse else -5 * rng.random() for t in VOCAB}


def naive(params: BeamSearchParams, seed: int, coarse: bool) -> list[tuple[tuple[int, ...], float]]:
    """The peer's rule: of each beam the 2 * width best tokens, and EOS counts only as one of these."""

    def score(beam: tuple[tuple[int, ...], float]) -> tuple[float, tuple[int, ...]]:
        tokens, total = beam
        length = len(PROMPT) + len(tokens) - (tokens[-1] == EOS_TOKEN_ID)
        return -(total / length**params.length_penalty), tokens

    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    done: list[tuple[tuple[int, ...], float]] = []
    for _ in range(params.max_tokens):
        new = [
            ((*tokens, t), total + value)
            for tokens, total in beams
            for t, value in sorted(logprobs_after(tokens, seed, coarse).items(), key=lambda item: (-item[1], item[0]))[
                : 2 * params.beam_width
            ]
        ]
        done += [beam for beam in new if beam[0][-1] == EOS_TOKEN_ID and not params.ignore_eos]
        rest = [beam for beam in new if beam[0][-1] != EOS_TOKEN_ID or params.ignore_eos]
        beams = sorted(rest, key=score)[: params.beam_width]
    return sorted([*done, *beams], key=score)[: params.beam_width]


def search_of(params: BeamSearchParams, num_best: int = 7, max_tokens: int = 50, **settings: Any) -> BeamSearch:
    own = SamplingParams(max_tokens=max_tokens, **settings)
    child = EngineCoreRequest("r", PROMPT, own, eos_token_ids=[EOS_TOKEN_ID], cache_salt="s", priority=3)
    return BeamSearch(ProcessedRequest("ab", PROMPT, own, [child]), params, TEXTS, num_best=num_best)


def answer(request: ProcessedRequest, seed: int, coarse: bool) -> RequestOutput:
    (child,) = request.children
    assert (child.cache_salt, child.priority, child.params.max_tokens) == ("s", 3, len(child.output_token_ids) + 1)
    values = logprobs_after(tuple(child.output_token_ids), seed, coarse)
    best = sorted(values, key=lambda t: (-values[t], t))[: child.params.logprobs]
    entries = {t: Logprob(values[t], rank, "") for rank, t in enumerate(best, 1)}
    choice = CompletionOutput(0, "", [*child.output_token_ids, best[0]], logprobs=[entries], finish_reason="length")
    return RequestOutput(child.request_id, None, PROMPT, [choice], True, num_cached_tokens=len(child.output_token_ids))


def run(search: BeamSearch, seed: int, coarse: bool) -> None:
    seen: set[str] = set()
    while not search.done:
        requests = search.requests()
        assert len(requests) == search.num_beams
        ids = {request.children[0].request_id for request in requests}
        assert len(ids) == len(requests) and not ids & seen
        seen |= ids
        search.accept([answer(request, seed, coarse) for request in requests])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("coarse", [False, True])
def test_it_is_the_naive_search(seed: int, coarse: bool) -> None:
    rng = random.Random(seed)
    width = rng.randint(1, 4)
    params = BeamSearchParams(
        width, rng.randint(1, 5), ignore_eos=seed % 3 == 0, length_penalty=rng.choice([1.0, 0.0, 2.5, -1.0])
    )
    search = search_of(params, num_best=min(2 * width, len(VOCAB)))
    run(search, seed, coarse)
    expected = naive(params, seed, coarse)
    assert [(tuple(s.tokens[len(PROMPT) :]), s.cum_logprob) for s in search.sequences()] == expected
    for sequence in search.sequences():
        output = sequence.tokens[len(PROMPT) :]
        assert [next(iter(at)) for at in sequence.logprobs] == output
        assert sum(at[token].logprob for at, token in zip(sequence.logprobs, output, strict=True)) == pytest.approx(
            sequence.cum_logprob
        )
        stopped = output[-1] == EOS_TOKEN_ID and not params.ignore_eos
        assert (sequence.finish_reason, sequence.stop_reason) == (
            ("stop", EOS_TOKEN_ID) if stopped else ("length", None)
        )
        assert sequence.tokens[:2] == PROMPT and sequence.text.startswith("ab")


def test_text_with_and_without_eos() -> None:
    for include in (False, True):
        search = search_of(BeamSearchParams(2, 3, include_stop_str_in_output=include))
        run(search, 3, False)
        for choice in search.choices(with_logprobs=False):
            ids = choice.token_ids
            ended = ids[-1] == EOS_TOKEN_ID
            text = TEXTS.tokenizer.decode(ids[:-1] if ended else ids)
            assert choice.text == text + ("<s1>" if ended and include else "")
            assert choice.logprobs is None and choice.cumulative_logprob is None
    assert any(s.finish_reason == "stop" for s in search.sequences())


def test_the_context_cuts_the_search() -> None:
    search = search_of(BeamSearchParams(2, 30, ignore_eos=True), max_tokens=3)
    run(search, 1, False)
    assert {len(s.logprobs) for s in search.sequences()} == {3}


def test_one_that_is_ended_early_has_what_it_had() -> None:
    search = search_of(BeamSearchParams(2, 9, ignore_eos=True))
    search.accept([answer(request, 1, False) for request in search.requests()])
    outputs = [answer(request, 1, False) for request in search.requests()]
    outputs[1].outputs[0] = CompletionOutput(0, "", [], logprobs=[], finish_reason="abort", stop_reason="timeout")
    search.accept(outputs)
    assert search.done
    assert [(len(s.logprobs), s.finish_reason, s.stop_reason) for s in search.sequences()] == [
        (1, "abort", "timeout")
    ] * 2


BAD: list[tuple[str, dict[str, Any]]] = [
    *[("beam_width", {"beam_width": value}) for value in (0, -1, 1.5, True, "2", 2**63)],
    *[("max_tokens", {"max_tokens": value}) for value in (0, None, 2.0)],
    *[("length_penalty", {"length_penalty": value}) for value in (float("nan"), float("inf"), 65, "1", True)],
    *[("temperature", {"temperature": value}) for value in (-0.1, float("nan"))],
]


@pytest.mark.parametrize(("field", "values"), BAD)
def test_bad_settings_are_named(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2} | values)
    assert (caught.value.param, caught.value.status) == (field, 400)
