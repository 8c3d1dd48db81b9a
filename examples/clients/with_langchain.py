"""LangChain's OpenAI chat and completion models. python with_langchain.py [URL]"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["langchain-openai==1.7.4"]
# ///

from __future__ import annotations

import json
import sys
import urllib.request

from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
with urllib.request.urlopen(f"{url}/models") as response:
    name = json.load(response)["data"][0]["id"]

chat = ChatOpenAI(base_url=url, api_key="none", model=name, temperature=0, max_tokens=24, stream_usage=True)
messages = [SystemMessage("You are brief."), HumanMessage("Name three colours of autumn leaves.")]
answer = chat.invoke(messages)
print("invoke:", answer.content)
assert answer.usage_metadata["output_tokens"] > 0 and answer.response_metadata["finish_reason"] in ("stop", "length")

whole: AIMessageChunk | None = None
for chunk in chat.stream(messages):
    whole = chunk if whole is None else whole + chunk
assert whole is not None and whole.content == answer.content
assert whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]
print("stream: the same text and usage")

chain = ChatPromptTemplate.from_messages([("human", "One word for {thing}:")]) | chat
texts = [message.content for message in chain.batch([{"thing": "snow"}, {"thing": "rain"}])]
assert len(texts) == 2
with_logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(messages)
assert len(with_logprobs.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2
print("chain, batch, logprobs: as asked")

completion = OpenAI(base_url=url, api_key="none", model=name, temperature=0, max_tokens=8)
print("completion:", completion.invoke("The sea is"))
