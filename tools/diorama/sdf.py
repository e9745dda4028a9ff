"""Signed distance functions (negative inside) of the shapes in paper cuts, on broadcast tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Number = float | Tensor
Point = tuple[Number, Number]


def circle(x: Tensor, y: Tensor, radius: Number) -> Tensor:
    """Distance to a circle about the origin."""
    return torch.hypot(x, y) - radius


def ellipse(x: Tensor, y: Tensor, rx: Number, ry: Number) -> Tensor:
    """First-order distance to an ellipse about the origin; near its edge as good as exact."""
    k0 = torch.hypot(x / rx, y / ry)
    k1 = torch.hypot(x / (rx * rx), y / (ry * ry)).clamp(min=1e-4)
    return k0 * (k0 - 1.0) / k1


def box(x: Tensor, y: Tensor, half_width: Number, half_height: Number, rounding: float = 0.0) -> Tensor:
    """Distance to an axis-parallel box about the origin with rounded corners."""
    dx = x.abs() - (half_width - rounding)
    dy = y.abs() - (half_height - rounding)
    outside = torch.hypot(dx.clamp(min=0), dy.clamp(min=0))
    return outside + torch.maximum(dx, dy).clamp(max=0) - rounding


def convex(x: Tensor, y: Tensor, points: Sequence[tuple[float, float]]) -> Tensor:
    """Distance to a convex polygon given clockwise on screen (y points down), exact along its edges."""
    result: Tensor | None = None
    for (ax, ay), (bx, by) in zip(points, [*points[1:], points[0]], strict=True):
        length = math.hypot(bx - ax, by - ay)
        nx, ny = (by - ay) / length, -(bx - ax) / length
        side = x * nx + y * ny - (ax * nx + ay * ny)
        result = side if result is None else torch.maximum(result, side)
    assert result is not None
    return result


def segment(x: Tensor, y: Tensor, a: Point, b: Point, radius: Number) -> Tensor:
    """Distance to a capsule from ``a`` to ``b``."""
    px, py = x - a[0], y - a[1]
    bx, by = b[0] - a[0], b[1] - a[1]
    along = ((px * bx + py * by) / (bx * bx + by * by + 1e-6)).clamp(0, 1)
    return torch.hypot(px - bx * along, py - by * along) - radius


def triangle(
    x: Tensor, y: Tensor, a: tuple[Number, Number], b: tuple[Number, Number], c: tuple[Number, Number]
) -> Tensor:
    """Distance to any triangle, either winding; its corners may move from frame to frame."""
    corners = (a, b, c)
    turn = (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
    sign = torch.where(turn > 0, 1.0, -1.0) if isinstance(turn, Tensor) else (1.0 if turn > 0 else -1.0)
    nearest: Tensor | None = None
    inside: Tensor | None = None
    for (px, py), (qx, qy) in zip(corners, (b, c, a), strict=True):
        vx, vy = x - px, y - py
        ex, ey = qx - px, qy - py
        along = ((vx * ex + vy * ey) / (ex * ex + ey * ey + 1e-6)).clamp(0, 1)
        far = torch.hypot(vx - ex * along, vy - ey * along)
        cross = sign * (ex * vy - ey * vx)
        nearest = far if nearest is None else torch.minimum(nearest, far)
        inside = cross if inside is None else torch.minimum(inside, cross)
    assert nearest is not None and inside is not None
    return torch.where(inside > 0, -nearest, nearest)


def star(x: Tensor, y: Tensor, radius: float, depth: float = 0.5) -> Tensor:
    """Distance to a five-pointed star standing upright; ``depth`` is inner over outer radius."""
    step = math.pi / 5
    angle = torch.atan2(x, -y)
    folded = torch.remainder(angle + step, 2 * step) - step
    length = torch.hypot(x, y)
    px, py = length * folded.sin().abs(), length * folded.cos()
    ix, iy = radius * depth * math.sin(step), radius * depth * math.cos(step)
    ex, ey = ix, iy - radius
    norm = math.hypot(ex, ey)
    return (px * -ey + (py - radius) * ex) / norm


def rotate(x: Tensor, y: Tensor, angle: Number) -> tuple[Tensor, Tensor]:
    """Coordinates in a frame turned by ``angle`` (radians, clockwise on screen)."""
    if isinstance(angle, Tensor):
        c, s = angle.cos(), angle.sin()
        return x * c + y * s, y * c - x * s
    return x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle)
