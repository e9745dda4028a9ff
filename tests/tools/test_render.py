"""The renderer: deterministic pictures in which every attribute is visible."""

import dataclasses

import torch

from tools.diorama import motion, world
from tools.diorama.render import Renderer, to_uint8
from tools.diorama.world import BACKDROPS, MOTIONS, SUBJECTS, TIMES, WEATHERS, Scenes

SIZE = (96, 64)


def alike(count: int, **codes: list[int]) -> Scenes:
    """Return `count` scenes that differ in `codes` only."""
    one = world.sample(1, 11, two_subjects=0.0)
    scenes = world.join([one] * count)
    fixed = {"motion": 1, "backdrop": 1, "time": 1, "weather": 0} | {k: v for k, v in codes.items()}
    made = {k: torch.as_tensor(v).expand(count).clone() for k, v in fixed.items() if k not in {"subject", "colour"}}
    pairs = {k: torch.tensor([[c, -1] for c in codes[k]]) for k in ("subject", "colour") if k in codes}
    return dataclasses.replace(scenes, **made, **pairs)


def spread(clips: torch.Tensor) -> float:
    """Return the smallest mean difference between two clips, in 0 to 255."""
    flat = to_uint8(clips).float().flatten(1)
    return float(min((a - b).abs().mean() for i, a in enumerate(flat) for b in flat[:i]))


def test_a_scene_renders_the_same_in_any_batch() -> None:
    scenes = world.sample(6, 3, two_subjects=0.5)
    renderer = Renderer(SIZE, 9, stride=4)
    together = renderer(scenes)
    alone = torch.cat([renderer(scenes[slice(i, i + 1)]) for i in range(6)])
    assert torch.equal(together, renderer(scenes))
    assert (together - alone).abs().max() < 1e-4


def test_a_crop_equals_the_cropped_picture() -> None:
    scenes = world.sample(4, 4, two_subjects=0.5)
    renderer = Renderer((96, 64), 5, stride=4)
    whole = renderer(scenes)
    crop = renderer(scenes, (48, 64), torch.tensor([[24, 0]] * 4))
    # Shadows are shifted by whole pixels and repeat at a crop's border; all else is equal.
    assert (whole[..., 24:72] - crop).abs().mean() < 1e-3


def test_values_are_valid_pixels() -> None:
    clips = Renderer(SIZE, 5)(world.sample(4, 5))
    assert clips.shape == (4, 5, 3, 64, 96)
    assert clips.min() >= -1 and clips.max() <= 1 and clips.std() > 0.2


def test_every_attribute_is_visible() -> None:
    renderer = Renderer(SIZE, 9, stride=8)
    for name, options in (("subject", SUBJECTS), ("colour", world.COLOURS), ("backdrop", BACKDROPS), ("time", TIMES),
                          ("weather", WEATHERS)):  # fmt: skip
        scenes = alike(len(options), **{name: list(range(len(options)))})
        assert spread(renderer(scenes)) > 0.4, name


def test_motions_have_their_direction() -> None:
    scenes = alike(len(MOTIONS), motion=list(range(len(MOTIONS))))
    pose = motion.poses(scenes, 0, (1.7, 1.0), 33)
    travel = {m: (pose.x[i, -1] - pose.x[i, 0], pose.y[i, -1] - pose.y[i, 0]) for i, m in enumerate(MOTIONS)}
    assert travel["left"][0] < -0.8 and travel["right"][0] > 0.8
    assert travel["up"][1] < -0.5 and travel["down"][1] > 0.5
    turns = torch.diff(torch.sign(torch.diff(pose.y, dim=1)), dim=1).ne(0).sum(1)
    assert turns[MOTIONS.index("bouncing")] >= 2
    round_trip = pose.x[MOTIONS.index("circling")]
    assert round_trip.max() - round_trip.min() > 0.6


def test_subjects_stay_inside_the_picture() -> None:
    scenes = world.sample(500, 9, two_subjects=0.5)
    for extent in ((192 / 112, 1.0), (1.0, 192 / 112), (1.0, 1.0)):
        for slot in (0, 1):
            pose = motion.poses(scenes, slot, extent, 49)
            assert bool((pose.x.abs() + pose.size[:, None] < extent[0] + 0.02).all())
            assert bool((pose.y.abs() + pose.size[:, None] < extent[1] + 0.02).all())


def test_motion_is_smooth() -> None:
    pose = motion.poses(world.sample(300, 10), 0, (192 / 112, 1.0), 33)
    assert torch.hypot(pose.x.diff(dim=1), pose.y.diff(dim=1)).max() < 0.35


def test_subjects_entered_midway_go_on_as_they_should_and_stay_in_sight() -> None:
    scenes = world.sample(400, 11, two_subjects=0.0)
    usual = motion.poses(scenes, 0, (12 / 7, 1.0), 33)
    late = motion.poses(world.midway(scenes, 3), 0, (12 / 7, 1.0), 33)
    for name, axis, sign in (("left", "x", -1), ("right", "x", 1), ("up", "y", -1), ("down", "y", 1)):
        rows = scenes.motion == MOTIONS.index(name)
        before, path = sign * getattr(usual, axis)[rows], sign * getattr(late, axis)[rows]
        assert bool((path[:, -1] - path[:, 0] > 0.25).all())
        assert path[:, -1].max() <= before[:, -1].max() + 0.05
        assert path[:, 0].max() > 0 > before[:, 0].max()  # also from beyond the middle
    steady = scenes.motion >= MOTIONS.index("bouncing")
    assert torch.equal(late.x[steady], usual.x[steady])
