"""Choices of one request (n > 1): what one of them may take of another that has computed their prompt.

The blocks that hold nothing but their prompt are shared; of the block in which it ends each gets a copy, since each
writes its own output there. So the prompt is computed once, whether prefixes are cached or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evensong.scheduler.request import Request


def num_shared_tokens(request: Request) -> int:
    """Tokens that it has in common with its siblings and need not compute: its next token needs one to be computed."""
    if not request.source.group or not request.reads_cache:
        return 0
    return min(request.num_prompt_tokens, request.num_tokens - 1)


def lender(request: Request, running: Sequence[Request], step_id: int) -> Request | None:
    """A sibling that computed those tokens in steps before `step_id`."""
    count = num_shared_tokens(request)
    if count == 0:
        return None
    return next(
        (
            other
            for other in _siblings(request, running)
            if other.num_computed_tokens >= count and other.first_step_id < step_id
        ),
        None,
    )


def awaits_sibling(
    request: Request,
    num_cached: int,
    running: Sequence[Request],
    step_id: int,
    is_behind: Callable[[Request, Request], bool],
) -> bool:
    """True while a sibling, one as urgent, computes what `request` lacks beyond `num_cached` tokens.

    Not for one that ends with its first token: nothing is left of it when the prompt is computed.
    """
    if num_shared_tokens(request) <= num_cached or lender(request, running, step_id) is not None:
        return False
    return any(_goes_on(other) and not is_behind(other, request) for other in _siblings(request, running))


def _siblings(request: Request, running: Sequence[Request]) -> list[Request]:
    group = request.source.group
    return [other for other in running if other.source.group == group and other is not request]


def _goes_on(request: Request) -> bool:
    most = request.source.params.max_tokens
    return most is None or most - request.num_output_tokens > 1
