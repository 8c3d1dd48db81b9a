"""A request that comes with its output so far goes on as if it had never stopped: on the real model, at every token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evensong.engine.client.inproc import InprocClient
from evensong.engine.frontend.reasoning import REASONING_FORMATS
from evensong.engine.llm_engine import LLMEngine
from evensong.protocol.output import EngineCoreOutput
from evensong.protocol.request import EngineCoreRequest
from evensong.protocol.sampling_params import SamplingParams
from tests.property.worlds import PERSON, make_engine

CUTS = range(0, 40, 3)
CASES: dict[str, dict[str, Any]] = {
    "json": {"structured_outputs": {"json": PERSON}, "temperature": 1.0},
    "regex, penalised": {
        "structured_outputs": {"regex": "[a-z ]{30,90}"},
        "temperature": 0.8,
        "repetition_penalty": 1.3,
    },
    "behind a budget of reasoning": {
        "structured_outputs": {"json": PERSON},
        "temperature": 0.9,
        "thinking_token_budget": 11,
    },
    "free, with a stop id": {"temperature": 1.0, "stop_token_ids": [260], "logprobs": 2},
}


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[LLMEngine]:
    made = make_engine({"max_num_batched_tokens": 64}, {})
    yield made
    made.shutdown()


def run(client: InprocClient, request: EngineCoreRequest) -> tuple[list[int], list[Any], EngineCoreOutput]:
    """Its new tokens with their log-probabilities, and its last output."""
    client.add_request(request)
    tokens: list[int] = []
    logprobs: list[Any] = []
    while True:
        message = client.get_output()
        for admission in message.admissions:
            assert admission.refusal is None, admission.refusal
        for output in message.outputs:
            assert output.request_id == request.request_id and output.attempt == request.attempt
            assert output.start == len(request.output_token_ids) + len(tokens)
            tokens += output.new_token_ids
            logprobs += output.new_logprobs or []
            if output.finish_reason is not None:
                return tokens, logprobs, output


@pytest.mark.parametrize("name", CASES)
def test_a_request_goes_on_where_it_stopped(name: str, engine: LLMEngine) -> None:
    client: Any = engine._client
    engine.front.inputs._reasoning = REASONING_FORMATS["deepseek_r1"] if "budget" in name else None
    params = SamplingParams(max_tokens=48, seed=9, **CASES[name])
    request = engine.front.inputs.process("whole", "A person of the village, as JSON:\n", params).children[0]
    tokens, logprobs, last = run(client, request)
    assert len(tokens) > 12
    for cut in (cut for cut in CUTS if cut < len(tokens)):
        resumed = msgspec.structs.replace(request, request_id=f"{name} {cut}", attempt=1, output_token_ids=tokens[:cut])
        rest, rest_logprobs, end = run(client, resumed)
        assert tokens[:cut] + rest == tokens, cut
        assert rest_logprobs == logprobs[cut:]
        assert (end.finish_reason, end.stop_reason) == (last.finish_reason, last.stop_reason)
