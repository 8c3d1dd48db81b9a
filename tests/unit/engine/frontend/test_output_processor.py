"""What a core sends reaches the request it belongs to, once, and nothing else."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from evensong.engine.frontend.detokenizer import TokenTexts
from evensong.engine.frontend.input_processor import InputProcessor
from evensong.engine.frontend.output_processor import OutputProcessor
from evensong.engine.frontend.request_state import RequestState
from evensong.observe.metrics import EngineMetrics
from evensong.observe.stats_log import StatsLog
from evensong.protocol.errors import EngineDeadError, ErrorBody, RequestError
from evensong.protocol.output import Admission, EngineCoreOutput, EngineCoreOutputs, FinishReason
from evensong.protocol.sampling_params import RequestOutputKind, SamplingParams
from evensong.protocol.stats import SchedulerStats
from evensong.testing.byte_tokenizer import byte_ids, byte_tokenizer
from evensong.testing.fake_client import fake_resources, tokens

DELTA = RequestOutputKind.DELTA
TOKENIZER = byte_tokenizer()
TEXTS = TokenTexts(TOKENIZER)
INPUTS = InputProcessor(TOKENIZER, fake_resources(), eos_token_ids=(1,), max_logprobs=5)


class Sink:
    def __init__(self) -> None:
        self.num_admitted = self.num_changed = 0
        self.errors: list[Exception] = []

    def admitted(self) -> None:
        self.num_admitted += 1

    def changed(self, state: RequestState) -> None:
        self.num_changed += 1

    def failed(self, error: Exception) -> None:
        self.errors.append(error)


class Bench:
    """A processor and what it counted."""

    def __init__(self) -> None:
        self.metrics = EngineMetrics("m")
        self.outputs = OutputProcessor(self.metrics, StatsLog(enabled=False))

    def add(self, request_id: str = "r", **params: object) -> RequestState:
        settings = SamplingParams(**({"max_tokens": 50} | params))  # type: ignore[arg-type]
        processed = INPUTS.process(request_id, "prompt", settings)
        state = RequestState(request_id, processed, TEXTS, Sink())
        self.outputs.add(state)
        return state

    def process(self, *outputs: EngineCoreOutput, **fields: object) -> list[str]:
        return self.outputs.process(EngineCoreOutputs(outputs=list(outputs), **fields)).to_abort  # type: ignore[arg-type]

    def figures(self) -> dict[str, float]:
        found = {}
        for family in text_string_to_metric_families(self.metrics.render().decode()):
            for sample in family.samples:
                reason = sample.labels.get("finished_reason")
                found[sample.name.removeprefix("evensong:") + (f"/{reason}" if reason else "")] = sample.value
        return found


def sink(state: RequestState) -> Sink:
    assert isinstance(state.sink, Sink)
    return state.sink


def admit(state: RequestState, cached: int = 0) -> list[Admission]:
    return [Admission(choice.request.request_id, 0, cached) for choice in state.choices]


def test_a_request_from_admission_to_end() -> None:
    bench = Bench()
    state = bench.add(output_kind=DELTA)
    child = state.choices[0].request
    assert state.take() is None
    bench.process(admissions=admit(state, cached=16))
    assert sink(state).num_admitted == 1
    scheduled = state.metrics.arrival_time + 2.0
    bench.process(tokens(child, 0, byte_ids("he"), num_cached_tokens=16, scheduled_time=scheduled))
    bench.process(tokens(child, 2, byte_ids("llo"), FinishReason.LENGTH))
    output = state.take()  # a slow consumer gets both deltas as one
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("hello", byte_ids("hello"))
    assert (output.finished, output.num_cached_tokens, output.prompt) == (True, 16, "prompt")
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].seed == output.params.seed if output.params else False
    assert state.take() is None
    assert bench.outputs.num_requests == 0
    figures = bench.figures()
    assert figures["generation_tokens_total"] == 5
    assert figures["prompt_tokens_total"] == len("prompt")
    assert figures["request_success_total/length"] == 1
    assert figures["time_to_first_token_seconds_count"] == 1
    assert figures["inter_token_latency_seconds_count"] >= 1
    assert figures["e2e_request_latency_seconds_count"] == 1
    assert figures["request_queue_time_seconds_count"] == 1
    assert figures["request_queue_time_seconds_sum"] == pytest.approx(2.0)
    assert state.metrics.first_scheduled_time == scheduled


def test_cumulative_and_final_only() -> None:
    bench = Bench()
    whole, final = bench.add("a"), bench.add("b", output_kind=RequestOutputKind.FINAL_ONLY)
    for start, text in ((0, "x"), (1, "y")):
        bench.process(*(tokens(s.choices[0].request, start, byte_ids(text)) for s in (whole, final)))
        shown = whole.take()
        assert shown is not None and shown.outputs[0].text == "xy"[: start + 1]
        assert final.take() is None
    bench.process(tokens(final.choices[0].request, 2, byte_ids("z"), FinishReason.STOP))
    last = final.take()
    assert last is not None and last.finished


def test_only_the_current_attempt_counts() -> None:
    bench = Bench()
    state = bench.add()
    request_id = state.choices[0].request.request_id
    bench.process(EngineCoreOutput(request_id, 1, 0, byte_ids("no")), admissions=[Admission(request_id, 1)])
    bench.process(EngineCoreOutput("unknown", 0, 0, byte_ids("no")), admissions=[Admission("unknown", 0)])
    assert (state.take(), sink(state).num_admitted) == (None, 0)


def test_tokens_that_came_twice_are_compared() -> None:
    bench = Bench()
    state = bench.add()
    child = state.choices[0].request
    bench.process(tokens(child, 0, byte_ids("abc")))
    bench.process(tokens(child, 1, byte_ids("bcd")))
    assert bench.figures()["determinism_violations_total"] == 0
    bench.process(tokens(child, 0, byte_ids("aXc")))
    assert bench.figures()["determinism_violations_total"] == 1
    output = state.take()
    assert output is not None and output.outputs[0].text == "abcd"
    assert bench.figures()["generation_tokens_total"] == 4


def test_a_gap_ends_that_request_only() -> None:
    bench = Bench()
    lost, fine = bench.add("lost"), bench.add("fine")
    to_abort = bench.process(
        tokens(lost.choices[0].request, 3, byte_ids("d")), tokens(fine.choices[0].request, 0, byte_ids("a"))
    )
    assert to_abort == [lost.choices[0].request.request_id]
    assert "lost tokens" in str(sink(lost).errors[0])
    assert sink(fine).num_changed == 1 and not sink(fine).errors


def test_a_broken_output_ends_that_request_only() -> None:
    bench = Bench()
    broken, fine = bench.add("broken"), bench.add("fine")
    nonsense = EngineCoreOutput(broken.choices[0].request.request_id, 0, 0, ["x"])  # type: ignore[list-item]
    to_abort = bench.process(nonsense, tokens(fine.choices[0].request, 0, byte_ids("a")))
    assert to_abort == [broken.choices[0].request.request_id]
    assert len(sink(broken).errors) == 1
    assert fine.take() is not None


def test_a_stop_string_aborts_in_the_core() -> None:
    bench = Bench()
    state = bench.add(stop="lo")
    child = state.choices[0].request
    assert bench.process(tokens(child, 0, byte_ids("hello world"))) == [child.request_id]
    assert bench.process(tokens(child, 11, byte_ids("more"))) == []  # was on its way
    output = state.take()
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].stop_reason, output.finished) == ("hel", "lo", True)
    assert bench.figures()["generation_tokens_total"] == 5
    assert bench.figures()["request_success_total/stop"] == 1


def test_a_stop_string_in_the_last_token_needs_no_abort() -> None:
    bench = Bench()
    state = bench.add(stop="lo")
    assert bench.process(tokens(state.choices[0].request, 0, byte_ids("hello"), FinishReason.LENGTH)) == []
    output = state.take()
    assert output is not None and output.outputs[0].finish_reason == "stop"


def test_choices_keep_their_order_and_finish_once() -> None:
    bench = Bench()
    state = bench.add(n=3, output_kind=DELTA)
    first, second, third = (choice.request for choice in state.choices)
    bench.process(admissions=admit(state))
    assert sink(state).num_admitted == 1
    bench.process(tokens(third, 0, byte_ids("c"), FinishReason.LENGTH), tokens(first, 0, byte_ids("a")))
    output = state.take()
    assert output is not None
    assert [(c.index, c.text) for c in output.outputs] == [(0, "a"), (2, "c")]
    assert not output.finished
    bench.process(tokens(first, 1, [], FinishReason.STOP), tokens(second, 0, byte_ids("b"), FinishReason.LENGTH))
    output = state.take()
    assert output is not None
    assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [(0, "", "stop"), (1, "b", "length")]
    assert output.finished
    assert bench.figures()["prompt_tokens_total"] == len("prompt")
    assert len({choice.request.params.seed for choice in state.choices}) == 3


def test_a_refused_choice_ends_its_request() -> None:
    bench = Bench()
    state = bench.add(n=3)
    first, second, third = (choice.request.request_id for choice in state.choices)
    refusal = RequestError("queue is full", status=429, retry_after=1).body()
    to_abort = bench.process(admissions=[Admission(first, 0), Admission(second, 0, refusal=refusal)])
    assert to_abort == [first, third]
    error = sink(state).errors[0]
    assert isinstance(error, RequestError)
    assert (error.status, error.retry_after) == (429, 1)
    assert bench.outputs.num_requests == 0
    assert bench.figures()["admission_rejections_total"] == 1


def test_a_request_over_its_time_is_counted_as_such() -> None:
    bench = Bench()
    child = bench.add().choices[0].request
    bench.process(tokens(child, 0, byte_ids("ab")))
    bench.process(tokens(child, 2, [], FinishReason.ABORT, stop_reason="timeout"))
    assert bench.figures()["request_success_total/timeout"] == 1


def test_an_error_of_the_core_ends_the_request() -> None:
    bench = Bench()
    state = bench.add()
    child = state.choices[0].request
    bench.process(tokens(child, 0, [], FinishReason.ERROR, error=ErrorBody("no logits", 500)))
    error = sink(state).errors[0]
    assert isinstance(error, RequestError) and error.status == 500
    assert bench.figures()["request_success_total/error"] == 1


def test_given_up_requests_count_as_aborted() -> None:
    bench = Bench()
    one = bench.add("one")
    bench.add("two", n=2)
    assert bench.outputs.abort(one) == [one.choices[0].request.request_id]
    assert bench.outputs.abort(one) == []
    assert len(bench.outputs.abort_all()) == 2
    assert bench.figures()["request_success_total/abort"] == 3


def test_find_by_the_users_id_and_by_the_internal_one() -> None:
    bench = Bench()
    states = [bench.add("same"), bench.add("same"), bench.add("other")]
    assert bench.outputs.find("same") == states[:2]
    assert bench.outputs.find(states[2].choices[0].request.request_id) == [states[2]]
    assert bench.outputs.find("nobody") == []


def test_death_reaches_everyone() -> None:
    bench = Bench()
    states = [bench.add(str(index)) for index in range(3)]
    bench.process(stats=SchedulerStats(num_running=3, kv_cache_usage=0.5))
    bench.outputs.fail_all(EngineDeadError("killed"))
    assert all(isinstance(sink(state).errors[0], EngineDeadError) for state in states)
    assert bench.outputs.num_requests == 0
    assert bench.figures()["num_requests_running"] == 0


def test_what_was_produced_is_shown_before_an_error() -> None:
    bench = Bench()
    state = bench.add(output_kind=DELTA)
    bench.process(tokens(state.choices[0].request, 0, byte_ids("ab")))
    bench.outputs.fail_all(EngineDeadError("killed"))
    output = state.take()
    assert output is not None and output.outputs[0].text == "ab"
