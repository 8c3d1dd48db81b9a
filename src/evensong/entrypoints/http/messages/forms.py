"""Forms of /v1/messages: what comes in; what goes out is described for /openapi.json only."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from evensong.entrypoints.http.schemas import Form, Items
from evensong.entrypoints.http.translated import EngineForm


class ThinkingForm(Form):
    """Whether a model is to reason, and for how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Form):
    """What the text must look like."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class PromptForm(EngineForm):
    """POST /v1/messages/count_tokens: what a prompt is made of."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (None,),
        "context_management": (None,),
        "mcp_servers": (None, []),
    }
    advisory: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed", "user_profile_id"}
        | {"workspace_id"}
    )

    model: str | None = Field(...)
    messages: Items[dict[str, Any]]
    system: str | Items[dict[str, Any]] | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingForm | None = None
    output_config: OutputConfig | None = None


class MessageForm(PromptForm):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Items[str] | None = None


class MessageAnswer(BaseModel):
    """The assistant's next message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]
    seed: int | None
    system_fingerprint: str


class CountAnswer(BaseModel):
    """How long a prompt is."""

    input_tokens: int


class MessageErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str


class MessageError(BaseModel):
    """The form in which /v1/messages says no."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str | None
