"""Start-up times of the real server: /health, ready, first token over HTTP; and `import evensong`.

python benchmarks/startup.py --runs 5
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import time

import httpx


def wait_for(url: str, client: httpx.Client) -> None:
    """Until the address answers 200."""
    while True:
        try:
            if client.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.01)


def one_run(model: str) -> dict[str, float]:
    """Seconds from the command to each event."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "evensong.entrypoints.cli.main", "serve", model, "--port", str(port)]
    start = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(timeout=60) as client:
            wait_for(f"{base}/health", client)
            health = time.perf_counter() - start
            wait_for(f"{base}/health/ready", client)
            ready = time.perf_counter() - start
            body = {"model": model, "prompt": "Hello", "max_tokens": 1}
            client.post(f"{base}/v1/completions", json=body).raise_for_status()
            first = time.perf_counter() - start
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    return {"health": health, "ready": ready, "first_token": first}


def import_seconds() -> float:
    """`import evensong`, without the interpreter's own start."""
    program = "import time; t = time.perf_counter(); import evensong; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def main() -> int:
    """A table, then one JSON line with medians and ranges."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    one_run(options.model)
    runs = [{**one_run(options.model), "import": import_seconds()} for _ in range(options.runs)]
    report = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        report[name] = {k: round(f(values), 3) for k, f in (("median", statistics.median), ("min", min), ("max", max))}
        print(f"{name:<14}{report[name]}")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
