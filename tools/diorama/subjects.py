"""The twelve subjects, each a list of parts in a frame of about -1..1 (x right, y down, facing right).

A painter takes coordinates (n, T, H, W) and the clock ``t`` in seconds (n, T, 1, 1), and returns parts back to
front: a signed distance and the name of a paint (see ``PAINTS``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tools.diorama import sdf

Part = tuple[Tensor, str]
Painter = Callable[[Tensor, Tensor, Tensor], list[Part]]

# Paints relative to the subject's colour ("main", "dark", "light") and fixed papers.
PAINTS: dict[str, tuple[float, float, float] | None] = {
    "main": None, "dark": None, "light": None,
    "cream": (0.98, 0.94, 0.84), "slate": (0.20, 0.23, 0.32), "wood": (0.55, 0.36, 0.22),
    "flame": (1.00, 0.62, 0.16), "glow": (1.00, 0.88, 0.42), "glass": (0.72, 0.88, 0.96), "smoke": (0.86, 0.87, 0.90),
}  # fmt: skip


def boat(x: Tensor, y: Tensor, t: Tensor) -> list[Part]:
    """A sailing boat whose sails fill and slacken."""
    billow = 0.06 * torch.sin(2.2 * t)
    hull = sdf.convex(x, y, [(-0.98, 0.38), (0.98, 0.38), (0.60, 0.86), (-0.62, 0.86)])
    mast = sdf.box(x + 0.02, y + 0.25, 0.04, 0.66)
    sail = sdf.triangle(x, y, (0.08, -0.92), (0.08, 0.24), (0.84 + billow, 0.20))
    jib = sdf.triangle(x, y, (-0.12, -0.72), (-0.12, 0.24), (-0.72 + billow, 0.22))
    stripe = torch.maximum(hull, (y - 0.50).abs() - 0.055)
    return [(mast, "wood"), (sail, "main"), (jib, "light"), (hull, "main"), (stripe, "cream")]


def balloon(x: Tensor, y: Tensor, t: Tensor) -> list[Part]:
    """A hot-air balloon with gores and a swinging basket."""
    sway = 0.05 * torch.sin(2.0 * t)
    top = sdf.ellipse(x, y + 0.28, 0.72, 0.68)
    skirt = sdf.convex(x, y, [(-0.60, 0.06), (0.60, 0.06), (0.22, 0.54), (-0.22, 0.54)])
    envelope = torch.minimum(top, skirt)
    outer = torch.maximum(envelope, -sdf.ellipse(x, y + 0.2, 0.46, 0.9))
    inner = torch.maximum(envelope, sdf.ellipse(x, y + 0.2, 0.17, 0.95))
    basket = sdf.box(x - sway, y - 0.84, 0.18, 0.13, 0.04)
    ropes = torch.minimum(
        sdf.segment(x, y, (-0.18, 0.5), (sway - 0.14, 0.78), 0.025),
        sdf.segment(x, y, (0.18, 0.5), (sway + 0.14, 0.78), 0.025),
    )
    return [(ropes, "slate"), (envelope, "main"), (outer, "dark"), (inner, "light"), (basket, "wood")]


def bird(x: Tensor, y: Tensor, t: Tensor) -> list[Part]:
    """A plump bird that beats its wing."""
    beat = torch.sin(2 * math.pi * 1.5 * t)
    tail = sdf.convex(x, y, [(-0.98, -0.22), (-0.35, -0.10), (-0.35, 0.22), (-0.90, 0.14)])
    body = sdf.ellipse(x + 0.02, y - 0.10, 0.60, 0.38)
    head = sdf.circle(x - 0.50, y + 0.18, 0.29)
    beak = sdf.convex(x, y, [(0.74, -0.30), (1.04, -0.14), (0.74, -0.04)])
    belly = torch.maximum(body, sdf.ellipse(x - 0.12, y - 0.34, 0.46, 0.26))
    tip = -0.30 - 0.62 * beat
    wing = sdf.triangle(x, y, (-0.30, 0.02), (0.26, 0.04), (-0.32, tip)) - 0.05
    eye = sdf.circle(x - 0.58, y + 0.24, 0.075)
    return [
        (tail, "dark"), (beak, "flame"), (body, "main"), (head, "main"), (belly, "light"), (wing, "dark"),
        (eye, "slate"),
    ]  # fmt: skip


def fish(x: Tensor, y: Tensor, t: Tensor) -> list[Part]:
    """A round fish with a wagging tail."""
    wag = 0.16 * torch.sin(2 * math.pi * 1.5 * t)
    tail = sdf.triangle(x, y, (-0.48, 0.0), (-1.02, -0.46 + wag), (-1.02, 0.46 + wag)) - 0.03
    fin = sdf.convex(x, y, [(-0.30, -0.62), (0.22, -0.34), (0.20, -0.1), (-0.32, -0.1)])
    body = sdf.ellipse(x - 0.12, y, 0.76, 0.47)
    head = torch.maximum(body, -sdf.circle(x + 0.35, y, 0.88))
    side = sdf.triangle(x, y, (0.16, 0.02), (-0.26, -0.14 + wag), (-0.22, 0.26 + wag)) - 0.03
    white = sdf.circle(x - 0.58, y + 0.12, 0.14)
    pupil = sdf.circle(x - 0.61, y + 0.12, 0.07)
    return [
        (tail, "dark"), (fin, "dark"), (body, "main"), (head, "light"), (side, "dark"), (white, "cream"),
        (pupil, "slate"),
    ]  # fmt: skip


def car(x: Tensor, y: Tensor, t: Tensor) -> list[Part]:
    """A small car with turning wheels."""
    cabin = sdf.convex(x, y, [(-0.42, -0.50), (0.26, -0.50), (0.56, 0.04), (-0.66, 0.04)])
    body = sdf.box(x, y - 0.20, 1.0, 0.27, 0.14)
    rear = sdf.convex(x, y, [(-0.36, -0.39), (-0.10, -0.39), (-0.10, -0.02), (-0.50, -0.02)])
    front = sdf.convex(x, y, [(0.02, -0.39), (0.20, -0.39), (0.40, -0.02), (0.02, -0.02)])
    lamp = sdf.circle(x - 0.88, y - 0.16, 0.09)
    parts: list[Part] = [(cabin, "main"), (body, "main"), (torch.minimum(rear, front), "glass"), (lamp, "glow")]
    spin = 7.0 * t
    for centre in (-0.52, 0.54):
        wx, wy = x - centre, y - 0.47
        parts.append((sdf.circle(wx, wy, 0.26), "slate"))
        rx, ry = sdf.rotate(wx, wy, spin)
        parts.append((sdf.box(rx, ry, 0.15, 0.05), "cream"))
    return parts


def train(x: Tensor, y: Tensor, t: Tensor) -> list[Part]:
    """A steam engine puffing two clouds."""
    parts: list[Part] = []
    for offset in (0.0, 0.5):
        age = torch.remainder(0.8 * t + offset, 1.0)
        size = 0.06 + 0.15 * torch.sin(math.pi * age)
        parts.append((sdf.circle(x - 0.50 + 0.9 * age, y + 0.74 + 0.14 * age, size), "smoke"))
    boiler = sdf.box(x - 0.25, y - 0.12, 0.70, 0.29, 0.16)
    cab = sdf.box(x + 0.56, y + 0.06, 0.36, 0.54, 0.05)
    roof = sdf.box(x + 0.56, y + 0.58, 0.46, 0.08, 0.06)
    chimney = sdf.convex(x, y, [(0.36, -0.60), (0.70, -0.60), (0.62, -0.1), (0.44, -0.1)])
    window = sdf.box(x + 0.56, y + 0.20, 0.20, 0.17, 0.05)
    plough = sdf.convex(x, y, [(0.72, 0.34), (0.92, 0.34), (1.08, 0.70), (0.72, 0.70)])
    base = sdf.box(x, y - 0.44, 0.92, 0.09)
    parts += [(chimney, "dark"), (boiler, "main"), (cab, "main"), (roof, "dark"), (window, "glass")]
    parts += [(plough, "dark"), (base, "dark")]
    for centre, radius in ((-0.54, 0.27), (0.10, 0.21), (0.56, 0.21)):
        wx, wy = x - centre, y - (0.78 - radius)
        parts.append((sdf.circle(wx, wy, radius), "slate"))
        rx, ry = sdf.rotate(wx, wy, 6.0 * t)
        parts.append((sdf.box(rx, ry, radius * 0.6, 0.05), "cream"))
    return parts


def kite(x: Tensor, y: Tensor, t: Tensor) -> list[Part]:
    """A kite in four panes with a waving tail of bows."""
    wave = 0.16 * torch.sin(5.0 * (y - 0.4) - 4.0 * t) * (y - 0.4).clamp(min=0) * 1.6
    tail = torch.maximum((x - wave).abs() - 0.035, torch.maximum(0.4 - y, y - 1.06))
    pane = sdf.convex(x, y, [(0.0, -0.98), (0.62, -0.30), (0.0, 0.56), (-0.62, -0.30)])
    down = y + 0.30
    opposite = torch.minimum(torch.maximum(-x, -down), torch.maximum(x, down))
    quarter = torch.maximum(pane, opposite)
    bows: list[Part] = []
    for height in (0.76, 1.02):
        centre = 0.16 * torch.sin(5.0 * (height - 0.4) - 4.0 * t) * (height - 0.4) * 1.6
        bow = torch.minimum(
            sdf.triangle(x - centre, y - height, (0.0, 0.0), (-0.22, -0.11), (-0.22, 0.11)),
            sdf.triangle(x - centre, y - height, (0.0, 0.0), (0.22, -0.11), (0.22, 0.11)),
        )
        bows.append((bow, "main"))
    return [(tail, "slate"), *bows, (pane, "main"), (quarter, "light")]


def rocket(x: Tensor, y: Tensor, t: Tensor) -> list[Part]:
    """A rocket standing on its flame, nose up."""
    flicker = 0.10 * torch.sin(2 * math.pi * 2.0 * t)
    flame = sdf.triangle(x, y, (-0.22, 0.50), (0.22, 0.50), (0.0, 1.02 + flicker)) - 0.05
    core = sdf.triangle(x, y, (-0.10, 0.50), (0.10, 0.50), (0.0, 0.80 + flicker)) - 0.03
    body = torch.maximum(sdf.circle(x - 0.62, y, 1.03), sdf.circle(x + 0.62, y, 1.03))
    hull = torch.maximum(body, y - 0.56)
    nose = torch.maximum(hull, y + 0.42)
    fins = torch.minimum(
        sdf.convex(x, y, [(-0.30, 0.10), (-0.30, 0.56), (-0.66, 0.80), (-0.62, 0.42)]),
        sdf.convex(x, y, [(0.30, 0.10), (0.62, 0.42), (0.66, 0.80), (0.30, 0.56)]),
    )
    ring = sdf.circle(x, y + 0.12, 0.21)
    pane = sdf.circle(x, y + 0.12, 0.14)
    return [
        (flame, "flame"), (core, "glow"), (fins, "dark"), (hull, "main"), (nose, "dark"), (ring, "cream"),
        (pane, "glass"),
    ]  # fmt: skip


def ball(x: Tensor, y: Tensor, t: Tensor) -> list[Part]:
    """A beach ball; the caller rolls it."""
    disc = sdf.circle(x, y, 0.78)
    band = torch.maximum(disc, sdf.ellipse(x, y, 0.30, 1.2))
    middle = torch.maximum(disc, (y + 0.0 * t).abs() - 0.13)
    knob = sdf.circle(x, y, 0.17)
    return [(disc, "main"), (band, "light"), (middle, "cream"), (knob, "dark")]


def star(x: Tensor, y: Tensor, t: Tensor) -> list[Part]:
    """A smiling star that twinkles a little."""
    pulse = 1.0 + 0.04 * torch.sin(4.0 * t)
    outer = sdf.star(x / pulse, y / pulse - 0.04, 0.98, 0.52) - 0.02
    inner = sdf.star(x / pulse, y / pulse - 0.04, 0.66, 0.52)
    eyes = torch.minimum(sdf.ellipse(x + 0.17, y - 0.02, 0.065, 0.10), sdf.ellipse(x - 0.17, y - 0.02, 0.065, 0.10))
    arc = (torch.hypot(x, y - 0.14) - 0.15).abs() - 0.035
    smile = torch.maximum(arc, 0.19 - y)
    return [(outer, "main"), (inner, "light"), (torch.minimum(eyes, smile), "slate")]


def butterfly(x: Tensor, y: Tensor, t: Tensor) -> list[Part]:
    """A butterfly seen from above, folding its wings."""
    fold = 0.78 + 0.22 * torch.cos(2 * math.pi * 1.5 * t)
    mx = x.abs() / fold
    ux, uy = sdf.rotate(mx - 0.50, y + 0.30, -0.6)
    lx, ly = sdf.rotate(mx - 0.40, y - 0.40, 0.6)
    upper = sdf.ellipse(ux, uy, 0.54, 0.38)
    lower = sdf.ellipse(lx, ly, 0.40, 0.30)
    spots = torch.minimum(sdf.circle(mx - 0.60, y + 0.38, 0.17), sdf.circle(mx - 0.46, y - 0.46, 0.12))
    body = sdf.segment(x, y, (0.0, -0.42), (0.0, 0.60), 0.085)
    feelers = sdf.segment(x.abs(), y, (0.02, -0.46), (0.22, -0.84), 0.035)
    return [(upper, "main"), (lower, "dark"), (spots, "cream"), (feelers, "slate"), (body, "slate")]


def cat(x: Tensor, y: Tensor, t: Tensor) -> list[Part]:
    """A walking cat with its tail up."""
    swing = 0.14 * torch.sin(2 * math.pi * 1.4 * t)
    curl = 0.10 * torch.sin(2.5 * t)
    tail = torch.minimum(
        sdf.segment(x, y, (-0.58, 0.10), (-0.84, -0.24), 0.08),
        sdf.segment(x, y, (-0.84, -0.24), (-0.72 + curl, -0.68), 0.08),
    )
    far = torch.minimum(
        sdf.segment(x, y, (-0.38, 0.34), (-0.38 - swing, 0.78), 0.085),
        sdf.segment(x, y, (0.30, 0.34), (0.30 + swing, 0.78), 0.085),
    )
    near = torch.minimum(
        sdf.segment(x, y, (-0.46, 0.34), (-0.46 + swing, 0.80), 0.095),
        sdf.segment(x, y, (0.22, 0.34), (0.22 - swing, 0.80), 0.095),
    )
    body = sdf.box(x + 0.10, y - 0.20, 0.60, 0.28, 0.25)
    head = sdf.ellipse(x - 0.56, y + 0.20, 0.40, 0.34)
    ears = torch.minimum(
        sdf.convex(x, y, [(0.24, -0.74), (0.50, -0.46), (0.22, -0.30)]),
        sdf.convex(x, y, [(0.88, -0.74), (0.90, -0.30), (0.62, -0.46)]),
    )
    muzzle = sdf.ellipse(x - 0.62, y + 0.08, 0.20, 0.13)
    eyes = torch.minimum(sdf.ellipse(x - 0.46, y + 0.28, 0.055, 0.08), sdf.ellipse(x - 0.74, y + 0.28, 0.055, 0.08))
    nose = sdf.circle(x - 0.62, y + 0.13, 0.05)
    return [
        (tail, "main"), (far, "dark"), (near, "main"), (body, "main"), (ears, "dark"), (head, "main"),
        (muzzle, "light"), (torch.minimum(eyes, nose), "slate"),
    ]  # fmt: skip


PAINTERS: dict[str, Painter] = {
    "boat": boat, "balloon": balloon, "bird": bird, "fish": fish, "car": car, "train": train, "kite": kite,
    "rocket": rocket, "ball": ball, "star": star, "butterfly": butterfly, "cat": cat,
}  # fmt: skip

# How a subject is oriented: "faces" turns to the way it goes, "points" leads with its nose, "rolls" turns like a
# wheel, "rocks" stays upright.
CARRIAGE = {
    "boat": "faces", "balloon": "rocks", "bird": "faces", "fish": "faces", "car": "faces", "train": "faces",
    "kite": "rocks", "rocket": "points", "ball": "rolls", "star": "rocks", "butterfly": "rocks", "cat": "faces",
}  # fmt: skip
