"""Six backdrops, four skies and three weathers as flat paper layers with soft shadows.

All take ``x`` and ``y`` or ``v`` (down) in half-shorter-sides and ``t`` in seconds, broadcastable to (n, T, H, W), and
return signed distances, negative inside. A layer of ground fills all that lies below its edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tools.diorama import sdf

Rgb = tuple[float, float, float]

# Per time of day: sky at the top, in the middle and at the horizon; how it tints the ground; clouds; sun or moon.
SKY: dict[str, tuple[Rgb, Rgb, Rgb]] = {
    "morning": ((0.70, 0.72, 0.93), (0.93, 0.80, 0.89), (1.00, 0.91, 0.80)),
    "day": ((0.27, 0.60, 0.92), (0.47, 0.76, 0.96), (0.74, 0.91, 0.98)),
    "sunset": ((0.47, 0.20, 0.46), (0.91, 0.38, 0.33), (1.00, 0.72, 0.34)),
    "night": ((0.05, 0.07, 0.20), (0.10, 0.13, 0.32), (0.19, 0.24, 0.48)),
}
GROUND_TINT: dict[str, Rgb] = {
    "morning": (1.02, 0.93, 0.96), "day": (1.0, 1.0, 1.0), "sunset": (0.96, 0.66, 0.60), "night": (0.42, 0.46, 0.70),
}  # fmt: skip
SUBJECT_TINT: dict[str, Rgb] = {
    "morning": (1.0, 0.98, 0.99), "day": (1.0, 1.0, 1.0), "sunset": (1.0, 0.93, 0.90), "night": (0.84, 0.86, 0.96),
}  # fmt: skip
CLOUD: dict[str, Rgb] = {
    "morning": (1.0, 0.96, 0.95), "day": (1.0, 1.0, 1.0), "sunset": (1.0, 0.76, 0.62), "night": (0.33, 0.38, 0.62),
}  # fmt: skip
SUN: dict[str, tuple[Rgb, float, float, float]] = {  # colour, x as a share of the half-width, v, radius
    "morning": ((1.00, 0.95, 0.72), -0.62, -0.26, 0.24),
    "day": ((1.00, 0.86, 0.30), 0.62, -0.46, 0.23),
    "sunset": ((1.00, 0.50, 0.24), 0.30, -0.12, 0.34),
    "night": ((0.97, 0.95, 0.82), 0.58, -0.42, 0.23),
}
# Layers of ground from far to near.
GROUND: dict[str, tuple[Rgb, ...]] = {
    "sea": ((0.44, 0.78, 0.86), (0.25, 0.62, 0.78), (0.14, 0.47, 0.69), (0.08, 0.34, 0.58)),
    "hills": ((0.62, 0.80, 0.60), (0.42, 0.68, 0.40), (0.26, 0.52, 0.30)),
    "city": ((0.66, 0.70, 0.80), (0.46, 0.49, 0.62), (0.34, 0.36, 0.44)),
    "desert": ((0.90, 0.66, 0.46), (0.94, 0.76, 0.48), (0.85, 0.62, 0.34)),
    "snow": ((0.68, 0.77, 0.90), (0.86, 0.92, 0.98), (0.97, 0.98, 1.0)),
    "sky": ((0.80, 0.87, 0.96), (0.90, 0.94, 0.99), (1.0, 1.0, 1.0)),
}
_HALF = 0.5


def hashed(*keys: Tensor | float) -> Tensor:
    """Repeatable noise in 0..1 from integer-like keys and a seed in 0..1."""
    total: Tensor | float = 0.0
    for key, weight in zip(keys, (12.9898, 78.233, 37.719, 9.151), strict=False):
        total = total + key * weight
    assert isinstance(total, Tensor)
    return torch.frac(torch.sin(total) * 437.585).abs()


def cloud(x: Tensor, y: Tensor, size: Tensor | float) -> Tensor:
    """Distance to a flat-bottomed cloud of three humps, about 2 sizes wide."""
    humps = torch.minimum(sdf.circle(x, y + 0.10 * size, 0.52 * size), sdf.circle(x - 0.58 * size, y, 0.36 * size))
    humps = torch.minimum(humps, sdf.circle(x + 0.60 * size, y - 0.02 * size, 0.34 * size))
    return torch.maximum(humps, y - 0.22 * size)


def drifting_clouds(x: Tensor, y: Tensor, t: Tensor, seed: Tensor, spacing: float, top: float) -> Tensor:
    """Distance to a sparse row of clouds near height ``top`` (half-shorter-sides), drifting slowly."""
    moved = x + 0.05 * t + 40 * seed
    cell = torch.floor(moved / spacing)
    size = 0.20 + 0.10 * hashed(cell, seed * 7)
    local = moved - (cell + 0.5) * spacing - (hashed(cell, seed * 3) - _HALF) * 0.3 * spacing
    return cloud(local, y - top - 0.22 * hashed(cell, seed * 5), size)


def scallops(x: Tensor, y: Tensor, t: Tensor, seed: Tensor, edge: Tensor | float, width: float, up: bool) -> Tensor:
    """Distance to a bank of round paper clouds, filling below ``edge`` (``up``: humps rise) or above it."""
    sign = 1.0 if up else -1.0
    moved = x + 0.04 * t + 30 * seed
    cell = torch.floor(moved / width)
    result = sign * (edge - y)
    for offset in (-1, 0, 1):
        key = cell + offset
        radius = width * (0.52 + 0.22 * hashed(key, seed * 11))
        result = torch.minimum(result, sdf.circle(moved - (key + 0.5) * width, y - edge, radius))
    return result


def sea(layer: int, x: Tensor, v: Tensor, t: Tensor, seed: Tensor) -> Tensor:
    """Rows of waves that slide against each other."""
    base = (0.06, 0.32, 0.56, 0.80)[layer]
    direction = 1.0 if layer % 2 else -1.0
    phase = 2 * math.pi * (seed * 3 + 0.37 * layer)
    crest = 0.075 * torch.sin((4.6 - 0.5 * layer) * x + direction * 1.3 * t + phase) * (0.35 + 0.2 * layer)
    return base + crest + 0.02 * torch.sin(1.1 * t + phase) - v


def hills(layer: int, x: Tensor, v: Tensor, t: Tensor, seed: Tensor) -> Tensor:
    """Rolling hills, the middle row with round trees."""
    base, height, width = ((0.10, 0.22, 1.3), (0.38, 0.16, 1.9), (0.72, 0.10, 1.5))[layer]
    phase = 2 * math.pi * (seed * 5 + 0.31 * layer)
    ridge = base - height * torch.sin(width * x + phase) + 0.3 * height * torch.sin(2.3 * width * x + 2 * phase)
    return ridge - v


def trees(x: Tensor, v: Tensor, t: Tensor, seed: Tensor, pine: bool) -> Tensor:
    """A sparse row of trees standing on the middle layer, round or pine."""
    spacing = 0.62
    moved = x + 20 * seed
    cell = torch.floor(moved / spacing)
    local = moved - (cell + 0.5) * spacing - 0.22 * (hashed(cell, seed * 3) - _HALF)
    local = local + 10.0 * (hashed(cell, seed * 17) < 0.35)
    sway = 0.012 * torch.sin(1.6 * t + 6 * hashed(cell, seed))
    foot = 0.46 + 0.06 * hashed(cell, seed * 9)
    up = v - foot
    size = 0.13 + 0.05 * hashed(cell, seed * 13)
    if pine:
        crown = sdf.triangle(local + sway * up, up, (-0.8 * size, 0.0), (0.8 * size, 0.0), (0.0, -2.6 * size))
        return torch.minimum(crown, sdf.box(local, up - 0.04, 0.03, 0.06))
    crown = sdf.circle(local - sway, up + 1.5 * size, size)
    return torch.minimum(crown, sdf.box(local, up + 0.25 * size, 0.028, 0.9 * size))


def skyline(layer: int, x: Tensor, v: Tensor, t: Tensor, seed: Tensor) -> Tensor:
    """Houses of uneven height; the nearest layer is the street."""
    if layer == 2:
        return 0.74 - v + 0 * x
    width, low, tall = ((0.34, 0.05, 0.50), (0.46, 0.30, 0.52))[layer]
    moved = x + 17 * seed + 0.19 * layer
    cell = torch.floor(moved / width)
    result: Tensor | None = None
    for offset in (-1, 0, 1):
        key = cell + offset
        top = low - tall * hashed(key, seed * (5 + layer))
        half = width * (0.40 + 0.10 * hashed(key, seed * 3))
        house = sdf.box(moved - (key + 0.5) * width, v - (top + 1.0), half, 1.0, 0.02)
        result = house if result is None else torch.minimum(result, house)
    assert result is not None
    return result


def windows(x: Tensor, v: Tensor, seed: Tensor) -> Tensor:
    """Distance to large windows in the near row of houses; some stay dark."""
    width = 0.46
    moved = x + 17 * seed + 0.19
    cell = torch.floor(moved / width)
    top = 0.30 - 0.52 * hashed(cell, seed * 6)
    column = (moved - (cell + 0.5) * width).abs() - 0.085
    row = v - top - 0.15
    step = 0.21
    number = torch.floor(row / step).clamp(min=0)
    lit = hashed(cell, number, seed * 3) * 3
    pane = sdf.box(column, row - (number + 0.5) * step + 0.06, 0.042, 0.052, 0.01)
    below = v - 0.66
    return torch.maximum(torch.maximum(pane, below), (0.9 - lit) * 0.1)


def dunes(layer: int, x: Tensor, v: Tensor, t: Tensor, seed: Tensor) -> Tensor:
    """Smooth dunes with a sharp side."""
    base, height, width = ((0.16, 0.13, 1.1), (0.42, 0.13, 1.4), (0.72, 0.09, 1.0))[layer]
    phase = 2 * math.pi * (seed * 7 + 0.23 * layer)
    wave = torch.sin(width * x + phase + 0.7 * torch.sin(width * x + phase))
    return base - height * wave - v


def cacti(x: Tensor, v: Tensor, seed: Tensor) -> Tensor:
    """A few cacti with two arms."""
    spacing = 1.0
    moved = x + 23 * seed
    cell = torch.floor(moved / spacing)
    local = moved - (cell + 0.5) * spacing - 0.4 * (hashed(cell, seed * 3) - _HALF)
    size = 0.85 + 0.35 * hashed(cell, seed * 5)
    lx, ly = local / size, (v - 0.60) / size
    trunk = sdf.segment(lx, ly, (0.0, 0.02), (0.0, -0.44), 0.062)
    arms = [trunk]
    for side, low, high in ((-0.16, -0.12, -0.30), (0.15, -0.20, -0.36)):
        arms.append(sdf.segment(lx, ly, (0.0, low), (side, low - 0.02), 0.045))
        arms.append(sdf.segment(lx, ly, (side, low - 0.02), (side, high), 0.045))
    return torch.stack(arms).amin(0) * size


def mountains(layer: int, x: Tensor, v: Tensor, t: Tensor, seed: Tensor) -> Tensor:
    """A far range of peaks, then fields of snow."""
    if layer == 0:
        phase = 4 * seed
        first = (torch.frac((x + phase + 40) * 0.62) - _HALF).abs() * 2
        second = (torch.frac((x + 1.7 * phase + 40) * 0.97 + 0.3) - _HALF).abs() * 2
        # Steep slopes measured upright look sharper than they are: ease them by their usual slope.
        return (0.42 - 0.82 * torch.maximum(first, 0.75 * second) - v) * 0.62
    base, height, width = ((0.38, 0.08, 1.7), (0.70, 0.07, 1.2))[layer - 1]
    phase = 2 * math.pi * (seed * 3 + 0.4 * layer)
    return base - height * torch.sin(width * x + phase) - v


def cloudbank(layer: int, x: Tensor, v: Tensor, t: Tensor, seed: Tensor) -> Tensor:
    """Banks of cloud at the foot of an open sky."""
    edge = (0.52, 0.74, 0.95)[layer]
    direction = 1.0 if layer % 2 else -1.0
    return scallops(x, v, direction * t, torch.frac(seed * (layer + 1) * 1.7), edge, 0.46 + 0.10 * layer, up=True)


GROWTH: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], Rgb]] = {
    "hills": (lambda x, v, t, seed: trees(x, v, t, seed, pine=False), (0.16, 0.42, 0.24)),
    "snow": (lambda x, v, t, seed: trees(x, v, t, seed, pine=True), (0.20, 0.46, 0.44)),
    "desert": (lambda x, v, t, seed: cacti(x, v, seed), (0.30, 0.55, 0.33)),
}

LAYERS: dict[str, Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "sea": sea, "hills": hills, "city": skyline, "desert": dunes, "snow": mountains, "sky": cloudbank,
}  # fmt: skip


def rain(x: Tensor, y: Tensor, t: Tensor, seed: Tensor) -> Tensor:
    """Distance to large slanting drops."""
    return _fall(x + 0.16 * y, y, t, seed, speed=0.95, cell=(0.42, 0.70), drop=True)


def flakes(x: Tensor, y: Tensor, t: Tensor, seed: Tensor) -> Tensor:
    """Distance to large slow flakes that sway."""
    return _fall(x, y, t, seed, speed=0.34, cell=(0.50, 0.50), drop=False)


def _fall(
    x: Tensor, y: Tensor, t: Tensor, seed: Tensor, *, speed: float, cell: tuple[float, float], drop: bool
) -> Tensor:
    width, height = cell
    moved_x = x + 31 * seed
    column = torch.floor(moved_x / width)
    fallen = y - speed * t + 29 * hashed(column, seed * 3)
    row = torch.floor(fallen / height)
    local_x = moved_x - (column + 0.5) * width - 0.30 * width * (hashed(column, row, seed) - _HALF)
    local_y = fallen - (row + 0.5) * height - 0.20 * height * (hashed(column, row, seed * 5) - _HALF)
    if drop:
        return sdf.segment(local_x, local_y, (0.0, -0.12), (0.0, 0.09), 0.036)
    sway = 0.04 * torch.sin(2.0 * t + 6.0 * hashed(column, row, seed * 7))
    return sdf.circle(local_x - sway, local_y, 0.048 + 0.026 * hashed(column, row, seed * 9))


def stars(x: Tensor, y: Tensor, t: Tensor, seed: Tensor) -> Tensor:
    """Distance to a scatter of small stars that swell and shrink slowly."""
    size = 0.46
    cx, cy = torch.floor((x + 19 * seed) / size), torch.floor((y + 13 * seed) / size)
    lx = x + 19 * seed - (cx + 0.25 + 0.5 * hashed(cx, cy, seed)) * size
    ly = y + 13 * seed - (cy + 0.25 + 0.5 * hashed(cx, cy, seed * 3)) * size
    twinkle = 0.006 * torch.sin(2.0 * t + 6.3 * hashed(cx, cy, seed * 5))
    return sdf.circle(lx, ly, 0.034 + 0.016 * hashed(cx, cy, seed * 7) + twinkle)
