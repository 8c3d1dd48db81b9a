"""Spans at a collector on this machine: names, times, parents; and nothing at all where none is named."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from evensong.config.resolve import resolve
from evensong.observe.tracing import FLUSH_SECONDS, Ended, NoTracer, OtlpTracer, make_tracer
from evensong.protocol.errors import ConfigError
from evensong.protocol.request_output import RequestMetrics
from evensong.protocol.sampling_params import SamplingParams
from tests.unit.entrypoints.http.serving import Served, run

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Takes spans over OTLP/HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resources.append({a.key: a.value.string_value for a in group.resource.attributes})
                    collector.spans += [span for scope in group.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def attributes(span: Any) -> dict[str, Any]:
    kinds = {a.key: a.value for a in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in kinds.items()}


def ended(**fields: Any) -> Ended:
    metrics = RequestMetrics(1000.0, 1000.5, 1001.25, 1003.0)
    base: dict[str, Any] = {"num_prompt_tokens": 7, "num_output_tokens": 5, "num_cached_tokens": 2}
    params = SamplingParams(max_tokens=9, temperature=0.5, seed=3)
    return Ended("r1", params, metrics, **base, finish_reasons=["stop"], **fields)


def test_a_request_is_a_span_below_its_callers(collector: Collector) -> None:
    tracer = make_tracer(collector.url, "demo")
    tracer.request(ended(trace_headers={"traceparent": PARENT}))
    tracer.request(ended(error="it broke"))
    tracer.startup({"load model": 2.0, "warm up": 0.5})
    tracer.close()
    good, bad = collector.named("llm_request")
    assert good.trace_id.hex() == PARENT[3:35] and good.parent_span_id.hex() == PARENT[36:52]
    assert (good.start_time_unix_nano, good.end_time_unix_nano) == (1000 * 10**9, 1003 * 10**9)
    found = attributes(good)
    assert found["gen_ai.usage.prompt_tokens"] == found["gen_ai.usage.input_tokens"] == 7
    assert found["gen_ai.usage.completion_tokens"] == found["gen_ai.usage.output_tokens"] == 5
    assert found["gen_ai.request.id"] == "r1" and found["gen_ai.response.model"] == "demo"
    assert found["gen_ai.request.max_tokens"] == 9 and found["gen_ai.request.seed"] == 3
    assert found["gen_ai.latency.time_in_queue"] == 0.5 and found["gen_ai.latency.time_to_first_token"] == 1.25
    assert found["gen_ai.latency.e2e"] == 3.0
    assert [event.time_unix_nano for event in good.events] == [int(1001.25 * 1e9)]
    assert not bad.parent_span_id and bad.status.message == "it broke" and bad.status.code == 2
    (whole,) = collector.named("startup")
    load, warm = collector.named("load model") + collector.named("warm up")
    assert load.parent_span_id == warm.parent_span_id == whole.span_id
    assert load.end_time_unix_nano == warm.start_time_unix_nano
    assert {resource["service.name"] for resource in collector.resources} == {"evensong"}


def test_requests_over_http_are_traced_however_they_end(collector: Collector) -> None:
    async def body(served: Served) -> None:
        form = {"prompt": [20, 21, 22], "max_tokens": 5}
        for path_form, headers in ((form, {"traceparent": PARENT, "X-Request-Id": "mine"}), (form | {"n": 2}, {})):
            assert (await served.http.post("/v1/completions", json=path_form, headers=headers)).status_code == 200
        refused = await served.http.post("/v1/completions", json={**form, "max_tokens": -1})
        assert refused.status_code == 400

    run(body, engine={"otlp_traces_endpoint": collector.url})
    first, second = collector.named("llm_request")
    assert first.trace_id.hex() == PARENT[3:35] and attributes(first)["gen_ai.request.id"] == "mine"
    assert attributes(first)["gen_ai.usage.output_tokens"] == 5
    assert second.trace_id != first.trace_id and attributes(second)["gen_ai.usage.output_tokens"] == 10
    # Text stays here.
    assert "Gr" not in str(collector.spans)


@pytest.mark.filterwarnings("ignore")
def test_a_collector_that_is_gone_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    tracer = OtlpTracer("http://127.0.0.1:9/v1/traces", "demo")
    began = time.monotonic()
    tracer.request(ended())
    tracer.close()
    assert time.monotonic() - began < FLUSH_SECONDS + 2


def test_without_a_collector_nothing_is_imported() -> None:
    assert isinstance(make_tracer(None, "demo"), NoTracer)
    code = (
        "import sys, evensong.entrypoints.http.app, evensong.entrypoints.llm as l\n"
        "from evensong.observe.tracing import make_tracer\nmake_tracer(None, 'x')\n"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry.sdk')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://a:1", "http://", ""])
def test_what_is_no_address_of_a_collector(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        resolve({"otlp_traces_endpoint": endpoint})


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'evensong\[otel\]'"):
        resolve({"otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces"})
