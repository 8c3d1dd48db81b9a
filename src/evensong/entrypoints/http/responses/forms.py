"""Forms of /v1/responses: what comes in; what goes out is described for /openapi.json only."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from evensong.entrypoints.http.schemas import Form, Items
from evensong.entrypoints.http.translated import EngineForm

# What `include` may ask for. Only the first changes an answer: no response here has items of the other kinds, and
# reasoning is given in clear.
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


class ReasoningForm(Form):
    """How much a model is to reason. No summary is made: its reasoning is in the response as it is."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextForm(Form):
    """What the text must look like."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseStreamOptions(Form):
    """stream_options of the Responses API."""

    include_obfuscation: bool | None = None


class ResponseForm(EngineForm):
    """POST /v1/responses."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "context_management": (None, []),
        "conversation": (None,),
        "moderation": (None,),
        "n": (None, 1),
        "prompt": (None,),
    }
    advisory: ClassVar[frozenset[str]] = frozenset(
        {"service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"}
        | {"access_programs", "background_options", "image"}
    )

    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    background: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of hosted tools, of which there are none
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    text: TextForm | None = None
    reasoning: ReasoningForm | None = None
    include: Items[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    stop: str | Items[str] | None = None


class RetrieveQuery(BaseModel):
    """GET /v1/responses/{id}."""

    model_config = ConfigDict(extra="forbid")

    stream: Literal["true", "false"] | None = None
    starting_after: int | None = Field(default=None, ge=0)
    include_obfuscation: Literal["true", "false"] | None = None


class InputItemsQuery(BaseModel):
    """GET /v1/responses/{id}/input_items."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(default=20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class ResponseAnswer(BaseModel):
    """A response, whole."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "failed", "in_progress", "cancelled", "incomplete"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    seed: int | None
    system_fingerprint: str


class InputItemsAnswer(BaseModel):
    """Items of a response's input."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedAnswer(BaseModel):
    """A response that is no longer stored."""

    id: str
    object: Literal["response"]
    deleted: bool
