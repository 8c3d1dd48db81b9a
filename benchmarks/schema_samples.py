"""Samples of the demo model for every schema of the JSON-Schema-Test-Suite that is enforced, each validated.

    python benchmarks/schema_samples.py --data ../shared/data/jsonschema/JSON-Schema-Test-Suite [--limit 20]

Three samples a schema. One that is cut at max_tokens is drawn again with another seed, up to five times, and listed.
The validator is jsonschema_rs (draft 2020-12, formats asserted).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema_rs

from evensong import LLM, SamplingParams
from evensong.protocol.errors import RequestError
from evensong.protocol.structured import StructuredOutputsParams
from evensong.scheduler.grammar.schema.prepare import prepare_schema

SAMPLES, REDRAWS, MAX_TOKENS = 3, 5, 512
SHOWN = 10


def enforced_schemas(data: Path, limit: int | None) -> tuple[list[tuple[str, Any]], list[str]]:
    """The suite's schemas that are enforced, by file and description, and the names of those that are refused."""
    enforced, refused = [], []
    for path in sorted((data / "tests" / "draft2020-12").glob("*.json")):
        for group in json.loads(path.read_text()):
            name = f"{path.stem}: {group['description']}"
            try:
                prepare_schema(json.dumps(group["schema"]))
            except RequestError:
                refused.append(name)
            else:
                enforced.append((name, group["schema"]))
    return enforced[:limit], refused


def draw(llm: LLM, wanted: list[tuple[str, Any, int]]) -> list[tuple[str, bool]]:
    """One text for each schema and seed, and whether it was cut."""
    prompts = [f"A JSON value for the schema {json.dumps(schema)}:\n" for _, schema, _ in wanted]
    params = [
        SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=0.8,
            seed=seed,
            structured_outputs=StructuredOutputsParams(json=json.dumps(schema)),
        )
        for _, schema, seed in wanted
    ]
    answers = llm.generate(prompts, params, use_tqdm=False)
    return [(answer.outputs[0].text, answer.outputs[0].finish_reason != "stop") for answer in answers]


def fault(schema: Any, text: str) -> str | None:
    """What is wrong with a finished sample."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    try:
        jsonschema_rs.Draft202012Validator(schema, validate_formats=True).validate(value)
    except jsonschema_rs.ValidationError as error:
        return str(error).splitlines()[0]
    return None


def main() -> int:
    """Prints the figures; 1 where a finished sample is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--report", type=Path, default=Path("schema-samples-report.json"))
    options = parser.parse_args()
    enforced, refused = enforced_schemas(options.data, options.limit)
    waiting = [(name, schema, seed) for name, schema in enforced for seed in range(SAMPLES)]
    invalid: list[dict[str, str]] = []
    redrawn: Counter[str] = Counter()
    valid = 0
    report: dict[str, Any] = {}
    began = time.monotonic()
    with LLM("demo") as llm:
        for _ in range(1 + REDRAWS):
            if not waiting:
                break
            again = []
            for (name, schema, seed), (text, cut) in zip(waiting, draw(llm, waiting), strict=True):
                if cut:
                    redrawn[name] += 1
                    again.append((name, schema, seed + SAMPLES))
                elif wrong := fault(schema, text):
                    invalid.append({"schema": name, "text": text[:400], "fault": wrong})
                else:
                    valid += 1
            waiting = again
            report = {
                "schemas_enforced": len(enforced),
                "schemas_refused": len(refused),
                "samples_valid": valid,
                "samples_invalid": invalid,
                "unfinished": sorted(name for name, _, _ in waiting),
                "redrawn": dict(redrawn),
                "seconds": round(time.monotonic() - began, 1),
            }
            options.report.write_text(json.dumps(report, indent=1, ensure_ascii=False))
            print(f"{valid} samples valid, {len(waiting)} cut, {report['seconds']} s", flush=True)
    shown = {name: len(found) if isinstance(found, (list, dict)) else found for name, found in report.items()}
    print(*(f"{name:<18}{value}" for name, value in shown.items()), sep="\n")
    for each in invalid[:SHOWN]:
        print(each)
    return 1 if invalid else 0


if __name__ == "__main__":
    raise SystemExit(main())
