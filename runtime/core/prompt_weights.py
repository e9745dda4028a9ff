"""Weights of a prompt's words, as in "a (red:1.3) boat".

Only parentheses that end with a colon and a number are weights; others, such as "(16:9)" or "(at dusk)", are text.
Escaped with a backslash, parentheses are always text. Within other weights, the inner one counts. Source of the
notation: `token_weights` of ComfyUI's `sd1_clip.py`, without its parentheses that stand for 1.1.
"""

import re
from dataclasses import dataclass

# The largest weight. Embeddings that are scaled further give noise.
MOST_WEIGHT = 4.0
# At the end of the text in parentheses. The number of a time or a proportion follows a digit and has no fraction.
_WEIGHT = re.compile(r"(?:(?<!\d):\s*(?P<whole>-?[0-9]{1,4})|:\s*(?P<part>-?[0-9]{0,4}\.[0-9]{0,8}[0-9]))\s*$")
_LONGEST_WEIGHT = 40
_ESCAPED = ("\\(", "\\)")


@dataclass(frozen=True)
class WeightedText:
    """A prompt as it is encoded.

    Attributes:
        text: without the notation of weights.
        weights: of each character; empty if all are 1.
    """

    text: str
    weights: tuple[float, ...] = ()


def read_weights(prompt: str) -> WeightedText:
    """Return a prompt's text and weights; they may be negative or beyond `MOST_WEIGHT`."""
    text, weights = list[str](), list[float | None]()
    # Of each open parenthesis: its index in the text.
    opened = list[int]()
    at = 0
    while at < len(prompt):
        escaped = prompt.startswith(_ESCAPED, at)
        at += escaped
        character = prompt[at]
        at += 1
        if character == "(" and not escaped:
            opened.append(len(text))
        elif character == ")" and not escaped and opened:
            start = opened.pop()
            weight = _weight(text[start + 1 :])
            if weight is not None:
                value, end = weight
                inner = [value if given is None else given for given in weights[start + 1 : start + 1 + end]]
                text[start:], weights[start:] = text[start + 1 : start + 1 + end], inner
                continue
        text.append(character)
        weights.append(None)
    given = tuple(1.0 if weight is None else weight for weight in weights)
    return WeightedText("".join(text), () if set(given) <= {1.0} else given)


def _weight(inside: list[str]) -> tuple[float, int] | None:
    """Return the weight that ends the characters in parentheses, and how many come before it; `None` without one."""
    tail = "".join(inside[-_LONGEST_WEIGHT:])
    match = _WEIGHT.search(tail)
    if match is None:
        return None
    end = len(inside) - len(tail) + match.start()
    return (float(match["whole"] or match["part"]), end) if any(map(str.isalpha, inside[:end])) else None
