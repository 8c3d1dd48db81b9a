"""What a user may send, what is refused and in which words, and what a core gets."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tokenizers import processors

from evensong.engine.frontend.input_processor import InputProcessor, ProcessedRequest, child_seed
from evensong.protocol.errors import RequestError
from evensong.protocol.sampling_params import INT64_MAX, INT64_MIN, SamplingParams
from evensong.testing.byte_tokenizer import EOS_TOKEN_ID, byte_ids, byte_tokenizer
from evensong.testing.fake_client import fake_resources
from evensong.testing.fake_executor import VOCAB_SIZE

SURROGATE = "a\ud83db"


def processor(max_model_len: int = 64, *, bos: bool = False, **options: Any) -> InputProcessor:
    tokenizer = byte_tokenizer()
    if bos:
        tokenizer.backend.post_processor = processors.TemplateProcessing(
            single="<s0>:0 $A:0", pair="<s0>:0 $A:0 $B:1", special_tokens=[("<s0>", 0)]
        )
    settings = {"eos_token_ids": (EOS_TOKEN_ID,), "max_logprobs": 5, "max_n": 8} | options
    return InputProcessor(tokenizer, fake_resources(max_model_len), **settings)


def process(prompt: Any, params: SamplingParams | None = None, **options: Any) -> ProcessedRequest:
    return processor().process("r", prompt, params or SamplingParams(), **options)


class TestPrompts:
    @pytest.mark.parametrize(
        "prompt",
        ["hi", byte_ids("hi"), tuple(byte_ids("hi")), {"prompt": "hi"}, {"prompt_token_ids": byte_ids("hi")}],
    )
    def test_forms(self, prompt: Any) -> None:
        processed = process(prompt)
        assert processed.prompt_token_ids == byte_ids("hi")
        assert processed.children[0].prompt_token_ids == byte_ids("hi")
        has_text = isinstance(prompt, str) or (isinstance(prompt, dict) and "prompt" in prompt)
        assert processed.prompt == ("hi" if has_text else None)

    @pytest.mark.parametrize("bos", [False, True])
    @pytest.mark.parametrize("prompt", ["", [], (), {"prompt": ""}, {"prompt_token_ids": []}])
    def test_empty_prompts(self, prompt: Any, bos: bool) -> None:
        with pytest.raises(RequestError, match="empty") as caught:
            processor(bos=bos).process("r", prompt, SamplingParams())
        assert (caught.value.param, caught.value.status) == ("prompt", 400)

    @pytest.mark.parametrize("bad", [VOCAB_SIZE, -1, 2**31, 2**63, 10**40, True, 1.0, "1", None, [1]])
    def test_token_ids_outside_the_vocabulary(self, bad: Any) -> None:
        with pytest.raises(RequestError, match="prompt") as caught:
            process([20, bad, 21])
        assert caught.value.param == "prompt"
        assert len(caught.value.message) < 200

    @pytest.mark.parametrize("prompt", [None, 3, 3.5, {"prompt": None}, {}, {"text": "x"}, {"prompt": 3}, b"x"])
    def test_other_things(self, prompt: Any) -> None:
        with pytest.raises(RequestError) as caught:
            process(prompt)
        assert caught.value.param == "prompt"

    @pytest.mark.parametrize("prompt", [SURROGATE, {"prompt": SURROGATE}])
    def test_lone_surrogates(self, prompt: Any) -> None:
        with pytest.raises(RequestError, match="surrogate"):
            process(prompt)

    def test_bos_is_added_to_texts_unless_told(self) -> None:
        inputs = processor(bos=True)
        assert inputs.process("r", "hi", SamplingParams()).prompt_token_ids == [0, *byte_ids("hi")]
        plain = inputs.process("r", "hi", SamplingParams(), add_special_tokens=False)
        assert plain.prompt_token_ids == byte_ids("hi")

    def test_cache_salt(self) -> None:
        assert process({"prompt": "x", "cache_salt": "s"}).children[0].cache_salt == "s"
        assert process("x", cache_salt="t").children[0].cache_salt == "t"
        for bad in (SURROGATE, 3):
            with pytest.raises(RequestError) as caught:
                process("x", cache_salt=bad)  # type: ignore[arg-type]
            assert caught.value.param == "cache_salt"

    @pytest.mark.parametrize("bad", [SURROGATE, 7])
    def test_request_id(self, bad: Any) -> None:
        with pytest.raises(RequestError) as caught:
            processor().process(bad, "x", SamplingParams())
        assert caught.value.param == "request_id"


class TestLengths:
    def test_the_prompt_leaves_room_for_one_token(self) -> None:
        assert process("x" * 63).params.max_tokens == 1
        for prompt in ("x" * 64, [20] * 64):
            with pytest.raises(RequestError, match="64 tokens.*max_model_len 64") as caught:
                process(prompt)
            assert caught.value.code == "context_length_exceeded"

    @pytest.mark.parametrize(("asked", "resolved"), [(None, 54), (16, 16), (54, 54), (55, 54), (10**9, 54)])
    def test_max_tokens(self, asked: int | None, resolved: int) -> None:
        processed = process("x" * 10, SamplingParams(max_tokens=asked))
        assert processed.params.max_tokens == processed.children[0].params.max_tokens == resolved

    def test_min_tokens_that_cannot_fit(self) -> None:
        with pytest.raises(RequestError, match="room for 54") as caught:
            process("x" * 10, SamplingParams(max_tokens=None, min_tokens=55))
        assert caught.value.param == "min_tokens"

    @pytest.mark.parametrize("prompt", ["x" * 20_000_000, [20] * 5_000_000, [-1] * 5_000_000])
    def test_huge_prompts_are_refused_before_they_are_read(self, prompt: Any) -> None:
        start = time.perf_counter()
        with pytest.raises(RequestError, match="max_model_len"):
            process(prompt)
        assert time.perf_counter() - start < 0.1

    def test_a_text_that_could_fit_is_tokenized(self) -> None:
        inputs = processor()
        longest = "x" * (64 * inputs.tokenizer.max_token_chars)
        with pytest.raises(RequestError, match="tokens"):
            inputs.process("r", longest, SamplingParams())


class TestParams:
    @pytest.mark.parametrize(
        ("params", "field"),
        [
            ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
            ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
            ({"allowed_token_ids": [5, VOCAB_SIZE]}, "allowed_token_ids"),
            ({"allowed_token_ids": [byte_ids("a")[0]], "bad_words": ["a"]}, "allowed_token_ids"),
            ({"allowed_token_ids": [EOS_TOKEN_ID, 7], "stop_token_ids": [7], "min_tokens": 1}, "allowed_token_ids"),
            ({"logprobs": 6}, "logprobs"),
            ({"prompt_logprobs": 6}, "prompt_logprobs"),
            ({"n": 9}, "n"),
            ({"n": 10**6}, "n"),
        ],
    )
    def test_what_needs_the_model(self, params: dict[str, Any], field: str) -> None:
        start = time.perf_counter()
        with pytest.raises(RequestError) as caught:
            process("x", SamplingParams(**params))
        assert caught.value.param == field
        assert time.perf_counter() - start < 1.0  # no work that grows with the number

    def test_allowed_ids_are_made_a_set(self) -> None:
        processed = process("x", SamplingParams(allowed_token_ids=[9, 5, 9], n=2))
        assert [child.params.allowed_token_ids for child in processed.children] == [[5, 9]] * 2

    def test_an_end_may_be_all_that_is_allowed(self) -> None:
        process("x", SamplingParams(allowed_token_ids=[EOS_TOKEN_ID]))
        process("x", SamplingParams(allowed_token_ids=[EOS_TOKEN_ID], min_tokens=1, ignore_eos=True))

    def test_bad_words_become_the_tokens_of_both_spellings(self) -> None:
        (child,) = process("x", SamplingParams(bad_words=["ab", " c", "c"])).children
        words = ["ab", " ab", "c", " c"]
        assert child.params.bad_words_token_ids == [byte_ids(word) for word in words]

    def test_token_ids_of_bad_words_are_not_the_users(self) -> None:
        assert process("x", SamplingParams(bad_words_token_ids=[[3]])).params.bad_words_token_ids is None

    def test_ids_of_padding_rows_cannot_be_named(self) -> None:
        inputs = processor()
        inputs.rules.num_token_ids = 500
        for params in (SamplingParams(logit_bias={500: 1}), SamplingParams(stop_token_ids=[500])):
            with pytest.raises(RequestError, match="0 to 499"):
                inputs.process("r", "x", params)

    @pytest.mark.parametrize(("keep", "kept"), [(3, 3), (63, 63), (200, 200), (-1, 47)])
    @pytest.mark.parametrize("as_text", [True, False])
    def test_a_truncated_prompt_keeps_its_end(self, keep: int, kept: int, as_text: bool) -> None:
        text = "abcdefghij" * 30
        inputs = processor(max_model_len=63 if keep == -1 else 256)
        prompt = text if as_text else byte_ids(text)
        processed = inputs.process("r", prompt, SamplingParams(truncate_prompt_tokens=keep, max_tokens=16))
        assert processed.prompt_token_ids == byte_ids(text)[-kept:]
        assert processed.params.max_tokens == min(16, inputs.max_model_len - kept)
        short = inputs.process("r", "ab", SamplingParams(truncate_prompt_tokens=keep, max_tokens=16))
        assert short.prompt_token_ids == byte_ids("ab")

    def test_truncation_beyond_the_model(self) -> None:
        with pytest.raises(RequestError, match="max_model_len 64") as caught:
            process("x", SamplingParams(truncate_prompt_tokens=65))
        assert caught.value.param == "truncate_prompt_tokens"
        with pytest.raises(RequestError, match="64 tokens"):
            process("x" * 100, SamplingParams(truncate_prompt_tokens=64))
        whole = process("x" * 100, SamplingParams(truncate_prompt_tokens=-1, max_tokens=None))
        assert len(whole.prompt_token_ids) == 63

    @pytest.mark.parametrize("bad", [True, 1.5, "1", None, 2**63])
    def test_priority(self, bad: Any) -> None:
        with pytest.raises(RequestError) as caught:
            process("x", priority=bad)
        assert caught.value.param == "priority"
        assert process("x", priority=-7).children[0].priority == -7

    def test_fields_set_after_construction_are_checked(self) -> None:
        params = SamplingParams()
        params.temperature = float("nan")
        with pytest.raises(RequestError, match="temperature"):
            process("x", params)

    @pytest.mark.parametrize("params", [None, {"n": 1}, 3])
    def test_not_params(self, params: Any) -> None:
        with pytest.raises(RequestError, match="SamplingParams"):
            processor().process("r", "x", params)

    def test_the_users_params_are_left_alone(self) -> None:
        params = SamplingParams(max_tokens=None)
        process("x", params)
        assert (params.max_tokens, params.seed) == (None, None)


class TestChildren:
    def test_one_choice(self) -> None:
        child = process("x", SamplingParams(seed=7)).children[0]
        assert child.params.seed == 7
        assert child.request_id.startswith("r-")
        assert child.eos_token_ids == [EOS_TOKEN_ID]
        assert abs(child.arrival_time - time.time()) < 5

    def test_ids_are_unique_though_the_users_are_not(self) -> None:
        inputs = processor()
        ids = [c.request_id for _ in range(50) for c in inputs.process("r", "x", SamplingParams(n=4)).children]
        assert len(set(ids)) == 200

    def test_a_seed_is_drawn_and_is_an_int64(self) -> None:
        seeds = {process("x").params.seed for _ in range(50)}
        assert len(seeds) == 50
        assert all(seed is not None and INT64_MIN <= seed <= INT64_MAX for seed in seeds)
        assert any(seed is not None and seed < 0 for seed in seeds)

    def test_the_engine_seed_fixes_the_series_and_nothing_else(self) -> None:
        def series(seed: int, prompt: str) -> list[int | None]:
            own = processor(seed=seed)
            return [own.process(f"{prompt}{n}", prompt, SamplingParams()).params.seed for n in range(3)]

        assert series(5, "a") == series(5, "b") != series(6, "a")
        assert len(set(series(5, "a"))) == 3
        assert processor(seed=5).process("r", "a", SamplingParams(seed=9)).params.seed == 9

    @pytest.mark.parametrize("seed", [0, 1, -1, INT64_MAX, INT64_MIN])
    def test_each_choice_can_be_had_alone(self, seed: int) -> None:
        children = process("x", SamplingParams(n=8, seed=seed)).children
        seeds = [child.params.seed for child in children]
        assert seeds[0] == seed
        assert len(set(seeds)) == 8
        for child in children:
            assert child.params.n == 1
            assert child.params.seed is not None and INT64_MIN <= child.params.seed <= INT64_MAX
            alone = process("x", SamplingParams(seed=child.params.seed)).children[0]
            assert alone.params.seed == child.params.seed

    def test_splitmix64(self) -> None:
        """The generator's published outputs from state 0, as int64."""
        known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
        assert [child_seed(0, index) % 2**64 for index in (1, 2, 3)] == known
