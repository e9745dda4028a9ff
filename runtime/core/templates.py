"""Prompt templates: "a {red|blue} boat at __place__" stands for a prompt that the seed chooses.

    {red|blue|green}    one of the options; options can contain further ones
    {2$$a|b|c}          two different options in random order, with ", " between them
    __place__           a line of the list "place", which can be a template too
    \\{ \\} \\__           these characters themselves

Braces without "|" are kept, so that a prompt in JSON stays as it is. `models.wildcards` reads the lists. Source of the
notation: the extension sd-dynamic-prompts.
"""

import random
import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from runtime.core.errors import InvalidRequestError
from runtime.core.facts import shortened

# A list that names itself is found at this depth, and one that doubles with each line at this number of choices.
_DEEPEST = 20
_MOST_CHOICES = 5_000
_LIST = re.compile(r"__([^\W_](?:[\w/-]{0,100}?[^\W_])?)__(?!_)")
_COUNT = re.compile(r"\s*([0-9]{1,3})\$\$")
_ESCAPES = ("\\{", "\\}", "\\__")

# Returns the lines of a list; raises `InvalidRequestError` if it cannot be read.
Lines = Callable[[str], Sequence[str]]


def is_template(text: str) -> bool:
    """Return whether `expanded` may change a text."""
    return _LIST.search(text) is not None or any(mark in text for mark in _ESCAPES) or bool(_options(text))


def expanded(template: str, seed: int, lines: Lines) -> str:
    """Return the prompt that a seed chooses of a template; the same on every machine and version of Python.

    Args:
        lines: returns the lines of a list by its name.

    Raises:
        InvalidRequestError: for a list that cannot be read or is empty, a number of options that are not there, or
            lists that contain each other.
    """
    return _Expansion(random.Random(seed), lines).text(template, 0)


def literal(prompt: str) -> str:
    """Return the template that stands for a prompt exactly."""
    return prompt.replace("{", "\\{").replace("}", "\\}").replace("__", "\\__")


def as_written(prompt: str) -> str:
    """Return how to write a prompt in a request, so that it is not read as a template."""
    return literal(prompt) if is_template(prompt) else prompt


class _Expansion:
    """One pass over a template, from left to right; each choice takes the generator's next number."""

    def __init__(self, generator: random.Random, lines: Lines) -> None:
        self._generator = generator
        self._lines = lines
        self._choices = 0

    def text(self, template: str, depth: int) -> str:
        self._choices += 1
        if depth > _DEEPEST or self._choices > _MOST_CHOICES:
            raise InvalidRequestError("prompt", "request.template_too_deep", part=shortened(template), most=_DEEPEST)
        parts, at = list[str](), 0
        options = _options(template)
        while at < len(template):
            escape = next((mark for mark in _ESCAPES if template.startswith(mark, at)), None)
            named = _LIST.match(template, at)
            if escape is not None:
                parts.append(escape[1:])
                at += len(escape)
            elif named is not None:
                parts.append(self._line(named[1], depth))
                at = named.end()
            elif at in options:
                choices, at = options[at]
                parts.append(self._chosen(choices, depth))
            else:
                parts.append(template[at])
                at += 1
        return "".join(parts)

    def _line(self, name: str, depth: int) -> str:
        return self.text(self._one_of(self._lines(name)), depth + 1)

    def _chosen(self, options: list[str], depth: int) -> str:
        count = _COUNT.match(options[0])
        if count is None:
            return self.text(self._one_of(options), depth + 1)
        options[0] = options[0][count.end() :]
        wanted = int(count[1])
        if not 1 <= wanted <= len(options):
            raise InvalidRequestError("prompt", "request.template_count", count=wanted, options=len(options))
        chosen = [options.pop(self._index(options)) for _ in range(wanted)]
        return ", ".join(self.text(option, depth + 1) for option in chosen)

    def _one_of(self, options: Sequence[str]) -> str:
        return options[self._index(options)]

    def _index(self, options: Sequence[str]) -> int:
        # Python promises the same numbers in every version for `random` alone.
        return int(self._generator.random() * len(options))


def _options(text: str) -> dict[int, tuple[list[str], int]]:
    """Return the options of each pair of braces that has "|", and the index after it, by the index of its start."""
    found = dict[int, tuple[list[str], int]]()
    # Of each open brace: where it and the marks after it are.
    opened = list[list[int]]()
    at = 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "{":
            opened.append([at])
        elif text[at] == "|" and opened:
            opened[-1].append(at)
        elif text[at] == "}" and opened:
            marks = opened.pop()
            if len(marks) > 1:
                ends = pairwise([*marks, at])
                found[marks[0]] = ([text[start + 1 : end] for start, end in ends], at + 1)
        at += 1
    return found
