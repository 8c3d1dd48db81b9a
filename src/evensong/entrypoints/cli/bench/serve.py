"""`evensong bench serve`: load on an OpenAI-compatible server, with vLLM's flags and result keys."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import random
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from evensong.entrypoints.cli.bench.datasets import (
    TRACES,
    Sample,
    add_dataset_flags,
    check_dataset_flags,
    load_samples,
)
from evensong.entrypoints.cli.bench.figures import (
    details,
    figures,
    read_metrics,
    read_objectives,
    read_percentiles,
)
from evensong.entrypoints.cli.bench.load import Load, Record, arrivals
from evensong.entrypoints.cli.bench.report import check_plot, plot, serving_table, show, write
from evensong.entrypoints.cli.bench.target import Target, key_header
from evensong.entrypoints.cli.flags import Parser
from evensong.protocol.errors import ConfigError

FAILURE, INTERRUPTED = 1, 130
INF = float("inf")
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions", "vllm": "/v1/completions"}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def make_parser() -> Parser:
    """vLLM's flags for its serving benchmark."""
    parser = Parser(prog="evensong bench serve", description="Load on an OpenAI-compatible server.")
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=tuple(ENDPOINTS), default="openai", help="completions or chat")
    server.add_argument(
        "--base-url", default=None, metavar="URL", help="the server's address, instead of host and port"
    )
    server.add_argument("--host", default="127.0.0.1", help="the server's host")
    server.add_argument("--port", type=int, default=8000, help="the server's port")
    server.add_argument("--endpoint", default=None, metavar="PATH", help="route (default: the backend's)")
    server.add_argument("--model", default=None, help="the model's name (default: the first that is served)")
    server.add_argument("--served-model-name", default=None, metavar="NAME", help="the name in requests, if another")
    server.add_argument(
        "--tokenizer", default=None, metavar="MODEL", help="its tokenizer (default: the server's route)"
    )
    server.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, metavar="S", help="wait this long for the server to start"
    )
    server.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="headers of every request")
    add_dataset_flags(parser, num_prompts=1000)
    _add_load_flags(parser)
    _add_sampling_flags(parser)
    _add_result_flags(parser)
    return parser


def _add_load_flags(parser: Parser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate", type=float, default=INF, metavar="R", help="requests a second; inf: all at once"
    )
    load.add_argument(
        "--burstiness", type=float, default=1.0, help="shape of the gaps: 1 Poisson, less bursts, inf even"
    )
    load.add_argument("--max-concurrency", type=int, default=None, metavar="N", help="requests under way at most")
    load.add_argument(
        "--self-timed", action=argparse.BooleanOptionalAction, default=None,
        help="use the trace's arrival times (default: on for a trace)",
    )  # fmt: skip
    load.add_argument("--num-warmups", type=int, default=0, metavar="N", help="requests before, which do not count")
    load.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    load.add_argument("--request-id-prefix", default=None, metavar="TEXT", help="of X-Request-Id (default: random)")
    load.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _add_sampling_flags(parser: Parser) -> None:
    group = parser.add_argument_group("sampling (default: the server's)")
    group.add_argument("--ignore-eos", action="store_true", help="outputs of exactly the wanted length")
    for name in SAMPLING:
        kind = int if name == "top_k" else float
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None, help=f"{name} of every request")
    group.add_argument("--logprobs", type=int, default=None, metavar="N", help="log-probabilities to ask for")
    group.add_argument("--extra-body", type=_json, default={}, metavar="JSON", help="fields of every request")


def _add_result_flags(parser: Parser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl", metavar="NAMES", help="metrics to report")
    group.add_argument("--metric-percentiles", default="99", metavar="P,P", help="percentiles to report")
    group.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="objectives: ttft, tpot, e2el")
    group.add_argument("--plot", default=None, metavar="FILE.png", help="draw the run (needs evensong[plot])")
    group.add_argument("--save-result", action="store_true", help="write the result to a file")
    group.add_argument("--save-detailed", action="store_true", help="with a line for each request in it")
    group.add_argument("--append-result", action="store_true", help="add the result to the file")
    group.add_argument("--result-dir", default=None, metavar="DIR", help="folder of the file (default: this one)")
    group.add_argument("--result-filename", default=None, metavar="NAME", help="name of the file")
    group.add_argument("--label", default=None, help="name of the run in the result (default: the backend)")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="more to write into the result")


def _json(text: str) -> Any:
    return json.loads(text)


_json.__name__ = "JSON"  # argparse names it in its message


def run(arguments: Sequence[str]) -> int:
    """Loads the server and reports. Exit code 1 when no request was answered, 130 when Ctrl-C ended it early."""
    options = make_parser().parse_args(list(arguments))
    _check(options)
    metrics, percentiles = read_metrics(options.percentile_metrics), read_percentiles(options.metric_percentiles)
    objectives = read_objectives(options.goodput)
    with contextlib.closing(_target(options)) as target:
        target.wait_for_model(options.served_model_name or options.model, options.ready_check_timeout_sec)
        samples = load_samples(options, lambda: target.units(options.tokenizer))
    if len(samples) < options.num_prompts:
        sys.stderr.write(f"{options.dataset_path} has {len(samples)} requests; {options.num_prompts} were asked for\n")
    records, duration, stopped = asyncio.run(_measure(options, target, samples))
    result = _settings(options, target, len(samples)) | figures(
        records, duration, metrics=metrics, percentiles=percentiles, objectives=objectives
    )
    # Shown first: what took so long to measure must not be lost to a file that cannot be written.
    show(serving_table(result, metrics, percentiles), result)
    _save(options, result, records)
    if options.plot is not None and any(record.done for record in records):
        plot(Path(options.plot), records, f"{target.model}: {options.dataset_name}, {len(samples)} requests")
    if stopped:
        return INTERRUPTED
    return 0 if result["completed"] else FAILURE


def _check(options: argparse.Namespace) -> None:
    check_dataset_flags(options)
    check_plot(options.plot)
    if not options.request_rate > 0 or not options.burstiness > 0:
        raise ConfigError("--request-rate and --burstiness must be greater than 0")
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise ConfigError("--max-concurrency must be at least 1")
    if options.num_warmups < 0:
        raise ConfigError("--num-warmups must not be negative")
    if options.self_timed and options.dataset_name not in TRACES:
        raise ConfigError("--self-timed needs a trace, which has arrival times")
    if not isinstance(options.extra_body, dict):
        raise ConfigError("--extra-body must be a JSON object")
    for flag in ("header", "metadata"):
        for word in getattr(options, flag):
            if "=" not in word:
                raise ConfigError(f"--{flag}: {word!r:.60} is not KEY=VALUE")


def _target(options: argparse.Namespace) -> Target:
    base = options.base_url or f"http://{options.host}:{options.port}"
    headers = key_header() | dict(word.split("=", 1) for word in options.header)
    chat = options.backend == "openai-chat"
    return Target(base, options.endpoint or ENDPOINTS[options.backend], chat, headers=headers)


async def _measure(
    options: argparse.Namespace, target: Target, samples: list[Sample]
) -> tuple[list[Record], float, bool]:
    """Records, seconds, and whether Ctrl-C ended it."""
    prefix = options.request_id_prefix or f"bench-{uuid.uuid4().hex[:8]}-"
    load = Load(target, _extra_fields(options, chat=target.chat), prefix, options.max_concurrency)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    self_timed = options.self_timed if options.self_timed is not None else options.dataset_name in TRACES
    if self_timed:
        times = [sample.arrival or 0.0 for sample in samples]
    else:
        times = arrivals(samples, options.request_rate, options.burstiness, random.Random(f"arrivals {options.seed}"))
    if options.num_warmups:
        warmups = (samples * options.num_warmups)[: options.num_warmups]
        await load.run(warmups, [0.0] * len(warmups), stop, lambda: None)
    hidden = options.disable_tqdm or not sys.stderr.isatty()
    with tqdm(total=len(samples), disable=hidden, file=sys.stderr, unit="request") as bar:
        began = time.perf_counter()
        records = await load.run(samples, times, stop, bar.update)
        duration = time.perf_counter() - began
    return records, duration, stop.is_set()


def _extra_fields(options: argparse.Namespace, *, chat: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    if options.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": options.logprobs} if chat else {"logprobs": options.logprobs}
    return fields | dict(options.extra_body)


def _settings(options: argparse.Namespace, target: Target, num_samples: int) -> dict[str, Any]:
    metadata = dict(word.split("=", 1) for word in options.metadata)
    return {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,  # vLLM writes it under both names
        "backend": options.backend,
        "label": options.label or options.backend,
        "model_id": target.model,
        "tokenizer_id": options.tokenizer or target.model,
        "dataset_name": options.dataset_name,
        "num_prompts": num_samples,
        **metadata,
        "request_rate": "inf" if options.request_rate == INF else options.request_rate,
        "burstiness": "inf" if options.burstiness == INF else options.burstiness,
        "max_concurrency": options.max_concurrency,
    }


def _save(options: argparse.Namespace, result: dict[str, Any], records: list[Record]) -> None:
    if not (options.save_result or options.append_result):
        return
    name = options.result_filename
    if name is None:
        model = str(result["model_id"]).replace("/", "-").strip("-")
        name = f"{result['label']}-{result['request_rate']}qps-{model}-{result['date']}.json"
    saved = result | (details(records) if options.save_detailed else {})
    write(Path(options.result_dir or ".") / name, json.dumps(saved) + "\n", append=options.append_result)
