"""The process that renders one chat template of a request (engine/frontend/foreign_template.py), and ends."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from evensong.engine.frontend.chat_template import ChatTemplate
from evensong.engine.frontend.foreign_template import CPU_SECONDS, MAX_OUTPUT_CHARS, MEMORY_BYTES, TemplateOrder
from evensong.protocol.errors import RequestError
from evensong.utils.bounded_child import take_order


def main() -> None:
    """Reads the order from stdin, writes the answer to stdout."""
    order = take_order("evensong:template", cpu_seconds=CPU_SECONDS, memory_bytes=MEMORY_BYTES)
    sys.stdout.write(json.dumps(answer_to(TemplateOrder(**json.loads(order)))))
    sys.stdout.flush()


def answer_to(order: TemplateOrder) -> dict[str, Any]:
    """The rendering, or the refusal."""
    template = ChatTemplate(order.source, order.special_tokens, MAX_OUTPUT_CHARS)
    try:
        if template.error is not None:
            raise RequestError(template.error, param="chat_template")
        return {"text": template.render(order.messages, **order.options)}
    except RequestError as error:
        return {"error": error.message, "param": error.param, "code": error.code}


if __name__ == "__main__":
    main()
    # Threads of a foreign template's making do not keep this process; there is nothing else to close.
    os._exit(0)
