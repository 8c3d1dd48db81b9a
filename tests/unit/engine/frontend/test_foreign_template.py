"""Templates of requests: what they give, and that nothing they do lasts, grows or stays."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import psutil
import pytest

from evensong.engine.frontend import foreign_template
from evensong.engine.frontend.foreign_template import ForeignTemplates, TemplateOrder
from evensong.protocol.errors import RequestError
from evensong.testing.byte_tokenizer import CHAT_TEMPLATE

MESSAGES = [{"role": "user", "content": "hi"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
NESTED = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}"


def order(source: str, **options: Any) -> TemplateOrder:
    return TemplateOrder(source, {"bos_token": "<b>"}, MESSAGES, options)


def render(*orders: TemplateOrder) -> list[Any]:
    async def main() -> list[Any]:
        templates = ForeignTemplates()
        work = [templates.render(one) for one in orders]
        return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 60)

    results = asyncio.run(main())
    assert not psutil.Process().children(), "a process is left"
    return results


def test_the_same_text_as_here() -> None:
    (text, own, continued) = render(
        order(CHAT_TEMPLATE),
        order("{{ bos_token }}{{ style }}", kwargs={"style": "x"}),
        order(CHAT_TEMPLATE, continue_final_message=True),
    )
    assert text == "<s0>user\nhi<s1>\n<s0>assistant\n" and own == "<b>x" and continued == "<s0>user\nhi"


def test_any_value_of_a_request_can_travel() -> None:
    values = {"big": 10**30, "text": "é\ud800", "nested": [{"a": None, "b": 1.5}]}
    (text,) = render(order("{{ big }} {{ text }} {{ nested[0].b }}", kwargs=values))
    assert text == f"{10**30} é\ud800 1.5"


@pytest.mark.parametrize("source", [ENDLESS, DOUBLING, NESTED, "{{ 'a' * 10 ** 10 }}", "{{ '%2000000000d' % 1 }}"])
def test_a_template_that_never_ends_or_grows_is_a_400_both_times(source: str) -> None:
    for result in render(order(source), order(source)):
        assert isinstance(result, RequestError) and result.status == 400, result
        assert result.param in ("chat_template", "messages")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% if %}", "damaged"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "cannot take|refuses"),
        ("{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}", "characters"),
        ("x" * 70_000, "more than 65536"),
    ],
)
def test_mistakes_are_told(source: str, says: str) -> None:
    (result,) = render(order(source))
    assert isinstance(result, RequestError) and result.status == 400
    assert re.search(says, result.message), result.message


def test_a_request_that_is_given_up_leaves_no_process() -> None:
    async def main() -> None:
        task = asyncio.create_task(ForeignTemplates().render(order(ENDLESS)))
        while not psutil.Process().children():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert not psutil.Process().children()


def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_template, "MAX_WAITING", 2)
    results = render(*[order("fine")] * 3)
    assert results[:2] == ["fine", "fine"]
    assert isinstance(results[2], RequestError) and (results[2].status, results[2].retry_after) == (503, 2)
