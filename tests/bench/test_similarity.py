"""PSNR and SSIM follow their definitions."""

import math

import numpy as np
import pytest

from runtime.bench.similarity import _compared_frames, similarity


def clip(seed: int = 0, frames: int = 3, height: int = 24, width: int = 32) -> np.ndarray:
    """Return random frames."""
    return np.random.default_rng(seed).integers(0, 246, (frames, height, width, 3), np.uint8)


def test_the_same_frames() -> None:
    found = similarity([clip()], [clip()])
    assert math.isinf(found.psnr) and found.ssim == 1 and found.largest == 0
    assert found.to_json()["psnr"] is None and found.to_json()["same"] is True


def test_psnr_of_a_known_difference_with_any_batches() -> None:
    one = clip()
    found = similarity([one[:1], one[1:]], [one[:2] + 10, one[2:] + 10])
    assert found.psnr == pytest.approx(20 * math.log10(255 / 10))
    assert found.largest == 10
    assert found.to_json()["psnr"] == found.psnr


def test_ssim_of_flat_frames_is_that_of_their_means() -> None:
    one, other = np.full((2, 16, 16, 3), 100, np.uint8), np.full((2, 16, 16, 3), 120, np.uint8)
    c1 = (0.01 * 255) ** 2
    expected = (2 * 100 * 120 + c1) / (100**2 + 120**2 + c1)
    assert similarity([one], [other]).ssim == pytest.approx(expected, rel=1e-9)


def test_ssim_of_one_window_is_the_formula() -> None:
    x, y = (clip(seed, 1, 11, 11)[0].astype(float) for seed in (1, 2))
    offsets = np.arange(11) - 5
    row = np.exp(-(offsets**2) / (2 * 1.5**2))
    weights = np.outer(row, row)[:, :, None] / row.sum() ** 2
    mx, my = ((weights * part).sum((0, 1)) for part in (x, y))
    vx, vy, vxy = (
        (weights * one * other).sum((0, 1)) - mean
        for one, other, mean in ((x, x, mx * mx), (y, y, my * my), (x, y, mx * my))
    )
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    expected = ((2 * mx * my + c1) * (2 * vxy + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))).mean()
    assert similarity([clip(1, 1, 11, 11)], [clip(2, 1, 11, 11)]).ssim == pytest.approx(expected, rel=1e-9)


def test_ssim_compares_some_frames_of_a_large_clip() -> None:
    assert list(_compared_frames(9, 64 * 32)) == list(range(9))
    assert list(_compared_frames(33, 192 * 112)) == list(range(33))
    for frames, pixels in ((81, 832 * 480), (121, 1280 * 704), (17, 832 * 480), (5, 1280 * 720)):
        chosen = _compared_frames(frames, pixels)
        assert min(frames, 8) <= len(chosen) <= 16
        assert max(chosen) >= frames - 1 - frames / 8


def test_more_noise_is_less_similar() -> None:
    one = clip()
    noise = np.random.default_rng(1).integers(0, 9, one.shape, np.uint8)
    little, much = similarity([one + noise // 4], [one]), similarity([one + noise], [one])
    assert little.psnr > much.psnr and little.ssim > much.ssim


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="clips of"):
        similarity([clip(frames=3)], [clip(frames=2)])
