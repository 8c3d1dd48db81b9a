"""A MessageForm to a ChatForm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from evensong.engine.frontend.chat_messages import MAX_MESSAGES
from evensong.entrypoints.http.messages.forms import MessageForm, PromptForm
from evensong.entrypoints.http.schemas import ChatForm
from evensong.entrypoints.http.translated import chat_form, check_form, object_at, text_of
from evensong.protocol.errors import RequestError

# The fields of a ChatForm as they are called here.
NAMES = {
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
Message = dict[str, Any]


def translate(form: PromptForm, *, reasons: bool) -> ChatForm:
    """The chat of a message; `reasons`: the server knows how its model's reasoning ends, so that it can be bounded.

    Raises RequestError naming the field of the Messages API that cannot be.
    """
    check_form(form)
    messages = _messages(form)
    fields = form.passed() | {"messages": messages}
    if messages and messages[-1]["role"] == "assistant":
        # The answer goes on where the last message ends.
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if form.tools:
        fields["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(form.tools)]
    if form.tool_choice is not None:
        fields |= _tool_choice(form.tool_choice)
    if form.thinking is not None:
        fields |= _thinking(form, reasons)
    if form.output_config is not None and form.output_config.format is not None:
        fields["response_format"] = _format(form.output_config.format)
    if isinstance(form, MessageForm):
        fields |= {"max_completion_tokens": form.max_tokens, "stop": form.stop_sequences}
    user = _user(form)
    return chat_form(fields if user is None else {**fields, "user": user}, NAMES)


def _user(form: PromptForm) -> str | None:
    metadata = (form.model_extra or {}).get("metadata")
    if metadata is None:
        return None
    user = object_at(metadata, "metadata").get("user_id")
    return None if user is None else text_of(user, "metadata.user_id")


def _messages(form: PromptForm) -> list[Message]:
    if not form.messages:
        raise RequestError("messages must not be empty", param="messages")
    if len(form.messages) > MAX_MESSAGES:
        raise RequestError(f"at most {MAX_MESSAGES} messages are allowed, got {len(form.messages)}", param="messages")
    conversation = _Conversation()
    if form.system:
        conversation.say("system", _system(form.system))
    for index, message in enumerate(form.messages):
        conversation.add(message, f"messages[{index}]")
    return conversation.ended()


def _system(system: str | list[dict[str, Any]]) -> str:
    if isinstance(system, str):
        return system
    return "\n".join(_text_block(block, f"system[{index}]") for index, block in enumerate(system))


def _text_block(block: object, where: str) -> str:
    fields = object_at(block, where)
    if fields.get("type") != "text":
        raise RequestError(
            f"{where} is a block of type {fields.get('type')!r:.60}; only text is supported here", param=where
        )
    return text_of(fields.get("text"), f"{where}.text")


class _Conversation:
    """Messages in the making. Turns of one role that follow each other are one."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._waiting: dict[str, str] = {}  # id of a tool_use without its result -> where it stands
        self._known_calls: set[str] = set()

    def add(self, message: Mapping[str, Any], where: str) -> None:
        """One message with all of its blocks."""
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"{where}.role must be user or assistant", param=f"{where}.role")
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise RequestError(f"{where}.content must be a string or a list of blocks", param=f"{where}.content")
        waiting = dict(self._waiting)
        for index, block in enumerate(content):
            self._block(role, object_at(block, f"{where}.content[{index}]"), f"{where}.content[{index}]")
        self._check_answered(waiting)

    def say(self, role: str, text: str) -> None:
        """Text of a role."""
        last = self._messages[-1] if self._messages else {}
        if last.get("role") == role and "tool_calls" not in last:
            last["content"] = f"{last['content']}\n{text}" if last["content"] else text
        else:
            self._messages.append({"role": role, "content": text})

    def ended(self) -> list[Message]:
        """All messages, once every block is there."""
        self._check_answered(self._waiting)
        return self._messages

    def _check_answered(self, waiting: Mapping[str, str]) -> None:
        """Every call must be answered in the message after it."""
        for call_id, where in waiting.items():
            if call_id in self._waiting:
                raise RequestError(
                    f"{where}: the tool_use {call_id!r:.80} has no tool_result in the message after it", param=where
                )

    def _block(self, role: str, block: Mapping[str, Any], where: str) -> None:
        kind = block.get("type")
        if kind == "text":
            self.say(role, text_of(block.get("text"), f"{where}.text"))
        elif role == "assistant" and kind == "tool_use":
            self._tool_use(block, where)
        elif role == "assistant" and kind == "thinking":
            thinking = text_of(block.get("thinking"), f"{where}.thinking")
            message = self._assistant()
            message["reasoning_content"] = message.get("reasoning_content", "") + thinking
        elif role == "user" and kind == "tool_result":
            self._tool_result(block, where)
        elif not (role == "assistant" and kind == "redacted_thinking"):
            raise RequestError(f"{where} is a block of type {kind!r:.60}, not supported for {role}", param=where)

    def _tool_use(self, block: Mapping[str, Any], where: str) -> None:
        call_id = text_of(block.get("id"), f"{where}.id")
        if call_id in self._known_calls:
            raise RequestError(f"{where}.id {call_id!r:.80} comes twice", param=f"{where}.id")
        self._known_calls.add(call_id)
        self._waiting[call_id] = where
        given = object_at(block.get("input"), f"{where}.input")
        function = {
            "name": text_of(block.get("name"), f"{where}.name"),
            "arguments": json.dumps(given, ensure_ascii=False),
        }
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _assistant(self) -> Message:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": ""})
        return self._messages[-1]

    def _tool_result(self, block: Mapping[str, Any], where: str) -> None:
        call_id = text_of(block.get("tool_use_id"), f"{where}.tool_use_id")
        if self._waiting.pop(call_id, None) is None:
            raise RequestError(
                f"{where}.tool_use_id: no tool_use {call_id!r:.80} waits for a result", param=f"{where}.tool_use_id"
            )
        content = block.get("content") or ""
        if not isinstance(content, str):
            if not isinstance(content, list):
                raise RequestError(f"{where}.content must be a string or a list of blocks", param=f"{where}.content")
            content = "\n".join(_text_block(part, f"{where}.content") for part in content)
        if block.get("is_error") is True:
            content = f"Error: {content}"
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            f"{where}.type {tool.get('type')!r:.60} is not supported: this server runs no tools, and knows only "
            "those of the caller's own",
            param=where,
        )
    function = {
        "name": text_of(tool.get("name"), f"{where}.name"),
        "parameters": object_at(tool.get("input_schema"), f"{where}.input_schema"),
    }
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    parallel = choice.get("disable_parallel_tool_use")
    if parallel is not None and not isinstance(parallel, bool):
        raise RequestError("tool_choice.disable_parallel_tool_use must be a boolean", param="tool_choice")
    fields: dict[str, Any] = {"parallel_tool_calls": not parallel}
    if kind == "tool":
        name = text_of(choice.get("name"), "tool_choice.name")
        return fields | {"tool_choice": {"type": "function", "function": {"name": name}}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestError(f"tool_choice.type must be one of {', '.join(_CHOICES)}, tool", param="tool_choice")
    return fields | {"tool_choice": _CHOICES[kind]}


def _thinking(form: PromptForm, reasons: bool) -> dict[str, Any]:
    """Whether to reason is the template's matter; for how long, the engine's, where it knows how reasoning ends."""
    thinking = form.thinking
    assert thinking is not None
    if thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise RequestError("thinking of type enabled needs budget_tokens", param="thinking")
        if isinstance(form, MessageForm) and thinking.budget_tokens >= form.max_tokens:
            raise RequestError("thinking.budget_tokens must be less than max_tokens", param="thinking")
    fields: dict[str, Any] = {}
    if reasons and thinking.type == "enabled" and form.thinking_token_budget is None:
        fields["thinking_token_budget"] = thinking.budget_tokens
    asked = {"enable_thinking": thinking.type != "disabled"}
    return fields | {"chat_template_kwargs": asked | (form.chat_template_kwargs or {})}


def _format(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        raise RequestError("output_config.format.type must be json_schema", param="output_config")
    schema = object_at(given.get("schema"), "output_config.format.schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
