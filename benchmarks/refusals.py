"""What refusing the largest bad requests costs others: time to the answer, and the slowest /health meanwhile.

python benchmarks/refusals.py --url http://127.0.0.1:8000        (a server with its default limits)
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from typing import Any

import httpx

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SETTLE_SECONDS = 0.2


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Requests by name; each must be answered with a 4xx."""
    message = {"role": "user", "content": "x" * 15_000_000}
    return {
        "20 MB prompt": (TEXT, {"prompt": "x" * 20_000_000}),
        "15 MB prompt, under the body limit": (TEXT, {"prompt": "hello wor, " * 1_300_000}),
        "15 MB message": (CHAT, {"messages": [message]}),
        "10,000 stop strings": (TEXT, {"prompt": "a", "stop": [f"s{i}" for i in range(10_000)]}),
        "n = 10^6": (TEXT, {"prompt": "a", "n": 10**6}),
        "400,000 allowed ids": (TEXT, {"prompt": "a", "allowed_token_ids": [5] * 399_000 + [10**6]}),
        "90,000 biases": (TEXT, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(90_000)}}),
        "5,000,000 prompt ids": (TEXT, {"prompt": [1] * 5_000_000}),
    }


def refuse(url: str, path: str, body: bytes) -> tuple[float, float]:
    """Seconds to the refusal, and the slowest /health while it was made."""
    waits: list[float] = []
    done = threading.Event()

    def poll() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not done.is_set():
                began = time.perf_counter()
                client.get("/health").raise_for_status()
                waits.append(time.perf_counter() - began)

    poller = threading.Thread(target=poll)
    poller.start()
    time.sleep(SETTLE_SECONDS)
    waits.clear()
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            began = time.perf_counter()
            answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
            took = time.perf_counter() - began
    finally:
        done.set()
        poller.join()
    assert 400 <= answer.status_code < 500, answer.text
    return took, max(waits)


def main() -> int:
    """A line a case, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    try:
        httpx.get(f"{options.url}/health")
    except httpx.TransportError as error:
        raise SystemExit(f"no server answers at {options.url}: {error}") from error
    report: dict[str, list[list[int]]] = {}
    for name, (path, form) in cases().items():
        body = json.dumps(form).encode()
        runs = [refuse(options.url, path, body) for _ in range(options.runs)]
        report[name] = [[round(1000 * value) for value in run] for run in runs]
        print(f"{name:<36}" + "  ".join(f"{took:>4}/{worst:<4}" for took, worst in report[name]) + " ms")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
