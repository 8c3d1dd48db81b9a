"""Grids of ranks with the real model: what may not change the bytes does not, whatever the requests ask for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evensong.entrypoints.llm import LLM
from evensong.protocol.errors import ConfigError
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.structured import StructuredOutputsParams
from tests.engine.launching import children, eventually

SETTINGS: dict[str, Any] = {
    "max_num_batched_tokens": 96,
    "max_model_len": 320,
    "max_num_seqs": 8,
    "disable_log_stats": True,
}
PLENTY, SCARCE = {"num_kv_blocks_override": 200}, {"num_kv_blocks_override": 24}
# Each request's parameters; together they use native draws, draws in Python, masks, scores and stops.
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.8, "seed": 1, "logprobs": 2, "n": 3},
    {"temperature": 0.9, "seed": 2, "top_p": 0.9, "top_k": 40},
    {"temperature": 0, "prompt_logprobs": 2},
    {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "logprobs": 1},
    {"temperature": 0, "logit_bias": {260: 5.0}, "frequency_penalty": 0.5},
    {"temperature": 0, "structured_outputs": StructuredOutputsParams(regex="(red|green|blue)( and (red|green|blue))*")},
    {"temperature": 0.9, "seed": 4, "structured_outputs": StructuredOutputsParams(choice=["yes", "no", "perhaps"])},
    {"temperature": 0, "stop": ["."]},
    {"temperature": 0.8, "seed": 5, "min_tokens": 12, "ignore_eos": True},
]
PROMPTS = ["Once upon a time, in a village by the sea,", "The history of the city begins", "A list of colours: "]
LONG = " ".join(PROMPTS) * 6


@pytest.fixture(scope="module", autouse=True)
def nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    base = tmp_path_factory.mktemp("s")
    before = set(children())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(base))
        patch.setenv("EVENSONG_CHECK_KV", "1")
        yield
    assert eventually(lambda: not set(children()) - before), "a process is left"
    assert eventually(lambda: not any(base.iterdir())), f"folders are left: {list(base.iterdir())}"


def answers(model: Path, **settings: Any) -> list[Any]:
    """Everything that a client sees of each request: tokens, log-probabilities, ends."""
    prompts = [LONG if index == 3 else PROMPTS[index % 3] for index in range(len(PARAMS))]
    params = [SamplingParams(**{"max_tokens": 24 + 3 * index, **own}) for index, own in enumerate(PARAMS)]
    with LLM(str(model), **SETTINGS, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        # A second time: prefixes come from the cache.
        outputs += llm.generate(prompts, params, use_tqdm=False)
    return [
        [
            (choice.token_ids, choice.text, choice.logprobs, choice.cumulative_logprob, choice.finish_reason)
            for choice in output.outputs
        ]
        + [output.prompt_logprobs]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def alone(demo_model: Path) -> list[Any]:
    return answers(demo_model, **PLENTY, async_scheduling=False, distributed_executor_backend="uni")


@pytest.mark.parametrize(
    "settings",
    [
        {"distributed_executor_backend": "uni"},
        {"distributed_executor_backend": "mp"},
        {"distributed_executor_backend": "mp", "async_scheduling": False},
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "async_scheduling": False},
        {"pipeline_parallel_size": 2, "enforce_eager": True},
        {"pipeline_parallel_size": 3, "pipeline_layers": "4,25,1"},
    ],
    ids=str,
)
@pytest.mark.parametrize("pool", [PLENTY, SCARCE], ids=["plenty", "scarce"])
def test_processes_stages_and_planning_ahead_change_no_byte(
    demo_model: Path, alone: list[Any], settings: dict[str, Any], pool: dict[str, int]
) -> None:
    assert answers(demo_model, **{**pool, **settings}) == alone


@pytest.fixture(scope="module")
def two_parts(demo_model: Path) -> list[Any]:
    return answers(demo_model, **PLENTY, tensor_parallel_size=2, async_scheduling=False)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        SCARCE,
        {"pipeline_parallel_size": 2},
        {"enforce_eager": True},
    ],
    ids=str,
)
def test_parts_have_bytes_of_their_own_which_stay(
    demo_model: Path, two_parts: list[Any], settings: dict[str, Any]
) -> None:
    assert answers(demo_model, **{**PLENTY, **settings}, tensor_parallel_size=2) == two_parts


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tensor_parallel_size": 10}, "tensor-parallel-size 10 cannot be served: .* so 1 to 9 can"),
        ({"pipeline_parallel_size": 31}, "so 1 to 30 can"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "18,13"}, "has 31 layers; the model has 30"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "2 ranks need mp"),
    ],
)
def test_grids_that_cannot_be(demo_model: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(str(demo_model), **SETTINGS, **settings)
