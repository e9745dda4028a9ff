"""Prompts that change with time, such as "[0s: The person waves] [2s-3.5s: The person jumps]".

Without torch. Source: the format of FramePack-Studio. It rounds times to sections of (4 * window - 3) frames and counts
them from the end in inverted order; here each section takes the prompt of its own middle.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.models.sections import Section, Sections

_SECONDS = r"(\d+(?:\.\d+)?)\s*s"
_TIMED = re.compile(rf"\[\s*{_SECONDS}\s*(?:-\s*{_SECONDS}\s*)?:\s*([^\[\]]*?)\s*\]")
# Begins with a number and then a unit, a range or a colon, as only times do.
_ATTEMPT = re.compile(r"\[\s*\d+(?:[.,]\d+)?\s*(?:s|-|:)[^\[\]]*\]?")


@dataclass(frozen=True)
class TimedPrompt:
    """A prompt and when it applies.

    Attributes:
        start: in seconds of the video.
        end: in seconds; `None` until the next prompt starts.
    """

    text: str
    start: float
    end: float | None = None


def timed_prompts(prompt: str) -> tuple[TimedPrompt, ...]:
    """Return the prompts of a text in the order of time; a text without times is one prompt.

    Text outside of brackets is a prompt too. It applies where no other does.
    """
    found = [
        TimedPrompt(text, float(start), None if end is None else float(end))
        for start, end, text in (match.groups() for match in _TIMED.finditer(prompt))
    ]
    outside = " ".join(_TIMED.sub(" ", prompt).split()) if found else prompt
    untimed = [TimedPrompt(outside, 0.0)] if outside or not found else []
    return (*untimed, *sorted(found, key=lambda one: one.start))


def unreadable_times(prompt: str) -> list[str]:
    """Return the parts of a text that look like times and cannot be read, or whose end is not after their start."""
    unread = [match.group() for match in _ATTEMPT.finditer(_TIMED.sub(" ", prompt))]
    reversed_ = [
        match.group()
        for match in _TIMED.finditer(prompt)
        if match[2] is not None and float(match[2]) <= float(match[1])
    ]
    return unread + reversed_


def prompt_at(prompts: Sequence[TimedPrompt], seconds: float) -> str:
    """Return the text that applies at a time: of the prompt that started last and has not ended.

    Where none applies, it is the one that started last, or the first one before any has started.

    Args:
        prompts: from `timed_prompts`.
    """
    started = [one for one in prompts if one.start <= seconds]
    lasting = [one for one in started if one.end is None or seconds < one.end]
    return (lasting or started or prompts[:1])[-1].text


def section_prompts(prompt: str, sections: Sections, fps: int) -> list[str]:
    """Return the prompt of each section, in the order of sampling; all are `prompt` if it has no times."""
    timed = timed_prompts(prompt)
    return [prompt_of(timed, section, fps) for section in sections]


def prompt_of(prompts: Sequence[TimedPrompt], section: Section, fps: int) -> str:
    """Return a section's prompt: the one that applies in the middle of the frames that it makes."""
    return prompt_at(prompts, (section.span.start + section.span.stop) / 2 / fps)
