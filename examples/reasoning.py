"""Reasoning apart from the answer: evensong serve demo --reasoning-parser qwen3, then python examples/reasoning.py.

The demo model does not reason by itself, so a regular expression makes it write what a reasoning model would.
"""

from __future__ import annotations

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
pattern = r"<think>\n[A-Z][a-z ,]{20,60}\.\n</think>\n\n[A-Z][a-z ]{3,30}\."
stream = client.chat.completions.create(
    model="demo",
    messages=[{"role": "user", "content": "What is the largest animal?"}],
    temperature=0,
    max_tokens=100,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"structured_outputs": {"regex": pattern, "enable_in_reasoning": True}},
)
for chunk in stream:
    for choice in chunk.choices:
        thought = (choice.delta.model_extra or {}).get("reasoning")
        if thought:
            print(f"[{thought}]", end="", flush=True)
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.completion_tokens_details.reasoning_tokens} of {chunk.usage.completion_tokens} tokens")
