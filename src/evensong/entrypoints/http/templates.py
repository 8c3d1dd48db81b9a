"""Conversations to prompts for every route that takes messages: by the server's chat template or the request's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from evensong.engine.frontend.chat_template import ChatTemplate
from evensong.engine.frontend.chat_tools import Tool
from evensong.engine.frontend.foreign_template import TemplateOrder
from evensong.entrypoints.http.parsers.formats import ToolFormat
from evensong.entrypoints.http.schemas import ChatForm, TokenizeForm
from evensong.entrypoints.http.state import ServerState
from evensong.protocol.errors import RequestError


async def render_prompt(
    state: ServerState,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    form: ChatForm | TokenizeForm,
    tools: Sequence[Tool],
    style: ToolFormat,
) -> str:
    """The prompt that `form` asks for. Raises RequestError for what the template, or the server, does not take."""
    options: dict[str, Any] = {
        "add_generation_prompt": form.add_generation_prompt,
        "continue_final_message": bool(form.continue_final_message),
        "documents": form.documents,
        "kwargs": form.chat_template_kwargs,
        "tools": [tool.shown() for tool in tools],
        "tool_style": {"begin": style.begin, "end": style.end},
        "reasoning_effort": form.reasoning_effort,
    }
    if form.chat_template is None:
        return await asyncio.to_thread(template.render, messages, **options)
    if not state.server_config.trust_request_chat_template:
        raise RequestError(
            "this server takes no chat_template from requests (--trust-request-chat-template is not set)",
            param="chat_template",
        )
    order = TemplateOrder(form.chat_template, template.special_tokens, messages, options)
    return await state.foreign_templates.render(order)
