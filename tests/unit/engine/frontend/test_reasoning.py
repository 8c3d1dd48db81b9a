"""Whether an output begins inside reasoning, by its prompt, and what a core hears of it."""

from __future__ import annotations

from typing import Any

import pytest

from evensong.engine.frontend.input_processor import InputProcessor
from evensong.engine.frontend.reasoning import REASONING_FORMATS, Phase, ReasoningFormat
from evensong.protocol.sampling_params import SamplingParams
from evensong.protocol.structured import ReasoningSpec, StructuredOutputsParams
from evensong.testing.byte_tokenizer import byte_ids, byte_tokenizer
from evensong.testing.fake_client import fake_resources

HEAD = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "continued", "qwen3", "deepseek_r1"),
    [
        (HEAD, "", "undecided", "open"),
        (HEAD + "<think>\n", "", "open", "open"),
        (HEAD + "<think>\n\n</think>\n\n", "", "done", "done"),
        (HEAD + "Well", "Well", "done", "open"),
        (HEAD + "<think>Well", "<think>Well", "open", "open"),
        (HEAD + "<think>a</think>b", "<think>a</think>b", "done", "done"),
        (HEAD + "a</think>b", "a</think>b", "done", "done"),
        ("", "", "undecided", "open"),
    ],
)
def test_phase(prompt: str, continued: str, qwen3: str, deepseek_r1: str) -> None:
    assert REASONING_FORMATS["qwen3"].phase(prompt, continued) == qwen3
    assert REASONING_FORMATS["deepseek_r1"].phase(prompt, continued) == deepseek_r1


def test_what_a_core_is_told() -> None:
    think = ReasoningFormat("think", "<think>", "</think>")
    mark = ReasoningFormat("mark", "<s5>", "<s6>")

    def spec(form: ReasoningFormat | None, phase: Phase, **params: Any) -> ReasoningSpec | None:
        processor = InputProcessor(
            byte_tokenizer(), fake_resources(64), eos_token_ids=(1,), max_logprobs=1, reasoning=form
        )
        return processor.process("r", "hi", SamplingParams(**params), phase=phase).children[0].reasoning

    regex = StructuredOutputsParams(regex="<a")
    assert spec(think, "open") is None and spec(None, "open", structured_outputs=regex) is None
    assert spec(think, "open", structured_outputs=regex) == ReasoningSpec("</think>", byte_ids("</think>"))
    assert spec(think, "done", structured_outputs=regex) is None
    assert spec(mark, "undecided", structured_outputs=regex) == ReasoningSpec("<s6>", [6], [5])
    # Told from a grammar's own "<" by nothing: such a model does not reason.
    assert spec(think, "undecided", structured_outputs=regex) is None
    begins = ReasoningSpec("</think>", byte_ids("</think>"), byte_ids("<think>"))
    assert spec(think, "undecided", thinking_token_budget=3) == begins
