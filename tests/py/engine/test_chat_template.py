"""What a chat template takes is read off it, by vLLM's rules."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("transformers")

from flexinfer.engine.chat_template import TemplateTraits, template_source, template_traits
from flexinfer.errors import RequestError
from helpers.tiny_models import CHAT_TEMPLATE, make_tokenizer

PARTS = "{% for p in m['content'] %}{{ p.text }}{% endfor %}"


def loop(body: str, messages: str = "messages") -> str:
    return "{% for m in " + messages + " %}" + body + "{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        loop(PARTS),
        loop("{% for p in m.content %}{{ p.text }}{% endfor %}"),
        loop("{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"),
        loop("{% for p in m.content | list %}{{ p.text }}{% endfor %}"),
        loop(PARTS, "messages[1:]"),
        "{% set rest = messages[1:] %}{% set rest = rest %}" + loop(PARTS, "rest"),
        loop("{% set content = m.content %}{% for p in content %}{{ p.text }}{% endfor %}"),
        "{% macro say(words) %}{% for p in words %}{{ p.text }}{% endfor %}{% endmacro %}"
        + loop("{{ say(m.content) }}"),
        "{% macro say(words) %}{% for p in words %}{{ p.text }}{% endfor %}{% endmacro %}"
        + loop("{{ say(words=m.content) }}"),
        "{% for m in messages %}{% generation %}" + PARTS + "{% endgeneration %}{% endfor %}",
    ],
)
def test_a_template_that_goes_through_contents_takes_parts(source: str) -> None:
    assert template_traits(source).takes_parts


@pytest.mark.parametrize(
    "source",
    [
        CHAT_TEMPLATE,
        loop("{{ m.content }}"),
        loop("{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}{{ m.content }}"),
        loop("{{ m.content }}") + "{% for t in tools %}{{ t }}{% endfor %}",
        # Its parameter is called content, but gets something else.
        "{% macro say(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}"
        + loop("{{ say(tools) }}{{ m.content }}"),
        "{% if",
        "",
    ],
)
def test_all_others_take_texts(source: str) -> None:
    assert not template_traits(source).takes_parts


def test_a_caller_may_know_better() -> None:
    assert template_traits(CHAT_TEMPLATE, "openai").takes_parts
    assert not template_traits(loop(PARTS), "string").takes_parts
    with pytest.raises(RequestError, match="chat_template_content_format must be one of 'auto'"):
        template_traits(CHAT_TEMPLATE, "parts")


def test_a_developer_is_known_by_the_role() -> None:
    assert template_traits("{% if m['role'] == 'developer' %}").knows_developer
    assert template_traits('{% if m.role == "developer" %}').knows_developer
    assert not template_traits("{# for a developer #}").knows_developer


def test_a_template_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read: list[str] = []
    monkeypatch.setattr(
        "flexinfer.engine.chat_template._takes_parts", lambda source: num_read.append(source)
    )
    for _ in range(3):
        template_traits("{{ 'read once' }}")
    assert len(num_read) == 1


def test_of_several_templates_that_which_renders_is_read() -> None:
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.chat_template = {"default": "a", "tool_use": "b", "other": "c"}
    assert template_source(tokenizer) == "a"
    assert template_source(tokenizer, None, []) == "b"
    assert template_source(tokenizer, "other") == "c"
    assert template_source(tokenizer, "{{ own }}") == "{{ own }}"
    assert template_traits(template_source(object())) == TemplateTraits(knows_developer=False)
