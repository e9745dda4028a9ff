"""Prompts that change with time, and the prompt of each section."""

import time
from itertools import product

import pytest

from runtime.models.sections import SamplingType, Sections
from runtime.models.timed_prompts import TimedPrompt, prompt_at, prompt_of, timed_prompts, unreadable_times


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a red boat", (TimedPrompt("a red boat", 0),)),
        ("", (TimedPrompt("", 0),)),
        ("a [red] boat", (TimedPrompt("a [red] boat", 0),)),
        ("[0s: waves] [2.5s: jumps]", (TimedPrompt("waves", 0), TimedPrompt("jumps", 2.5))),
        ("[2s:jumps][ 0 s - 1.5 s : waves: hello ]", (TimedPrompt("jumps", 2), TimedPrompt("waves: hello", 0, 1.5))),
        ("[0s: ] walks", (TimedPrompt("walks", 0), TimedPrompt("", 0))),
        ("A person [1s: jumps]\n on  grass", (TimedPrompt("A person on grass", 0), TimedPrompt("jumps", 1))),
    ],
)
def test_reads_times(prompt: str, expected: tuple[TimedPrompt, ...]) -> None:
    assert timed_prompts(prompt) == expected
    assert unreadable_times(prompt) == []


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("[2: jumps]", ["[2: jumps]"]),
        ("[0s: waves] [1-2s: jumps]", ["[1-2s: jumps]"]),
        ("[0,5s: waves]", ["[0,5s: waves]"]),
        ("[1s: waves", ["[1s: waves"]),
        ("[3s-1s: waves]", ["[3s-1s: waves]"]),
        ("[1s-1s: waves]", ["[1s-1s: waves]"]),
        ("[4 people] walk", []),
        ("[4 sheep] walk with [information: none]", []),
        ("[2 sec: jumps]", ["[2 sec: jumps]"]),
        ("[500ms: jumps]", ["[500ms: jumps]"]),
        ("[-1s: jumps]", ["[-1s: jumps]"]),
        ("[nans: jumps] [inf s: a] [Infinity: b]", ["[nans: jumps]", "[inf s: a]", "[Infinity: b]"]),
        ("[1e9s: jumps]", ["[1e9s: jumps]"]),
        (f"[{'9' * 400}s: jumps]", [f"[{'9' * 400}s: jumps]"]),
        ("[0s: a [red] boat]", ["[0s: a "]),
    ],
)
def test_finds_times_that_cannot_be_read(prompt: str, expected: list[str]) -> None:
    assert unreadable_times(prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "seconds", "expected"),
    [
        ("[1s: a] [2s: b]", 0.5, "a"),
        ("[1s: a] [2s: b]", 1.99, "a"),
        ("[1s: a] [2s: b]", 2, "b"),
        ("[1s: a] [2s: b]", 60, "b"),
        ("[0s-1s: a] [2s: b]", 1.5, "a"),
        ("outside [1s-2s: a] [3s: b]", 0.5, "outside"),
        ("outside [1s-2s: a] [3s: b]", 2.5, "outside"),
        ("outside [1s-2s: a] [3s: b]", 4, "b"),
    ],
)
def test_prompt_at_a_time(prompt: str, seconds: float, expected: str) -> None:
    assert prompt_at(timed_prompts(prompt), seconds) == expected


@pytest.mark.parametrize(
    ("sampling_type", "expected"),
    [(SamplingType.VANILLA, ["a", "b", "b"]), (SamplingType.INVERTED_ANTI_DRIFTING, ["b", "b", "a"])],
)
def test_each_section_has_the_prompt_of_its_time(sampling_type: SamplingType, expected: list[str]) -> None:
    prompts = timed_prompts("[0s: a] [1.2s: b]")
    assert [prompt_of(prompts, section, 30) for section in Sections(3, sampling_type)] == expected


@pytest.mark.slow
def test_hostile_texts_take_linear_time(subtests: pytest.Subtests) -> None:
    """Quadratic time would be minutes of the processor; linear time is a twentieth of a second."""
    for start, unit in product(["", "[0", "[0s:", "[0s - ", "[0s: a"], ["[", " ", "0", "-", "[0s: ", "[0s:a]", "[nan"]):
        text = start + unit * (100_000 // len(unit)) + "["
        for prompt in (text, text + "]"):
            with subtests.test(start=start, unit=unit, end=prompt[-1]):
                began = time.process_time()
                timed_prompts(prompt)
                unreadable_times(prompt)
                assert time.process_time() - began < 2
