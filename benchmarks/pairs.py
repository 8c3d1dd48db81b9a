"""Two sides in turns, and what comes of their pairs. No engine is needed here."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Seconds of one batch, whose prompts are made of a seed.
Measured = Callable[[int], float]
Row = dict[str, Any]


def spread(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Median, least and most."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


def show(one: dict[str, float]) -> str:
    """A spread for a table."""
    return f"{one['median']:g} ({one['min']:g}-{one['max']:g})"


def in_turns(sides: Mapping[str, Measured], pairs: int, first_seed: int = 1) -> dict[str, list[float]]:
    """Each side's seconds, pair by pair with the same prompts; who begins alternates."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(pairs):
        order = list(sides) if pair % 2 == 0 else list(reversed(sides))
        for name in order:
            seconds[name].append(sides[name](first_seed + pair))
    return seconds


def throughput_row(seconds: Mapping[str, Sequence[float]], num_tokens: int, goal: float) -> dict[str, Any]:
    """Tokens per second of two sides, and how many times the first one's the second one's are."""
    one, two = seconds
    ratio = spread([a / b for a, b in zip(seconds[one], seconds[two], strict=True)], 3)
    return {
        "unit": "tokens/s",
        "sides": {name: spread([num_tokens / value for value in values]) for name, values in seconds.items()},
        "ratio": ratio,
        "goal": goal,
        "reached": ratio["median"] >= goal,
    }


def latency_row(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Milliseconds a token of two sides; reached where the second takes less."""
    one, two = seconds
    ratio = spread([a / b for a, b in zip(seconds[one], seconds[two], strict=True)], 3)
    return {
        "unit": "ms/token",
        "sides": {name: spread([1e3 * value for value in values], 3) for name, values in seconds.items()},
        "ratio": ratio,
        "goal": 1.0,
        "reached": ratio["median"] > 1.0,
    }


def stages_row(figures: Mapping[str, Any], goal: float) -> dict[str, Any]:
    """How long each rank of a profile rested, in its steady state."""
    idle = {rank["name"]: rank["idle"] for rank in figures["ranks"]}
    known = [value for value in idle.values() if value is not None]
    return {
        "idle": idle,
        "gap_us": {rank["name"]: rank["gap_us"] for rank in figures["ranks"]},
        "goal": goal,
        "reached": bool(known) and len(known) == len(idle) and max(known) <= goal,
    }


def print_row(name: str, row: Mapping[str, Any]) -> None:
    """One part for people."""
    if "error" in row:
        print(f"{name}: {row['error']}", flush=True)
        return
    verdict = "reached" if row["reached"] else "NOT reached"
    if "idle" in row:
        idle = ", ".join(f"{rank} {'-' if share is None else f'{share:.1%}'}" for rank, share in row["idle"].items())
        print(f"{name}: idle {idle}; goal at most {row['goal']:.0%}: {verdict}", flush=True)
        return
    print(f"{name}: {row['unit']}; ratio {show(row['ratio'])}, goal {row['goal']:g}: {verdict}")
    for side, values in row["sides"].items():
        print(f"  {side:<8}{show(values)}", flush=True)


def run_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Each part's row, printed as soon as it is there; one that fails does not cost the others."""
    report: dict[str, Any] = {}
    for name, measure in parts.items():
        try:
            report[name] = measure()
        except (SystemExit, subprocess.TimeoutExpired) as error:
            report[name] = {"error": str(error).strip()}
        print_row(name, report[name])
    return report
