"""Prompt templates: what a seed makes of them, without files."""

import json

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.templates import expanded, is_template, literal

LISTS = {"color": ["red", "blue"], "sea/places": ["at __color__ sea"], "self": ["a __self__"]}
LISTS |= {f"double{n}": [f"__double{n + 1}__ __double{n + 1}__"] for n in range(15)} | {"double15": ["a"]}


def every(template: str, seeds: int = 60) -> set[str]:
    """Return what some seeds make of a template."""
    return {expanded(template, seed, LISTS.__getitem__) for seed in range(seeds)}


@pytest.mark.parametrize(
    ("template", "prompts"),
    [
        ("a {red|blue} boat", {"a red boat", "a blue boat"}),
        ("{a|{b|c}d}", {"a", "bd", "cd"}),
        ("a {|big} boat", {"a  boat", "a big boat"}),
        ("__color__ __sea/places__", {f"{a} at {b} sea" for a in ("red", "blue") for b in ("red", "blue")}),
        ("{2$$a|b|c}", {"a, b", "b, a", "a, c", "c, a", "b, c", "c, b"}),
        ("{ 1$$a|b}", {"a", "b"}),
        (r"\{a|b\} \__color__ {\{|\}}", {"{a|b} __color__ {", "{a|b} __color__ }"}),
        (r"{a\|b|a\|b}", {r"a\|b"}),
        ("a|b} {c|c}", {"a|b} c"}),
        ("{ {a|a}", {"{ a"}),
    ],
)
def test_each_option_is_chosen_by_some_seed(template: str, prompts: set[str]) -> None:
    assert is_template(template)
    assert every(template) == prompts


def test_the_same_seed_chooses_the_same_prompt_in_every_version() -> None:
    template = "{a|b|c|d|e} {2$$f|g|h} __color__"
    assert [expanded(template, seed, LISTS.__getitem__) for seed in (1, 7, 2**53 - 1)] == [
        "a h, g red",
        "b f, h red",
        "a f, g red",
    ]


@pytest.mark.parametrize(
    "prompt",
    [
        "a red boat",
        json.dumps({"scene": "a boat", "camera": ["still"]}),
        "a | b",
        "{a|b",
        "{a}",
        "}{",
        "snake_case __ __init",
        "____",
        r"a \ b",
        "(word:1.3)",
        "{" * 5_000,
    ],
)
def test_other_prompts_are_kept(prompt: str) -> None:
    assert not is_template(prompt)
    assert expanded(prompt, 1, LISTS.__getitem__) == prompt


@pytest.mark.parametrize("prompt", ["{a|b} __color__", "___color___", "}{|}", r"\{"])
def test_a_literal_template_stands_for_its_prompt(prompt: str) -> None:
    assert every(literal(prompt), 3) == {prompt}


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("__self__", "request.template_too_deep"),
        ("__double0__", "request.template_too_deep"),
        ("{3$$a|b}", "request.template_count"),
        ("{0$$a|b}", "request.template_count"),
    ],
)
def test_templates_are_refused(template: str, code: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        for seed in range(100):
            expanded(template, seed, LISTS.__getitem__)
    assert (refused.value.field, refused.value.code) == ("prompt", code)
