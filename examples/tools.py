"""Tools with a running server: make serve, then python examples/tools.py. Arguments always match their schema."""

from __future__ import annotations

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
messages = [{"role": "user", "content": "How warm is it in Oslo, in celsius?"}]

# Required: the model has to call; without parallel_tool_calls it does so once.
called = client.chat.completions.create(
    model="demo", messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=0
)
message = called.choices[0].message
for call in message.tool_calls:
    print(called.choices[0].finish_reason, call.function.name, json.loads(call.function.arguments))

# The result goes back, and the model answers in words.
messages += [message.model_dump(exclude_none=True)]
messages += [{"role": "tool", "tool_call_id": call.id, "content": "7 degrees"} for call in message.tool_calls]
said = client.chat.completions.create(model="demo", messages=messages, tools=tools, tool_choice="none", max_tokens=48)
print(said.choices[0].message.content)

# Streamed: name and id first, then the arguments as they are written.
named = {"type": "function", "function": {"name": "get_weather"}}
stream = client.chat.completions.create(
    model="demo", messages=messages[:1], tools=tools, tool_choice=named, temperature=0, stream=True
)
for chunk in stream:
    for part in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
        print(part.function.name or "", part.function.arguments, sep="", end="|", flush=True)
print()
