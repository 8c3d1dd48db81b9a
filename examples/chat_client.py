"""Chat with a running server through the official client: make serve, then python examples/chat_client.py."""

from __future__ import annotations

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="none")
messages = [{"role": "user", "content": "Name three colours of autumn leaves."}]

stream = client.chat.completions.create(model="demo", messages=messages, max_tokens=64, stream=True)
seed = None
for chunk in stream:
    seed = seed or (chunk.model_extra or {}).get("seed")
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print(f"\nseed {seed}: sent again with it, the answer is the same:")
again = client.chat.completions.create(model="demo", messages=messages, max_tokens=64, seed=seed)
print(again.choices[0].message.content)
