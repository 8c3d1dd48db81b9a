"""Cases of the Berkeley Function Calling Leaderboard as requests of tools, and what their calls are held to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "bfcl"
FILES = {
    "simple": "BFCL_v4_simple_python.json",
    "multiple": "BFCL_v4_multiple.json",
    "parallel": "BFCL_v4_parallel.json",
}
# The data has Python's names for types.
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
DRAWS = 5


@dataclass(frozen=True)
class Case:
    """One question, with the tools that may answer it."""

    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    parallel: bool

    def validators(self) -> dict[str, Any]:
        """What checks a call's arguments, by the tool's name."""
        functions = [tool["function"] for tool in self.tools]
        return {one["name"]: jsonschema_rs.validator_for(one["parameters"]) for one in functions}


@dataclass
class Verdict:
    """What came of a case: its number of calls, what was wrong with them, and how often max_tokens cut the answer."""

    name: str
    num_calls: int = 0
    num_cuts: int = 0
    faults: list[str] = field(default_factory=list)


def cases(category: str, folder: Path = FOLDER, limit: int | None = None) -> Iterator[Case]:
    """The cases of `simple`, `multiple` or `parallel`, in the file's order."""
    with (folder / FILES[category]).open(encoding="utf-8") as lines:
        for line in islice(lines, limit):
            case = json.loads(line)
            tools = [_tool(function) for function in case["function"]]
            yield Case(case["id"], case["question"][0], tools, category == "parallel")


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    name = re.sub(r"[^A-Za-z0-9_-]", "_", function["name"])[:64]
    shown = {"name": name, "description": function["description"], "parameters": converted(function["parameters"])}
    return {"type": "function", "function": shown}


def converted(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema that a description of the data means: `any` allows anything."""
    result = {key: value for key, value in schema.items() if key != "type"}
    kind = schema.get("type")
    if kind is not None and kind != "any":
        result = {"type": _TYPES.get(kind, kind), **result}
    if "properties" in schema:
        result["properties"] = {name: converted(one) for name, one in schema["properties"].items()}
    if isinstance(schema.get("items"), dict):
        result["items"] = converted(schema["items"])
    return result


def judge(http: httpx.Client, model: str, case: Case, max_tokens: int) -> Verdict:
    """Asks with tool_choice required; an answer that max_tokens cuts is drawn again, warmer, up to DRAWS times.

    Every call of every draw is judged, but for the one that was cut.
    """
    verdict, validators = Verdict(case.name), case.validators()
    body = {
        "model": model,
        "messages": case.messages,
        "tools": case.tools,
        "tool_choice": "required",
        "parallel_tool_calls": case.parallel,
        "max_tokens": max_tokens,
    }
    for seed in range(DRAWS):
        answer = http.post("/v1/chat/completions", json={**body, "seed": seed, "temperature": 0.7 + 0.1 * seed})
        if answer.status_code != 200:
            verdict.faults.append(f"status {answer.status_code}: {answer.text[:300]}")
            return verdict
        choice = answer.json()["choices"][0]
        calls = choice["message"].get("tool_calls") or []
        cut = choice["finish_reason"] == "length"
        whole = calls[:-1] if cut else calls
        verdict.num_calls += len(whole)
        verdict.faults += [fault for call in whole if (fault := _fault(call["function"], validators))]
        if cut:
            verdict.num_cuts += 1
            continue
        if not calls or choice["finish_reason"] != "tool_calls" or choice["message"]["content"]:
            verdict.faults.append(f"no calls alone: {json.dumps(choice)[:300]}")
        return verdict
    verdict.faults.append(f"cut by max_tokens {max_tokens} in each of {DRAWS} draws")
    return verdict


def _fault(function: dict[str, Any], validators: dict[str, Any]) -> str | None:
    name, text = function["name"], function["arguments"]
    if name not in validators:
        return f"there is no tool {name}"
    try:
        validators[name].validate(json.loads(text))
    except (ValueError, jsonschema_rs.ValidationError) as error:
        return f"{name}({text[:200]}): {str(error)[:200]}"
    return None


def judge_all(url: str, model: str, asked: list[Case], *, max_tokens: int, at_once: int) -> list[Verdict]:
    """The verdicts, in the order of the cases; `at_once` requests run beside each other."""
    with httpx.Client(base_url=url, timeout=600) as http, ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda case: judge(http, model, case, max_tokens), asked))
