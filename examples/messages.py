"""Anthropic's Messages API of a running server: make serve, then python examples/messages.py [URL]."""

from __future__ import annotations

import sys

from anthropic import Anthropic

url = (sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000").removesuffix("/v1")
client = Anthropic(base_url=url, api_key="none")
question = {"role": "user", "content": "What is the weather in Paris?"}
tool = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}

asked = client.messages.create(
    model="demo",
    max_tokens=200,
    messages=[question],
    tools=[tool],
    tool_choice={"type": "any", "disable_parallel_tool_use": True},
)
call = asked.content[-1]
print(f"{asked.stop_reason}: {call.name} {call.input}")

result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees, sunny"}
with client.messages.stream(
    model="demo",
    max_tokens=64,
    system="Answer in one sentence.",
    messages=[question, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}],
    tools=[tool],
    tool_choice={"type": "none"},
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
    usage = stream.get_final_message().usage
print(f"\n{usage.input_tokens} + {usage.cache_read_input_tokens} cached tokens in, {usage.output_tokens} out")
