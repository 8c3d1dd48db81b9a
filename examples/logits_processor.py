"""A logits processor of one's own: python examples/logits_processor.py [MODEL].

With a server: (cd examples && evensong serve demo --logits-processors logits_processor:MostlyOneLetter), and then
"vllm_xargs": {"letter": "s"} in a request.
"""

from __future__ import annotations

import sys

import numpy as np

from evensong import LLM, LogitsProcessor, SamplingParams
from evensong.sampling.processor import ProcessorConfig, RequestView


class MostlyOneLetter(LogitsProcessor):
    """Words that begin with the letter of the request are likelier."""

    def __init__(self, config: ProcessorConfig) -> None:
        super().__init__(config)
        texts = [config.tokenizer.decode([token_id]) for token_id in range(config.num_token_ids)]
        self.first_letters = np.array([text[1:2].lower() if text[:1] == " " else "" for text in texts])

    def wanted(self, params: SamplingParams) -> bool:
        """Requests that name a letter."""
        return "letter" in (params.extra_args or {})

    def check(self, params: SamplingParams) -> None:
        """It must be one."""
        letter = (params.extra_args or {})["letter"]
        if not isinstance(letter, str) or len(letter) != 1:
            raise ValueError(f"letter must be one letter, got {letter!r:.40}")

    def apply(self, view: RequestView, logits: np.ndarray) -> None:
        """A token with a space in front begins a word."""
        logits[self.first_letters == view.extra_args["letter"].lower()] += 5.0


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    # In this process, which finds this file; a process of its own looks in its folder and in PYTHONPATH.
    with LLM(model, logits_processors=["logits_processor:MostlyOneLetter"], multiprocess=False) as llm:
        for letter in "", "s", "m":
            params = SamplingParams(temperature=0, max_tokens=16, extra_args={"letter": letter} if letter else None)
            (output,) = llm.generate("Once upon a time, a", params, use_tqdm=False)
            print(repr(letter), "->", repr(output.outputs[0].text))
