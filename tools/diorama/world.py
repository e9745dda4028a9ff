"""Diorama's world: attributes, random scenes, and the combinations held out from training.

Knows nothing about words (captions.py) or pixels (render.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

SUBJECTS = (
    "boat", "balloon", "bird", "fish", "car", "train", "kite", "rocket", "ball", "star", "butterfly", "cat",
)  # fmt: skip
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "white")
BACKDROPS = ("sea", "hills", "city", "desert", "snow", "sky")
TIMES = ("morning", "day", "sunset", "night")
WEATHERS = ("clear", "rain", "snow")
MOTIONS = ("left", "right", "up", "down", "bouncing", "circling")

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "subject": SUBJECTS,
    "colour": COLOURS,
    "motion": MOTIONS,
    "backdrop": BACKDROPS,
    "time": TIMES,
    "weather": WEATHERS,
}

# Never shown in training; grade.py asks for them to see whether the parts compose.
HELD_OUT_COLOURS = frozenset(
    {
        ("boat", "purple"), ("balloon", "green"), ("bird", "orange"), ("fish", "red"), ("car", "pink"),
        ("train", "white"), ("kite", "blue"), ("rocket", "yellow"), ("ball", "purple"), ("star", "green"),
        ("butterfly", "red"), ("cat", "blue"),
    }
)  # fmt: skip
HELD_OUT_BACKDROPS = frozenset(
    {("boat", "desert"), ("train", "sea"), ("fish", "city"), ("rocket", "hills"), ("cat", "snow"), ("kite", "sky")}
)
HELD_OUT_MOTIONS = frozenset(
    {("car", "up"), ("balloon", "bouncing"), ("bird", "down"), ("star", "left"), ("ball", "circling"),
     ("butterfly", "right")}
)  # fmt: skip

# What a person draws where the words leave it open; the weather is clear, and the time is day but for stars.
USUAL_MOTIONS: dict[str, tuple[str, ...]] = {
    "boat": ("left", "right"), "balloon": ("up",), "bird": ("left", "right"), "fish": ("left", "right"),
    "car": ("left", "right"), "train": ("left", "right"), "kite": ("up", "circling"), "rocket": ("up",),
    "ball": ("bouncing",), "star": ("up", "right"), "butterfly": ("left", "circling"), "cat": ("left", "right"),
}  # fmt: skip
USUAL_BACKDROPS: dict[str, tuple[str, ...]] = {
    "boat": ("sea",), "balloon": ("hills", "sky"), "bird": ("hills", "sky"), "fish": ("sea",),
    "car": ("city", "hills"), "train": ("hills",), "kite": ("hills",), "rocket": ("sky",), "ball": ("hills",),
    "star": ("sky",), "butterfly": ("hills",), "cat": ("hills", "city"),
}  # fmt: skip
USUAL_TIMES: dict[str, tuple[str, ...]] = {s: ("night",) if s == "star" else ("day",) for s in SUBJECTS}
USUAL_WEATHERS: dict[str, tuple[str, ...]] = {s: ("clear",) for s in SUBJECTS}
USUAL = {"motion": USUAL_MOTIONS, "backdrop": USUAL_BACKDROPS, "time": USUAL_TIMES, "weather": USUAL_WEATHERS}

TWO_SUBJECTS = 0.25  # share of scenes with two subjects at once
JITTERS = 24  # free numbers per scene for placement and shape


@dataclass(frozen=True)
class Scenes:
    """A batch of B scenes as codes into the tuples above.

    ``subject`` and ``colour`` are (B, 2); the second column is -1 where there is one subject. ``motion``,
    ``backdrop``, ``time`` and ``weather`` are (B,). ``jitter`` is (B, JITTERS) in 0..1;
    where ``midway`` changed it, up to 2.
    """

    subject: Tensor
    colour: Tensor
    motion: Tensor
    backdrop: Tensor
    time: Tensor
    weather: Tensor
    jitter: Tensor

    def __len__(self) -> int:
        return len(self.motion)

    def __getitem__(self, index: slice | Tensor) -> Scenes:
        return Scenes(*(getattr(self, f.name)[index] for f in fields(self)))

    @property
    def two(self) -> Tensor:
        """(B,) bool: whether two subjects are shown."""
        return self.subject[:, 1] >= 0


def join(parts: list[Scenes]) -> Scenes:
    """One batch out of several."""
    return Scenes(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Scenes)))


def _table(rows: tuple[str, ...], columns: tuple[str, ...], pairs: frozenset[tuple[str, str]]) -> Tensor:
    table = torch.zeros(len(rows), len(columns), dtype=torch.bool)
    for row, column in pairs:
        table[rows.index(row), columns.index(column)] = True
    return table


HELD_OUT_TABLES = {
    "colour": _table(SUBJECTS, COLOURS, HELD_OUT_COLOURS),
    "backdrop": _table(SUBJECTS, BACKDROPS, HELD_OUT_BACKDROPS),
    "motion": _table(SUBJECTS, MOTIONS, HELD_OUT_MOTIONS),
}


def held_out(scenes: Scenes) -> Tensor:
    """(B,) bool: whether any subject of the scene has a combination held out from training."""
    result = torch.zeros(len(scenes), dtype=torch.bool)
    for slot in (0, 1):
        subject = scenes.subject[:, slot]
        colour = scenes.colour[:, slot].clamp(min=0)
        safe = subject.clamp(min=0)
        bad = HELD_OUT_TABLES["colour"][safe, colour]
        bad |= HELD_OUT_TABLES["backdrop"][safe, scenes.backdrop]
        bad |= HELD_OUT_TABLES["motion"][safe, scenes.motion]
        result |= bad & (subject >= 0)
    return result


def midway(scenes: Scenes, seed: int) -> Scenes:
    """The same scenes, entered at any time: what moves in a straight line starts anywhere on its way."""
    jitter = scenes.jitter.clone()
    jitter[:, 2:4] += torch.rand(len(scenes), 2, generator=torch.Generator().manual_seed(seed))
    return replace(scenes, jitter=jitter)


def make_usual(scenes: Scenes, generator: torch.Generator, share: float) -> Scenes:
    """The same scenes with what is usual for the first subject: all attributes in half of ``share``, in the other half
    each with an even chance."""
    count = len(scenes)
    luck = torch.rand(count, generator=generator)
    values = {}
    for attribute, usual in USUAL.items():
        names = ATTRIBUTES[attribute]
        chances = torch.tensor([[float(n in usual[s]) for n in names] for s in SUBJECTS])[scenes.subject[:, 0]]
        chosen = torch.multinomial(chances, 1, generator=generator)[:, 0]
        change = (luck < share / 2) | ((luck < share) & (torch.rand(count, generator=generator) < 0.5))
        values[attribute] = torch.where(change, chosen, getattr(scenes, attribute))
    return replace(scenes, **values)


def _draw(count: int, generator: torch.Generator, two_subjects: float) -> Scenes:
    def code(options: tuple[str, ...], *shape: int) -> Tensor:
        return torch.randint(len(options), (count, *shape), generator=generator)

    subject, colour = code(SUBJECTS, 2), code(COLOURS, 2)
    same = subject[:, 0] == subject[:, 1]
    # A pair differs in colour, save twins ("two red balloons"), which share it.
    shifted = (colour[:, 0] + 1 + code(COLOURS[1:])) % len(COLOURS)
    colour[:, 1] = torch.where(same, colour[:, 0], shifted)
    twin = torch.rand(count, generator=generator) < 0.3
    subject[:, 1] = torch.where(twin, subject[:, 0], subject[:, 1])
    colour[:, 1] = torch.where(subject[:, 0] == subject[:, 1], colour[:, 0], colour[:, 1])
    alone = torch.rand(count, generator=generator) >= two_subjects
    subject[alone, 1] = -1
    colour[alone, 1] = -1
    weather = torch.multinomial(torch.tensor([0.4, 0.3, 0.3]), count, replacement=True, generator=generator)
    jitter = torch.rand(count, JITTERS, generator=generator)
    return Scenes(subject, colour, code(MOTIONS), code(BACKDROPS), code(TIMES), weather, jitter)


def sample(
    count: int, seed: int, *, keep: str = "seen", two_subjects: float = TWO_SUBJECTS, usual: float = 0.0
) -> Scenes:
    """``count`` random scenes from ``seed``, a share of them ``usual`` (see ``make_usual``).

    ``keep`` is "seen" (allowed in training), "held_out" (only held-out combinations) or "any".
    """
    generator = torch.Generator().manual_seed(seed)
    chosen: list[Scenes] = []
    have = 0
    while have < count or not chosen:
        drawn = _draw(max(2 * count, 64), generator, two_subjects)
        if usual:
            drawn = make_usual(drawn, generator, usual)
        if keep != "any":
            mask = held_out(drawn)
            drawn = drawn[mask if keep == "held_out" else ~mask]
        chosen.append(drawn)
        have += len(drawn)
    return join(chosen)[slice(count)]
