"""Prompts that change with time, such as "[0s: The person waves] [2s-3.5s: The person jumps]".

Without torch. Source: the format of FramePack-Studio. It rounds times to sections of (4 * window - 3) frames and counts
them from the end in inverted order; here each section takes the prompt of its own middle.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.models.sections import Section, Sections

# Patterns are matched to one bracket at a time and without ambiguity, so that reading takes linear time.
_BRACKET = re.compile(r"\[([^\[\]]*)(\]?)")
_SECONDS = r"\s*(\d{1,9}(?:\.\d+)?)\s*s\s*"
_TIMES = re.compile(rf"{_SECONDS}(?:-{_SECONDS})?")
# Begins with a number and then a unit, a range or a colon, as only times do.
_ATTEMPT = re.compile(r"\s*[-+]?(?:\d[\d.,e+]*|nan|inf(?:inity)?)\s*(?:m?s\b|sec|-|:)", re.IGNORECASE)


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
    """Return the prompts of a text in its order; a text without times is one prompt.

    Text outside of brackets is a prompt too. It applies where no other does, and comes first.
    """
    prompts = [timed for match in _BRACKET.finditer(prompt) if (timed := _read(match)) is not None]
    if not prompts:
        return (TimedPrompt(prompt, 0.0),)
    outside = " ".join(_BRACKET.sub(lambda match: match.group() if _read(match) is None else " ", prompt).split())
    return (*([TimedPrompt(outside, 0.0)] if outside else []), *prompts)


def has_times(prompt: str) -> bool:
    """Return whether a text has a part such as "[2s: …]"."""
    return any(_read(match) is not None for match in _BRACKET.finditer(prompt))


def unreadable_times(prompt: str) -> list[str]:
    """Return the parts of a text that look like times and cannot be read, or whose end is not after their start."""
    return [match.group() for match in _BRACKET.finditer(prompt) if _unreadable(match)]


def _read(match: re.Match[str]) -> TimedPrompt | None:
    """Return the prompt of a bracket; `None` if it has no times."""
    times, colon, text = match[1].partition(":")
    interval = _TIMES.fullmatch(times) if colon and match[2] else None
    if interval is None:
        return None
    return TimedPrompt(text.strip(), float(interval[1]), None if interval[2] is None else float(interval[2]))


def _unreadable(match: re.Match[str]) -> bool:
    timed = _read(match)
    if timed is None:
        return _ATTEMPT.match(match[1]) is not None
    return timed.end is not None and timed.end <= timed.start


def prompt_at(prompts: Sequence[TimedPrompt], seconds: float) -> str:
    """Return the text that applies at a time: of the prompt that started last and has not ended.

    Where none applies, it is the one that started last, or the first one before any has started.

    Args:
        prompts: from `timed_prompts`, in the order of time.
    """
    started = [prompt for prompt in prompts if prompt.start <= seconds]
    lasting = [prompt for prompt in started if prompt.end is None or seconds < prompt.end]
    return (lasting or started or prompts[:1])[-1].text


def section_prompts(prompt: str, sections: Sections, fps: int) -> list[str]:
    """Return the prompt of each section, in the order of sampling; all are `prompt` if it has no times."""
    timed = timed_prompts(prompt)
    return [prompt_of(timed, section, fps) for section in sections]


def prompt_of(prompts: Sequence[TimedPrompt], section: Section, fps: int) -> str:
    """Return a section's prompt: the one that applies in the middle of the frames that it makes."""
    return prompt_at(prompts, (section.span.start + section.span.stop) / 2 / fps)
