"""Random worlds on the real model for as long as asked: every request must answer as it does alone, ==.

python benchmarks/soak.py --minutes 5 --report soak-report.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.property.worlds import make_cases, random_world, run_solo, run_world


def main() -> int:
    """Draws worlds until the time is over; the exit code is 1 when any request differed or any block leaked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first world (default: the clock)")
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--settings", type=json.loads, default={}, help='of all engines: {"tensor_parallel_size": 2}')
    parser.add_argument("--report", default="soak-report.json")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    until = time.monotonic() + 60 * options.minutes
    report: dict[str, object] = {"first_seed": seed, "worlds": 0, "requests": 0, "differences": [], "leaks": []}
    differences: list[str] = []
    leaks: list[str] = []
    worlds = requests = 0
    cases = make_cases(seed, options.cases, options.max_tokens)
    solo = run_solo(cases, **options.settings)
    while worlds == 0 or time.monotonic() < until:
        rng = random.Random(seed + worlds)
        world = random_world(rng, cases).with_settings(options.settings)
        answers, blocks = run_world(world, cases)
        worlds += 1
        requests += len(answers)
        lost = set(range(len(cases))) - set(world.aborts) - set(answers)
        changed = [i for i, answer in answers.items() if answer != solo[i] and i not in world.aborts]
        if lost or changed:
            differences.append(f"world {seed + worlds - 1}: lost {sorted(lost)}, changed {changed}, {world.settings}")
        if blocks["owned"]:
            leaks.append(f"world {seed + worlds - 1}: {blocks}")
        print(f"world {worlds}: {len(answers)} answers, {len(changed)} changed, {world.settings}", file=sys.stderr)
    report |= {"worlds": worlds, "requests": requests, "differences": differences, "leaks": leaks}
    Path(options.report).write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return 1 if differences or leaks else 0


if __name__ == "__main__":
    raise SystemExit(main())
