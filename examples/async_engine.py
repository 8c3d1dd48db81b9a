"""Several streams at once on an event loop: python examples/async_engine.py [MODEL]."""

from __future__ import annotations

import asyncio
import sys

from evensong import AsyncLLM, EngineArgs, SamplingParams


async def one(engine: AsyncLLM, name: str, prompt: str) -> None:
    """Prints the request's whole text once it is finished."""
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=24)
    text = ""
    async for output in engine.generate(prompt, params, request_id=name):
        text = output.outputs[0].text
    print(f"{name}: {text!r}")


async def main() -> None:
    """Two requests side by side."""
    engine = AsyncLLM.from_engine_args(EngineArgs(model=sys.argv[1] if len(sys.argv) > 1 else "demo"))
    try:
        await asyncio.gather(one(engine, "a", "The sea is"), one(engine, "b", "The desert is"))
    finally:
        engine.shutdown()


asyncio.run(main())
