"""Chrome's trace format (its Trace Event Format document): what chrome://tracing and Perfetto open."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from typing import Any


def write_chrome_trace(path: str, spans: Any, names: Sequence[str]) -> None:
    """`spans` [n, 4]: segment, thread, begin and end in ns; one row of the picture a thread. Raises OSError.

    Segment -1 stands for the block copies that come before a step's own segments.
    """
    events = [
        {
            "ph": "X",
            "cat": "op",
            "name": names[segment] if segment >= 0 else "copy_blocks",
            "pid": 0,
            "tid": thread,
            "ts": begin / 1e3,
            "dur": (end - begin) / 1e3,
            "args": {"segment": segment},
        }
        for segment, thread, begin, end in spans.tolist()
    ]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
