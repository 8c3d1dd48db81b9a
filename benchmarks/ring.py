"""Rounds of the ring between a core and its workers: a plan out to every rank, one rank's tokens back.

    python benchmarks/ring.py --requests 64 --ranks 2 --rounds 100000 --report ring-report.json

Each rank is a process of its own that sleeps until its doorbell rings, decodes the plan, and, if it is the last,
answers with a token for each request. The round is timed from before the plan is encoded until the answer is decoded.
Percentiles in microseconds, and the resident memory of every process before and after; one JSON line.
"""

from __future__ import annotations

import argparse
import array
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from evensong.protocol.step import CachedRequestData, ModelOutput, SchedulerOutput
from evensong.utils.doorbell import Doorbell
from evensong.utils.shm_ring import RingReader, RingWriter, make_ring

WARM_UP = 2000
SECONDS = 30.0


def decode_plan(step_id: int, request_ids: list[str]) -> SchedulerOutput:
    """A step in which every request computes one token; every sixteenth needs a block."""
    blocks = [[step_id] if (step_id + index) % 16 == 0 else [] for index in range(len(request_ids))]
    cached = CachedRequestData(request_ids, blocks, [step_id] * len(request_ids))
    return SchedulerOutput(step_id, [], cached, dict.fromkeys(request_ids, 1), request_ids, [])


def answer(plan: SchedulerOutput) -> ModelOutput:
    """A token for each sampled row."""
    ids = plan.sampling_request_ids
    return ModelOutput(ids, [[(plan.step_id + row) % 50_000] for row in range(len(ids))], [None] * len(ids))


def rank(words: Sequence[str]) -> None:
    """A rank's process: `plans` fd, its index, its doorbell, and the answers' ring and doorbell (-1 for no answers)."""
    plans, index, bell, answers, core = map(int, words)
    reader, doorbell = RingReader(plans, index), Doorbell((bell, bell))
    writer = RingWriter(answers, [Doorbell((core, core))]) if answers >= 0 else None
    decoder, encoder, buffer = msgspec.msgpack.Decoder(SchedulerOutput), msgspec.msgpack.Encoder(), bytearray()
    while True:
        doorbell.wait()
        while (message := reader.receive()) is not None:
            if not len(message):
                return
            plan = decoder.decode(message)
            if writer is not None:
                encoder.encode_into(answer(plan), buffer)
                writer.send(buffer, SECONDS)


def measure(num_requests: int, num_ranks: int, rounds: int) -> dict[str, object]:
    """The figures of `rounds` rounds after a warm-up."""
    request_ids = [f"cmpl-{secrets.token_hex(16)}-0" for _ in range(num_requests)]
    plans, answers = make_ring("plans"), make_ring("answers")
    bells, core = [Doorbell() for _ in range(num_ranks)], Doorbell()
    children = []
    for index, bell in enumerate(bells):
        last = index == num_ranks - 1
        words = (plans, index, bell.read_fd, answers if last else -1, core.write_fd)
        command = [sys.executable, __file__, "--rank", *map(str, words)]
        children.append(subprocess.Popen(command, pass_fds=(plans, answers, bell.read_fd, core.write_fd)))
    writer, reader = RingWriter(plans, bells), RingReader(answers)
    decoder, encoder, buffer = msgspec.msgpack.Decoder(ModelOutput), msgspec.msgpack.Encoder(), bytearray()
    processes = [psutil.Process(), *(psutil.Process(child.pid) for child in children)]
    times = array.array("d", bytes(8 * rounds))
    resident: list[int] = []
    try:
        for step_id in range(WARM_UP + rounds):
            if step_id == WARM_UP:
                resident = [process.memory_info().rss for process in processes]
            plan = decode_plan(step_id, request_ids)
            begin = time.perf_counter()
            encoder.encode_into(plan, buffer)
            writer.send(buffer, SECONDS)
            while (message := reader.receive()) is None:
                if not core.wait(SECONDS):
                    raise TimeoutError("no answer")
            output = decoder.decode(message)
            if step_id >= WARM_UP:
                times[step_id - WARM_UP] = time.perf_counter() - begin
            assert output.sampled_token_ids[-1] == [(step_id + num_requests - 1) % 50_000]
        grown = [process.memory_info().rss - old for process, old in zip(processes, resident, strict=True)]
        writer.send(b"", SECONDS)
        assert all(child.wait(SECONDS) == 0 for child in children)
    finally:
        for child in children:
            child.kill()
            child.wait()
    micros = sorted(1e6 * seconds for seconds in times)
    return {
        "requests": num_requests,
        "ranks": num_ranks,
        "rounds": rounds,
        "plan_bytes": len(buffer),
        "median_us": round(statistics.median(micros), 1),
        "p90_us": round(micros[int(0.9 * rounds)], 1),
        "p99_us": round(micros[int(0.99 * rounds)], 1),
        "resident_bytes": resident,
        "resident_grown_bytes": grown,
        "processors": len(os.sched_getaffinity(0)),
    }


def main() -> int:
    """See the module."""
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--report", type=Path, help="file for the figures (JSON)")
    options = parser.parse_args()
    line = json.dumps(measure(options.requests, options.ranks, options.rounds))
    if options.report:
        options.report.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
