"""A turn of a conversation: from a ChatForm to a job of the engine, and to the parsers of what it says.

Every route that takes messages brings its body into a ChatForm first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from evensong.entrypoints.http.generation import Job
from evensong.entrypoints.http.parsers.base import ChoiceParser
from evensong.entrypoints.http.schemas import ChatForm
from evensong.entrypoints.http.service import service_options
from evensong.entrypoints.http.state import ServerState
from evensong.entrypoints.http.templates import render_prompt


@dataclass(frozen=True)
class Turn:
    """One request for the assistant's next message, checked; its job has not been started."""

    form: ChatForm
    job: Job
    prompt: str
    make_parser: Callable[[int], ChoiceParser]
    named_tool: bool = False

    def parser(self, index: int) -> ChoiceParser:
        """A new parser for choice `index`."""
        return self.make_parser(index)

    def finish_reason(self, reason: str | None, parser: ChoiceParser) -> str | None:
        """The API's reason: a choice that called a tool of its own accord, or since it had to call some tool, says so.

        Where the request names the tool OpenAI says "stop".
        """
        return "tool_calls" if reason == "stop" and parser.called and not self.named_tool else reason


async def prepare_turn(request: Request, state: ServerState, form: ChatForm, request_id: str) -> Turn:
    """The turn that `form` asks for. Raises RequestError naming what cannot be."""
    engine = state.require_engine(form.model)
    defaults = engine.front.sampling_defaults
    params = await form.resolve(
        defaults,
        max_tokens=form.most_tokens(defaults),
        logprobs=form.num_logprobs(),
        prompt_logprobs=form.prompt_logprobs,
    )
    prompt = await render_prompt(state, engine.front.inputs.chat_template, form.messages, form)
    options: dict[str, Any] = {
        # The template writes the special tokens itself, unless the caller knows better.
        "add_special_tokens": bool(form.add_special_tokens),
        "cache_salt": form.cache_salt,
        **service_options(request, form, engine.config.scheduler.fair_share),
    }
    job = Job(engine, form.request_id or request_id, [prompt], params, options)
    return Turn(form, job, prompt, lambda index: ChoiceParser())
