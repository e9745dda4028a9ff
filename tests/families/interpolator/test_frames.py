"""New frames by the network: how many, where, cuts, larger frames, and how close to the true ones."""

from itertools import product

import numpy as np
import pytest
import torch

from runtime.core.cancel import Cancel, CancelledError
from runtime.families.interpolator.frames import NetworkInterpolator
from runtime.families.interpolator.spec import smaller_for
from runtime.video.interpolation import FrameInterpolator
from tests.video.test_interpolation import interpolated as interpolated_by
from tools.diorama import world
from tools.diorama.render import Renderer, to_uint8


def rendered(size: tuple[int, int], count: int, seed: int) -> np.ndarray:
    """Return frames of a scene with a combination that no training has seen."""
    with torch.inference_mode():
        frames: np.ndarray = to_uint8(Renderer(size, count)(world.sample(1, seed, keep="held_out")))[0].numpy()
    return frames


def interpolated(frames: np.ndarray, factor: int, by: type = NetworkInterpolator) -> np.ndarray:
    """Return frames with those between them, given two at a time."""
    return interpolated_by(frames, factor, 2, by)


def psnr(made: np.ndarray, true: np.ndarray) -> float:
    """Return the PSNR in dB."""
    return float(10 * np.log10(255**2 / np.square(made.astype(float) - true).mean()))


def test_every_frame_is_kept_and_followed_by_new_ones(subtests: pytest.Subtests) -> None:
    generator = np.random.default_rng(0)
    for count, factor, (height, width) in product((0, 1, 2, 3), (2, 4), ((32, 48), (15, 21), (2, 2))):
        with subtests.test(count=count, factor=factor, height=height):
            frames = generator.integers(0, 256, (count, height, width, 3), np.uint8)
            result = interpolated(frames, factor)
            assert result.shape == (count * factor, height, width, 3)
            assert (result[::factor] == frames).all()
            # The last frame is shown as long as before.
            assert (result[-factor:] == frames[-1:]).all()


@pytest.mark.parametrize("factor", [2, 4])
def test_new_frames_are_closer_to_the_true_ones_than_those_of_ffmpeg(factor: int) -> None:
    closer = []
    for seed in (5, 6, 7):
        true = rendered((192, 112), 4 * factor + 1, seed)
        new = [index for index in range(len(true)) if index % factor]
        network, ffmpeg = (
            psnr(interpolated(true[::factor], factor, by)[new], true[new])
            for by in (NetworkInterpolator, FrameInterpolator)
        )
        closer.append(network - ffmpeg)
    assert np.mean(closer) > 2


def test_motion_of_larger_frames_is_estimated_in_smaller_ones() -> None:
    sizes = {(192, 112): 1, (480, 272): 1, (272, 832): 2, (1280, 720): 4, (1920, 1080): 4, (4096, 2160): 16}
    assert {size: smaller_for(*size) for size in sizes} == sizes
    true = rendered((832, 480), 3, 9)
    blended = true[::2].mean(0)
    assert psnr(interpolated(true[::2], 2)[1], true[1]) > psnr(blended, true[1]) + 3


@pytest.mark.parametrize(("factor", "shown"), [(2, [0]), (4, [0, 0, 1])])
def test_two_scenes_are_not_mixed(factor: int, shown: list[int]) -> None:
    frames = np.concatenate([rendered((192, 112), 2, 5), 255 - rendered((192, 112), 2, 6)])
    result = interpolated(frames, factor)
    first = factor + 1
    assert all((result[first + index] == frames[1 + scene]).all() for index, scene in enumerate(shown))


def test_it_can_be_cancelled_before_each_frame() -> None:
    cancel, frames = Cancel(), rendered((192, 112), 3, 5)
    with NetworkInterpolator(192, 112, 2, cancel=cancel) as interpolator:
        made = interpolator.add(frames)
        assert len(next(made)) == 2
        cancel.request()
        with pytest.raises(CancelledError):
            next(made)
