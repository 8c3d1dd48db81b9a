"""A batch of prompts without a server: python examples/offline.py [MODEL]. No main guard is needed."""

from __future__ import annotations

import sys

from evensong import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "demo")
prompts = ["The capital of France is", "Water boils at", "The opposite of cold is"]
for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
    print(repr(output.prompt), "->", repr(output.outputs[0].text))
