"""A turn of a conversation: from a ChatForm to a job of the engine, and to the parsers of what it says.

Every route that takes messages brings its body into a ChatForm first.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request

from evensong.engine.async_llm import AsyncLLM
from evensong.engine.frontend.reasoning import REASONING_FORMATS, Phase, ReasoningFormat
from evensong.entrypoints.http.beam_search import check_beam_fields, make_job
from evensong.entrypoints.http.forms_out import Usage
from evensong.entrypoints.http.generation import Job
from evensong.entrypoints.http.parsers.base import ChoiceParser
from evensong.entrypoints.http.parsers.choose import tool_format
from evensong.entrypoints.http.parsers.formats import ToolFormat
from evensong.entrypoints.http.parsers.reasoning import ReasoningParser, ReasoningTokens
from evensong.entrypoints.http.parsers.tools import ToolParser
from evensong.entrypoints.http.schemas import ChatForm
from evensong.entrypoints.http.service import service_options
from evensong.entrypoints.http.state import ServerState
from evensong.entrypoints.http.templates import render_prompt
from evensong.entrypoints.http.tool_choice import ToolUse, tool_use
from evensong.protocol.errors import RequestError
from evensong.protocol.request_output import CompletionOutput
from evensong.protocol.sampling_params import SamplingParams


@dataclass(frozen=True)
class Turn:
    """One request for the assistant's next message, checked; its job has not been started.

    Where the server knows how its model reasons, the output begins in `phase`.
    """

    form: ChatForm
    job: Job
    prompt: str
    tools: ToolUse
    tool_format: ToolFormat
    reasoning: ReasoningFormat | None
    phase: Phase

    def parser(self, index: int) -> ChoiceParser:
        """A new parser for choice `index`."""
        reasoning = None if self.reasoning is None else ReasoningParser(self.reasoning, self.phase)
        tools = None
        if self.tools.callable:
            make_id = partial(self.tool_format.call_id, self.prompt, index)
            tools = ToolParser(self.tool_format, self.tools.names, make_id)
        return ChoiceParser(reasoning, tools, include_reasoning=self.form.include_reasoning is not False)

    def finish_reason(self, reason: str | None, parser: ChoiceParser) -> str | None:
        """The API's reason: a choice that called a tool of its own accord, or since it had to call some tool, says so.

        Where the request names the tool OpenAI says "stop".
        """
        return "tool_calls" if reason == "stop" and parser.called and self.tools.mode != "named" else reason

    def usage(self) -> Usage:
        """Nothing used yet; where the model reasons, the tokens of that are counted apart."""
        reasoning, texts = self.reasoning, self.job.engine.front.texts
        if reasoning is None:
            return Usage()
        counters: dict[int, ReasoningTokens] = {}

        def count(choice: CompletionOutput) -> int:
            counter = counters.setdefault(choice.index, ReasoningTokens(reasoning, self.phase, texts))
            return counter.add(choice.token_ids)

        return Usage(count)


async def prepare_turn(request: Request, state: ServerState, form: ChatForm, request_id: str) -> Turn:
    """The turn that `form` asks for. Raises RequestError naming what cannot be."""
    engine = state.require_engine(form.model)
    check_beam_fields(form)
    defaults = engine.front.sampling_defaults
    params = await form.resolve(
        defaults,
        max_tokens=form.most_tokens(defaults),
        logprobs=form.num_logprobs(),
        prompt_logprobs=form.prompt_logprobs,
    )
    tools = await asyncio.to_thread(tool_use, form) if form.tools else tool_use(form)
    if tools.mode == "auto" and not state.server_config.enable_auto_tool_choice:
        raise RequestError("this server takes no tools with tool_choice auto", param="tool_choice")
    style = tool_format(state.server_config.tool_call_parser, engine.get_tokenizer().chat_template)
    grammar_of = _constrain(params, tools, style) or form.grammar_of
    prompt = await render_prompt(state, engine.front.inputs.chat_template, form.messages, form, tools.tools, style)
    reasoning = REASONING_FORMATS.get(engine.config.model.reasoning_parser or "")
    phase: Phase = "done" if reasoning is None else reasoning.phase(prompt, _continued(form))
    options: dict[str, Any] = {
        # The template writes the special tokens itself, unless the caller knows better.
        "add_special_tokens": bool(form.add_special_tokens),
        "cache_salt": form.cache_salt,
        "phase": phase,
        "shown_token_ids": _shown(engine, style if tools.callable else None, reasoning),
        **service_options(request, form, engine.config.scheduler.fair_share),
    }
    if form.use_beam_search and params.structured_outputs is not None:
        raise RequestError("tool_choice cannot be used with use_beam_search", param="tool_choice")
    job = make_job(form, engine, form.request_id or request_id, [prompt], params, options)
    job.grammar_of = grammar_of
    return Turn(form, job, prompt, tools, style, reasoning, phase)


def _constrain(params: SamplingParams, tools: ToolUse, style: ToolFormat) -> str | None:
    """Sets what the output must look like; the field that says so, where it is the tools.

    Raises RequestError where another field says something else.
    """
    if params.structured_outputs is None:
        params.structured_outputs = tools.grammar(style)
        return None if params.structured_outputs is None else "tools"
    if tools.must_call:
        raise RequestError(
            "tool_choice says that the answer is a call; response_format and structured_outputs say something else",
            param="tool_choice",
        )
    return None


def _shown(engine: AsyncLLM, style: ToolFormat | None, reasoning: ReasoningFormat | None) -> frozenset[int]:
    """Special tokens that the parsers must see in the text."""
    markers = () if style is None else style.markers
    if reasoning is not None:
        markers = (*markers, reasoning.start_marker, reasoning.end_marker)
    tokenizer = engine.get_tokenizer()
    ids = (tokenizer.token_to_id(marker) for marker in markers)
    return frozenset(token_id for token_id in ids if token_id in tokenizer.special_ids)


def _continued(form: ChatForm) -> str:
    """The text of a final message that goes on."""
    content = form.messages[-1].get("content") if form.continue_final_message else None
    return content if isinstance(content, str) else ""
