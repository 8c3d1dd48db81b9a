"""32 constrained streams beside the same streams unconstrained, on the real model.

    python benchmarks/structured.py --pairs 5

Each pair is one batch without and one with a schema, in the same engine, every stream to the same number of tokens.
Medians with the least and the most, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from evensong import LLM, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "city": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["villager", "traveller", "guest"]},
    },
    "required": ["name", "age", "city", "tags", "kind"],
    "additionalProperties": False,
}
# More than fit the tokens of a stream: none ends early.
SCHEMA = {"type": "array", "items": PERSON, "minItems": 100}


def run(llm: LLM, streams: int, tokens: int, temperature: float, structure: dict[str, Any] | None) -> float:
    """Tokens per second of one batch."""
    prompts = [f"People number {index} to {index + 100} of the village, as a JSON list:\n" for index in range(streams)]
    params = [
        SamplingParams(
            temperature=temperature, max_tokens=tokens, seed=index, ignore_eos=True, structured_outputs=structure
        )
        for index in range(streams)
    ]
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert count == streams * tokens, "a stream ended early"
    return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    with LLM("demo") as llm:

        def one(structure: dict[str, Any] | None) -> float:
            return run(llm, args.streams, args.tokens, args.temperature, structure)

        one(None), one({"json": SCHEMA})  # the first of each warms up
        pairs = [(one(None), one({"json": SCHEMA})) for _ in range(args.pairs)]
    free, constrained = ([pair[side] for pair in pairs] for side in (0, 1))
    ratios = [own / other for other, own in pairs]
    figures = {"unconstrained": free, "constrained": constrained, "ratio": ratios}
    for name, values in figures.items():
        print(f"{name:14} {statistics.median(values):9.3f}  ({min(values):.3f} - {max(values):.3f})")
    line = json.dumps({"benchmark": "structured", "streams": args.streams, "temperature": args.temperature, **figures})
    print(line)
    if args.report is not None:
        args.report.write_text(line + "\n")


if __name__ == "__main__":
    main()
