"""Positions and poses of subjects by frame.

Lengths are in half of the picture's shorter side; times in seconds; angles in radians, clockwise on screen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.diorama import sdf
from tools.diorama.subjects import CARRIAGE
from tools.diorama.world import MOTIONS, SUBJECTS, Scenes

FPS = 16
SOLO_SIZE = 0.39
PAIR_SIZE = 0.31
LARGEST = SOLO_SIZE * 1.06
_FACES, _POINTS, _ROLLS = (
    torch.tensor([CARRIAGE[s] == kind for s in SUBJECTS]) for kind in ("faces", "points", "rolls")
)


@dataclass(frozen=True)
class Pose:
    """Pose of one subject of each scene: all (B, T), ``facing`` (B, 1) is -1 or 1, ``squash`` scales height."""

    x: Tensor
    y: Tensor
    angle: Tensor
    squash: Tensor
    facing: Tensor
    size: Tensor


def _pick(motion: Tensor, options: dict[str, Tensor]) -> Tensor:
    stacked = torch.stack([options[name].expand(options["left"].shape) for name in MOTIONS])
    return stacked[motion, torch.arange(len(motion))]


def poses(scenes: Scenes, slot: int, extent: tuple[float, float], frames: int) -> Pose:
    """The pose of subject ``slot`` (0 or 1) in every scene, for a picture of half-size ``extent`` (x, y)."""
    count = len(scenes)
    two = scenes.two
    j = scenes.jitter
    size = torch.where(two, PAIR_SIZE, SOLO_SIZE) * (0.94 + 0.12 * j[:, 0])
    ex = (extent[0] - 1.22 * size)[:, None]
    ey = (extent[1] - 1.18 * size)[:, None]
    t = (torch.arange(frames, dtype=torch.float32) / FPS)[None].expand(count, frames)
    duration = max((frames - 1) / FPS, 1e-3)
    sign = 1.0 if slot == 0 else -1.0
    pair = two[:, None]

    def travel(reach: Tensor, speed: Tensor, place: Tensor) -> Tensor:
        """Even motion towards + along an axis with room ``reach`` on each side."""
        distance = torch.minimum(2 * reach, speed * duration)
        # A place above 1 is on the way: the rest is covered as fast as there is room.
        start = -reach + (2 * reach - distance) * place.clamp(max=1) + 1.2 * reach * (place - 1).clamp(min=0)
        distance = torch.minimum(distance, reach - start)
        return start + distance * (t / duration)

    speed = (0.92 + 0.26 * j[:, 1])[:, None]
    along_x = travel(ex, speed, j[:, 2 + slot][:, None])
    along_y = travel(ey, 0.72 * speed, j[:, 2 + slot][:, None])
    # Two subjects move in separate lanes: above and below, or left and right.
    lane_x = torch.where(pair, -sign * 0.52 * extent[0] + 0 * ex, ex * 0.7 * (2 * j[:, 4:5] - 1))
    lane_y = torch.where(pair, -sign * 0.50 * extent[1] + 0 * ey, 0.12 + ey * 0.5 * (2 * j[:, 4:5] - 1))
    bob = 0.025 * torch.sin(2 * math.pi * (0.7 * t + j[:, 5 + slot][:, None]))

    hop = torch.remainder(t / (0.85 + 0.2 * j[:, 7:8]) + j[:, 8 + slot][:, None], 1.0)
    height = 4 * hop * (1 - hop)
    rise = torch.minimum(1.9 * ey, torch.full_like(ey, 1.05))
    bounce_y = ey * 0.96 - rise * height
    room = (ex - 0.9 * lane_x.abs()).clamp(min=0.0, max=0.15 * duration)
    drift = room * (2 * j[:, 10:11] - 1) * (2 * t / duration - 1)

    turn = torch.where(j[:, 11:12] < 0.5, -1.0, 1.0)
    phase = turn * 2 * math.pi * (0.52 + 0.10 * j[:, 12:13]) * t + 2 * math.pi * j[:, 13:14]
    phase = phase + (math.pi if slot == 1 else 0.0)
    radius_y = ey * torch.where(pair, 0.98, 0.86)
    radius_x = torch.minimum(ex * 0.98, radius_y * torch.where(pair, 1.35, 1.12))
    centre_x = torch.where(pair, 0.0, (ex - radius_x) * 0.6 * (2 * j[:, 14:15] - 1))

    x = _pick(
        scenes.motion,
        {
            "left": -along_x, "right": along_x, "up": lane_x + bob, "down": lane_x + bob,
            "bouncing": lane_x * 0.9 + drift, "circling": centre_x + radius_x * phase.cos(),
        },
    )  # fmt: skip
    y = _pick(
        scenes.motion,
        {
            "left": lane_y + bob, "right": lane_y + bob, "up": -along_y, "down": along_y, "bouncing": bounce_y,
            "circling": radius_y * phase.sin(),
        },
    )  # fmt: skip
    away = torch.where(j[:, 15 + slot][:, None] < 0.5, -1.0, 1.0)
    facing = _facing(scenes.motion, away, turn)
    squash = torch.ones_like(x)
    landing = (1 - height * 4).clamp(min=0)
    bouncing = (scenes.motion == MOTIONS.index("bouncing"))[:, None]
    squash = torch.where(bouncing, 1 - 0.20 * landing, squash)
    angle = _lean(scenes, slot, t, phase, facing, x, turn, j)
    return Pose(x, y, angle, squash, facing, size)


def local(x: Tensor, y: Tensor, pose: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Coordinates about a subject's centre in its own frame; ``pose`` has size, angle, facing and squash."""
    size, angle, facing, squash = pose
    foot = 1 - squash
    return sdf.rotate(x * facing / size * (1 - 0.6 * foot), (y - 0.8 * size * foot) / size / squash, angle)


def _facing(motion: Tensor, away: Tensor, turn: Tensor) -> Tensor:
    facing = away.clone()
    facing[motion == MOTIONS.index("left")] = -1.0
    facing[motion == MOTIONS.index("right")] = 1.0
    circling = motion == MOTIONS.index("circling")
    facing[circling] = turn[circling]
    return facing


def _lean(
    scenes: Scenes, slot: int, t: Tensor, phase: Tensor, facing: Tensor, x: Tensor, turn: Tensor, j: Tensor
) -> Tensor:
    """(B, T) angles: a gentle rocking for all, and what the subject's carriage adds."""
    subject = scenes.subject[:, slot].clamp(min=0)
    rock = 0.09 * torch.sin(2 * math.pi * (0.6 * t + j[:, 17 + slot][:, None]))
    motion = scenes.motion[:, None]
    up, down = motion == MOTIONS.index("up"), motion == MOTIONS.index("down")
    circling = motion == MOTIONS.index("circling")
    # Facing subjects lift or dip their nose; the frame is mirrored where they face left, so the sign holds for both.
    climb = torch.where(up, -0.38, 0.0) + torch.where(down, 0.38, 0.0)
    climb = torch.where(circling, 0.32 * phase.cos(), climb)
    faces = rock + climb
    # A rocket leads with its nose: its own frame has the nose up, a quarter turn from facing right.
    heading = torch.zeros_like(t) + torch.where(down, math.pi, 0.0)
    heading = heading + torch.where(motion == MOTIONS.index("left"), -math.pi / 2, 0.0)
    heading = heading + torch.where(motion == MOTIONS.index("right"), math.pi / 2, 0.0)
    heading = torch.where(circling, phase + torch.where(turn > 0, math.pi, 0.0), heading)
    points = heading * facing + 0.6 * rock
    rolls = facing * (x / 0.30) + torch.where((up | down), 1.5 * t, torch.zeros_like(t))
    angle = torch.where(_FACES[subject][:, None], faces, 1.3 * rock)
    angle = torch.where(_POINTS[subject][:, None], points, angle)
    return torch.where(_ROLLS[subject][:, None], rolls, angle)


def footprint(scenes: Scenes, size: tuple[int, int], frames: int, cell: int = 8) -> Tensor:
    """(B, 1 + (frames - 1) / 4, H / cell, W / cell) bool: latent cells touched by a subject, taken as a disc."""
    unit = min(size) / 2
    columns, rows = (((torch.arange(n // cell) + 0.5) * cell - n / 2) / unit for n in size)
    inside = torch.zeros(len(scenes), frames, len(rows), len(columns), dtype=torch.bool)
    for slot in (0, 1):
        pose = poses(scenes, slot, (size[0] / min(size), size[1] / min(size)), frames)
        x, y = (v[:, :, None, None] for v in (pose.x, pose.y))
        near = torch.hypot(columns - x, rows[:, None] - y) < (1.05 * pose.size + cell / 2 / unit)[:, None, None, None]
        inside |= near & (scenes.subject[:, slot] >= 0)[:, None, None, None]
    # A latent frame holds four frames, the first holds one.
    return torch.cat([inside[:, :1], inside[:, 1:].unflatten(1, (-1, 4)).any(2)], 1)
