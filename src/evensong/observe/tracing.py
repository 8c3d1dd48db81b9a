"""Traces: one span a request and one a start-up phase, sent to an OpenTelemetry collector where one is named.

Names are vLLM's and those of OpenTelemetry's semantic conventions for generative AI; spans hold ids, counts and times,
never text. Nothing of OpenTelemetry is imported where no collector is named.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from evensong.protocol.request_output import RequestMetrics
from evensong.protocol.sampling_params import SamplingParams
from evensong.utils.threads import run_in_time

# Headers of the HTTP request that is being handled: `traceparent` and `tracestate` of W3C Trace Context.
INCOMING: ContextVar[Mapping[str, str] | None] = ContextVar("trace headers", default=None)
TRACE_HEADERS = ("traceparent", "tracestate")
# What has not reached the collector when an engine ends gets this long.
FLUSH_SECONDS = 1.0


@dataclass(frozen=True)
class Ended:
    """A request at its end, however it came."""

    request_id: str
    params: SamplingParams
    metrics: RequestMetrics
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    finish_reasons: list[str]
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None


class Tracer(Protocol):
    """Where spans go."""

    @property
    def on(self) -> bool:
        """False where nobody would read them."""

    def request(self, ended: Ended) -> None:
        """The span of a request."""

    def startup(self, phases: Mapping[str, float]) -> None:
        """A start-up that has just ended: seconds by phase, one after the other."""

    def close(self) -> None:
        """Sends what is left, within a bound."""


class NoTracer:
    """No collector."""

    on = False

    def request(self, ended: Ended) -> None:
        """Nothing."""

    def startup(self, phases: Mapping[str, float]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class OtlpTracer:
    """Spans in batches, from a thread of the library's, over OTLP/HTTP; a collector that is gone costs nothing here."""

    on = True

    def __init__(self, endpoint: str, model_name: str) -> None:
        # Optional: evensong[otel].
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._model_name = model_name
        self._server = SpanKind.SERVER
        self._failed: Any = lambda words: Status(StatusCode.ERROR, words)
        self._below = set_span_in_context
        self._extract = TraceContextTextMapPropagator().extract
        # OpenTelemetry's own variables are heard, as everywhere.
        own = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "evensong"}
        resource = Resource.create(own)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter: Any = OTLPSpanExporter  # untyped
        self._provider.add_span_processor(BatchSpanProcessor(exporter(endpoint=endpoint, timeout=5)))
        self._tracer = self._provider.get_tracer("evensong")

    def request(self, ended: Ended) -> None:
        """The span of a request, below the caller's span where it named one."""
        times = ended.metrics
        end = times.finished_time or time.time()
        span = self._tracer.start_span(
            "llm_request",
            context=self._extract(dict(ended.trace_headers)),
            kind=self._server,
            start_time=_nanoseconds(times.arrival_time),
            attributes={name: value for name, value in self._attributes(ended, end).items() if value is not None},
        )
        if times.first_token_time is not None:
            span.add_event("first_token", timestamp=_nanoseconds(times.first_token_time))
        if ended.error is not None:
            span.set_status(self._failed(ended.error))
        span.end(_nanoseconds(end))

    def startup(self, phases: Mapping[str, float]) -> None:
        """A span of the whole, and below it one a phase."""
        moment = time.time() - sum(phases.values())
        whole = self._tracer.start_span("startup", start_time=_nanoseconds(moment))
        for name, seconds in phases.items():
            part = self._tracer.start_span(name, context=self._below(whole), start_time=_nanoseconds(moment))
            moment += seconds
            part.end(_nanoseconds(moment))
        whole.end(_nanoseconds(moment))

    def close(self) -> None:
        """Sends what is left, within a bound: the library's own end would wait for a collector that is gone."""
        run_in_time(self._provider.shutdown, FLUSH_SECONDS, "last spans")

    def _attributes(self, ended: Ended, end: float) -> dict[str, Any]:
        params, times = ended.params, ended.metrics
        arrival, first, scheduled = times.arrival_time, times.first_token_time, times.first_scheduled_time
        return {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "evensong",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": ended.request_id,
            "gen_ai.response.id": ended.request_id,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k or None,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.n": params.n,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.response.finish_reasons": ended.finish_reasons,
            "gen_ai.usage.prompt_tokens": ended.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": ended.num_output_tokens,
            "gen_ai.usage.input_tokens": ended.num_prompt_tokens,
            "gen_ai.usage.output_tokens": ended.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": ended.num_cached_tokens,
            "gen_ai.usage.num_sequences": params.n,
            "gen_ai.latency.time_in_queue": None if scheduled is None else scheduled - arrival,
            "gen_ai.latency.time_to_first_token": None if first is None else first - arrival,
            "gen_ai.latency.e2e": end - arrival,
        }


def make_tracer(endpoint: str | None, model_name: str) -> Tracer:
    """The tracer of one front end; it does nothing where `endpoint` is None."""
    return NoTracer() if endpoint is None else OtlpTracer(endpoint, model_name)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
