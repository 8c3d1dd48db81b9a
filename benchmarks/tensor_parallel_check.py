"""How far several workers are from one: the largest difference of teacher-forced log-probabilities, in float32.

python benchmarks/tensor_parallel_check.py --sizes 2,3 --prompts 100 --limit 1e-3

The prompts are pieces of this repository's own pages, so that every run has the same ones. Each token's log-probability
after those before it is compared with that of one worker. Exit code 1: some size is beyond the limit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from evensong import LLM, SamplingParams

PAGES = Path(__file__).parents[1]


def prompts_of(count: int, length: int) -> list[str]:
    """`count` pieces of `length` characters of the pages, evenly spread."""
    text = "\n".join(path.read_text() for path in [PAGES / "ARCHITECTURE.md", *sorted((PAGES / "docs").glob("*.md"))])
    step = (len(text) - length) // count
    return [text[start : start + length] for start in range(0, count * step, step)]


def logprobs(model: str, prompts: list[str], size: int, stages: int) -> list[np.ndarray]:
    """Log-probabilities of each prompt's tokens from the second on."""
    with LLM(model, dtype="float32", tensor_parallel_size=size, pipeline_parallel_size=stages) as llm:
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), use_tqdm=False
        )
    found = []
    for output in outputs:
        assert output.prompt_logprobs is not None and output.prompt_token_ids is not None
        rows = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        found.append(np.array([row[token].logprob for row, token in rows if row is not None]))
    return found


def main() -> int:
    """A line for each size, and one of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--sizes", default="2", help="tensor-parallel sizes, with commas")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages of those")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--length", type=int, default=800, help="characters of a prompt")
    parser.add_argument("--limit", type=float, default=1e-3)
    options = parser.parse_args()
    prompts = prompts_of(options.prompts, options.length)
    alone = logprobs(options.model, prompts, 1, 1)
    report = {}
    for size in map(int, options.sizes.split(",")):
        shared = logprobs(options.model, prompts, size, options.stages)
        differences = np.concatenate([np.abs(one - other) for one, other in zip(shared, alone, strict=True)])
        report[size] = {"largest": float(differences.max()), "mean": float(differences.mean()), "n": len(differences)}
        print(
            f"size {size}: |difference| at most {differences.max():.2e}, mean {differences.mean():.2e}, "
            f"{len(differences):,} tokens"
        )
    print(json.dumps(report))
    return 0 if all(one["largest"] <= options.limit for one in report.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
