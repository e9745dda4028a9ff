"""Weights of words in prompts: what is a weight, and what is text."""

import pytest

from runtime.core.prompt_weights import read_weights


def spans(prompt: str) -> list[tuple[str, float]]:
    """Return the runs of characters with the same weight."""
    read = read_weights(prompt)
    runs: list[tuple[str, float]] = []
    for character, weight in zip(read.text, read.weights or [1.0] * len(read.text), strict=True):
        if runs and runs[-1][1] == weight:
            runs[-1] = (runs[-1][0] + character, weight)
        else:
            runs.append((character, weight))
    return runs


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a (red:1.3) boat", [("a ", 1), ("red", 1.3), (" boat", 1)]),
        ("(a boat: 2 )", [("a boat", 2)]),
        ("(a:.5)(b:0)", [("a", 0.5), ("b", 0)]),
        ("((big:2) boat:1.5)", [("big", 2), (" boat", 1.5)]),
        ("(a (small) boat:1.5)", [("a (small) boat", 1.5)]),
        ("(海:1.2)", [("海", 1.2)]),
        ("(a:-1) (b:-.5)", [("a", -1), (" ", 1), ("b", -0.5)]),
        ("(at 16:9.5)", [("at 16", 9.5)]),
        (r"(a \(b\):1.2)", [("a (b)", 1.2)]),
        ("((a:1.2)", [("(", 1), ("a", 1.2)]),
    ],
)
def test_weights(prompt: str, expected: list[tuple[str, float]]) -> None:
    assert spans(prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("a (red) boat (16:9) at dawn :)", None),
        ("a film (starts at 10:30)", None),
        ("a match (ends 3:-2)", None),
        ("(a:b) (a:) (:1.3) ( :1) (4:3) ()", None),
        ("((((a", None),
        ("a)))", None),
        ("(a:1)", "a"),
        (r"\(red:1.3\) boat", "(red:1.3) boat"),
        (r"(red:1.3\) boat", "(red:1.3) boat"),
        ("(" * 2_500 + ")" * 2_500, None),
    ],
)
def test_other_parentheses_are_text(prompt: str, text: str | None) -> None:
    read = read_weights(prompt)
    assert (read.text, read.weights) == (prompt if text is None else text, ())
