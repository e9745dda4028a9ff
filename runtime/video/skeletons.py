"""Pictures of people's poses, as models that are steered by poses were trained with: skeletons in color on black.

The points, limbs, colors and sizes are those of OpenPose's pictures as ControlNet and DWPose draw them
(github.com/lllyasviel/ControlNet, github.com/IDEA-Research/DWPose). Faces and hands are not drawn.
"""

import math
from collections.abc import Iterable

import numpy as np
from PIL import Image, ImageDraw

# Points of a person in COCO's order: nose; then left and right eye, ear, shoulder, elbow, wrist, hip, knee and ankle.
POINTS = 17
_SHOULDERS = (5, 6)
_NECK = POINTS
# Limbs from point to point, with the neck between the shoulders, in the order of their colors.
_LIMBS = (
    *((_NECK, 6), (_NECK, 5), (6, 8), (8, 10), (5, 7), (7, 9)),
    *((_NECK, 12), (12, 14), (14, 16), (_NECK, 11), (11, 13), (13, 15)),
    *((_NECK, 0), (0, 2), (2, 4), (0, 1), (1, 3)),
)
# Points in the order of their colors: OpenPose's, which begins with nose and neck, and has right before left.
_JOINTS = (0, _NECK, 6, 8, 10, 5, 7, 9, 12, 14, 16, 11, 13, 15, 2, 1, 4, 3)
# Once around the circle of hues.
_COLORS = (
    *((255, 0, 0), (255, 85, 0), (255, 170, 0), (255, 255, 0), (170, 255, 0), (85, 255, 0)),
    *((0, 255, 0), (0, 255, 85), (0, 255, 170), (0, 255, 255), (0, 170, 255), (0, 85, 255)),
    *((0, 0, 255), (85, 0, 255), (170, 0, 255), (255, 0, 255), (255, 0, 170), (255, 0, 85)),
)
# Half the width of a limb and the radius of a point, in pixels; and how bright limbs are, compared with points.
_HALF_WIDTH, _RADIUS, _BRIGHTNESS = 4, 4, 0.6
# Corners of the polygon of a limb, which is an ellipse.
_CORNERS = 72
# The least score of a point that is drawn.
_LEAST_SCORE = 0.3


def skeletons(people: Iterable[np.ndarray], width: int, height: int) -> Image.Image:
    """Return the picture of people's poses, RGB; it is black without people.

    Args:
        people: of each, (17, 3) float: x and y in pixels and score of each point, in COCO's order. A point with a score
            below 0.3 is not drawn, and no limb that ends there.
        width, height: of the picture, in pixels.
    """
    bodies = [_with_neck(person) for person in people]
    picture = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(picture)
    for (first, second), color in zip(_LIMBS, _COLORS, strict=False):
        for body in bodies:
            if min(body[first, 2], body[second, 2]) >= _LEAST_SCORE:
                limb = tuple(int(value * _BRIGHTNESS) for value in color)
                draw.polygon(_ellipse(body[first, :2], body[second, :2]), fill=limb)
    for point, color in zip(_JOINTS, _COLORS, strict=True):
        for body in bodies:
            x, y, score = body[point]
            if score >= _LEAST_SCORE:
                draw.ellipse((x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS), fill=color)
    return picture


def _with_neck(person: np.ndarray) -> np.ndarray:
    """Return a person's points with the neck, which is between the shoulders if both are seen."""
    left, right = person[_SHOULDERS[0]], person[_SHOULDERS[1]]
    neck = np.append((left[:2] + right[:2]) / 2, min(left[2], right[2]))
    return np.concatenate([person, neck[None]])


def _ellipse(first: np.ndarray, second: np.ndarray) -> list[tuple[float, float]]:
    """Return the corners of an ellipse from point to point."""
    (x, y), (along_x, along_y) = (first + second) / 2, (second - first) / 2
    length = max(math.hypot(along_x, along_y), 1e-6)
    across_x, across_y = -along_y / length * _HALF_WIDTH, along_x / length * _HALF_WIDTH
    turns = [math.tau * number / _CORNERS for number in range(_CORNERS)]
    return [
        (
            float(x + math.cos(turn) * along_x + math.sin(turn) * across_x),
            float(y + math.cos(turn) * along_y + math.sin(turn) * across_y),
        )
        for turn in turns
    ]
