"""Logits processors: loading, and that what one does ends its own request at most."""

from __future__ import annotations

import logging
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from evensong.protocol.errors import ConfigError, RequestError
from evensong.protocol.sampling_params import SamplingParams
from evensong.sampling import processors
from evensong.sampling.host_draws import sample_rows
from evensong.sampling.processor import LogitsProcessor, ProcessorConfig, RequestView
from evensong.sampling.processors import Processors, load_processors
from evensong.sampling.row import Float32, SamplingRow
from evensong.testing.byte_tokenizer import byte_tokenizer

VOCAB = 32
CONFIG = ProcessorConfig("demo", VOCAB, byte_tokenizer())
HERE = __name__


class Favourite(LogitsProcessor):
    """One token, and one more for each token of output."""

    def wanted(self, params: SamplingParams) -> bool:
        return "favourite" in (params.extra_args or {})

    def check(self, params: SamplingParams) -> None:
        if not isinstance((params.extra_args or {})["favourite"], int):
            raise ValueError("favourite must be a token id")

    def apply(self, view: RequestView, logits: Float32) -> None:
        logits[view.extra_args["favourite"] + len(view.output_token_ids)] += 100


class Faulty:
    """Does what the request says; no subclass, and no `check`."""

    def __init__(self, config: ProcessorConfig) -> None:
        self.config = config

    def wanted(self, params: SamplingParams) -> bool:
        how = (params.extra_args or {}).get("fault")
        if how == "wanted":
            raise KeyError("oh")
        return how is not None

    def apply(self, view: RequestView, logits: Float32) -> Any:
        match view.extra_args["fault"]:
            case "raise":
                raise ZeroDivisionError("by nothing")
            case "exit":
                raise SystemExit(3)
            case "nan":
                logits[3] = np.nan
            case "inf":
                logits[3] = np.inf
            case "returns":
                return logits * 2
            case "shape":
                logits.shape = (2, len(logits) // 2)
            case "resize":
                logits.resize(3)
            case "tokens":
                view.prompt_token_ids[0] = 7
            case "forbid all":
                logits[:] = -np.inf
            case "wrong index":
                logits[len(logits)] = 0
        return None


class NoProcessor:
    pass


class Raises(Favourite):
    def __init__(self, config: ProcessorConfig) -> None:
        raise OSError("no such file")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No package of this machine brings any."""
    monkeypatch.setattr(processors, "entry_points", lambda group: [])
    yield


def row_of(loaded: Processors, output: Sequence[int] = (), **params: Any) -> SamplingRow:
    own = SamplingParams(temperature=0, max_tokens=9, **params)
    return SamplingRow(own, np.array([1, 2]), np.array(output, dtype=np.int64), (2,), processors=loaded.chosen(own))


def logits_of(rows: int) -> Any:
    return np.random.default_rng(3).standard_normal((rows, VOCAB + 4)).astype(np.float32)


def test_it_changes_the_rows_that_want_it() -> None:
    loaded = load_processors([f"{HERE}:Favourite"], CONFIG)
    rows = [
        row_of(loaded),
        row_of(loaded, extra_args={"favourite": 5}),
        row_of(loaded, [9] * 3, extra_args={"favourite": 5}),
    ]
    logits = logits_of(3)
    plain = sample_rows(logits.copy(), [row_of(Processors())] * 3, VOCAB)
    sampled = sample_rows(logits.copy(), rows, VOCAB)
    assert sampled[0] == plain[0] and [one.token_id for one in sampled[1:]] == [5, 8]
    assert rows[0].processors == ()


def test_log_probabilities_stay_raw_and_masks_hold() -> None:
    loaded = load_processors([f"{HERE}:Favourite"], CONFIG)
    asked: dict[str, Any] = {"logprobs": 2, "extra_args": {"favourite": 5}}
    logits = logits_of(1)
    (own,) = sample_rows(logits.copy(), [row_of(loaded, **asked)], VOCAB)
    (plain,) = sample_rows(logits.copy(), [row_of(Processors(), logprobs=2, allowed_token_ids=[5])], VOCAB)
    assert own == plain and own.token_id == 5
    (masked,) = sample_rows(logits.copy(), [row_of(loaded, allowed_token_ids=[8, 9], **asked)], VOCAB)
    assert masked.token_id in (8, 9)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "Faulty failed: ZeroDivisionError: by nothing"),
        ("exit", "Faulty failed: SystemExit: 3"),
        ("nan", "Faulty left NaN or \\+inf"),
        ("inf", "Faulty left NaN or \\+inf"),
        ("returns", "Faulty returned a ndarray"),
        ("resize", "Faulty failed: ValueError"),
        ("tokens", "Faulty failed: ValueError: .*read-only"),
        ("wrong index", "Faulty failed: IndexError"),
        ("wanted", "Faulty failed: KeyError"),
    ],
)
def test_a_fault_ends_its_own_request(fault: str, said: str) -> None:
    loaded = load_processors([f"{HERE}:Faulty"], CONFIG)
    logits = logits_of(3)
    plain = sample_rows(logits.copy(), [row_of(loaded)] * 3, VOCAB)
    rows = [row_of(loaded), row_of(loaded, extra_args={"fault": fault}), row_of(loaded)]
    given = logits.copy()
    sampled = sample_rows(given, rows, VOCAB)
    assert [sampled[0], sampled[2]] == [plain[0], plain[2]]
    assert sampled[1].error is not None
    assert re.search(said, sampled[1].error), sampled[1].error
    assert (given == logits).all() and list(rows[1].prompt_token_ids) == [1, 2]


def test_the_shape_of_a_view_is_nobodys_business_and_nothing_left_is_no_error() -> None:
    loaded = load_processors([f"{HERE}:Faulty"], CONFIG)
    shape, nothing = (row_of(loaded, extra_args={"fault": fault}) for fault in ("shape", "forbid all"))
    sampled = sample_rows(logits_of(2), [shape, nothing], VOCAB)
    assert sampled[0].error is None and sampled[1].exhausted


def test_check_refuses_by_name() -> None:
    loaded = load_processors([f"{HERE}:Favourite", f"{HERE}:Faulty"], CONFIG)
    loaded.check(SamplingParams(extra_args={"favourite": 3}))
    loaded.check(SamplingParams(extra_args={"fault": "nan"}))
    loaded.check(SamplingParams())
    with pytest.raises(RequestError, match="Favourite refuses the request: favourite must be a token id") as caught:
        loaded.check(SamplingParams(extra_args={"favourite": "x"}))
    assert (caught.value.status, caught.value.param) == (400, "extra_args")
    with pytest.raises(RuntimeError, match="Faulty failed: KeyError"):
        loaded.check(SamplingParams(extra_args={"fault": "wanted"}))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere_at_all:X", "No module named 'nowhere_at_all'"),
        (f"{HERE}:Absent", "Absent"),
        (f"{HERE}", "module:Class"),
        (f"{HERE}:", "module:Class"),
        (f"{HERE}:NoProcessor", "lacks wanted and apply"),
        (f"{HERE}:CONFIG", "lacks wanted and apply"),
        (f"{HERE}:Raises", "no such file"),
    ],
)
def test_one_that_a_flag_names_must_load(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_processors([name], CONFIG)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_packages_bring_theirs_by_name(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def point(name: str, found: Any) -> Any:
        return types.SimpleNamespace(name=name, value=f"pkg:{name}", dist=None, load=lambda: found)

    def points(group: str) -> list[Any]:
        assert group == "evensong.logits_processors"
        return [point("b", Faulty), point("a", Favourite), point("broken", Raises), point("again", Faulty)]

    monkeypatch.setattr(processors, "entry_points", points)
    logging.getLogger("evensong").propagate = True
    with caplog.at_level(logging.WARNING):
        loaded = load_processors([f"{HERE}:Favourite"], CONFIG)
    # In order of their names, each class once.
    assert loaded.describe() == {"logits_processors": "a (pkg:a), again (pkg:again)"}
    assert "broken" in caplog.text and "no such file" in caplog.text
    assert Processors().describe() == {} and len(loaded) == 2
