"""Models with windows through a whole engine: what start-up makes of a small pool, and the same bytes in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evensong.config.resolve import EngineArgs
from evensong.engine.llm_engine import LLMEngine
from evensong.protocol.errors import ConfigError, RequestError
from evensong.protocol.sampling_params import RequestOutputKind, SamplingParams
from evensong.testing.tiny_models import TinyLlama, write_tiny_llama

PROMPTS = ["x" * 200 + "abcdefgh" * 30, "hgfedcba" * 30 + "y" * 200, "x" * 200 + "abcdefgh" * 25]


def engine(model: Path, **settings: Any) -> LLMEngine:
    args = EngineArgs(str(model), log_level="warning", device="cpu", **settings)
    return LLMEngine.from_engine_args(args, multiprocess=False)


def answers(made: LLMEngine) -> dict[str, list[int]]:
    """Token ids by request, all computed together."""
    found: dict[str, list[int]] = {}
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, output_kind=RequestOutputKind.FINAL_ONLY)
    try:
        for index, prompt in enumerate(PROMPTS):
            made.add_request(str(index), prompt, params)
        while made.has_unfinished_requests():
            for output in made.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
        assert made.call_verb("check_kv_cache")["owned"] == 0
    finally:
        made.shutdown()
    return found


def test_requests_may_be_longer_than_a_pool_of_windows(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path, TinyLlama(window=32, max_position_embeddings=600))
    roomy = answers(engine(model, max_num_batched_tokens=600, enable_prefix_caching=False))
    # Ten blocks of 16 tokens, for requests of more than 400.
    small = answers(engine(model, max_num_batched_tokens=32, num_kv_blocks_override=10))
    assert small == roomy and len(roomy) == 3 and all(roomy.values())


def test_a_hybrid_in_a_small_pool_answers_or_refuses_with_the_figures(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path, TinyLlama(window=32, layers_with_window=(1,), max_position_embeddings=600))
    roomy = answers(engine(model, max_num_batched_tokens=600, enable_prefix_caching=False))
    # 30 blocks for the layer that sees all, at most 5 for the window.
    assert answers(engine(model, max_num_batched_tokens=32, num_kv_blocks_override=35)) == roomy
    with pytest.raises(ConfigError, match=r"max_model_len 600 needs .* at most 480 tokens fit.*batched-tokens"):
        engine(model, max_num_batched_tokens=32, num_kv_blocks_override=35, max_model_len=600)
    small = engine(model, max_num_batched_tokens=32, num_kv_blocks_override=20)
    try:
        with pytest.raises(RequestError, match="440 tokens.*max_model_len 240"):
            small.add_request("r", PROMPTS[0], SamplingParams(max_tokens=4))
    finally:
        small.shutdown()
