"""Degenerate clips are detected; dark, pale and quiet ones are not."""

from collections.abc import Callable

import numpy as np
import pytest

from runtime.pipeline.blank_video import Detector, Fault

SHAPE = (17, 64, 96, 3)
Make = Callable[[np.random.Generator], np.ndarray]


def scene(brightness: float, contrast: float) -> np.ndarray:
    """Return a still frame with a slope of grey."""
    slope = np.linspace(-1, 1, SHAPE[2])[None, :, None] * np.ones((SHAPE[1], 1, 3))
    return np.clip(brightness + contrast * slope, 0, 255)


def moving(brightness: float, contrast: float, size: int = 3) -> np.ndarray:
    """Return a clip in which one small square wanders over a still frame."""
    clip = np.repeat(scene(brightness, contrast)[None], SHAPE[0], axis=0)
    for n in range(SHAPE[0]):
        clip[n, 20 : 20 + size, 4 * n : 4 * n + size] += 30
    return clip.clip(0, 255)


def still(frame: np.ndarray, noise: float, chance: np.random.Generator) -> np.ndarray:
    clip = np.repeat(frame[None], SHAPE[0], axis=0)
    return np.clip(clip + chance.uniform(-noise, noise, clip.shape), 0, 255)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda chance: np.zeros(SHAPE), "black"),
        (lambda chance: chance.uniform(0, 12, SHAPE), "black"),
        (lambda chance: np.full(SHAPE, 128.0), "blank"),
        (lambda chance: np.full(SHAPE, (240.0, 3.0, 90.0)), "blank"),
        (lambda chance: still(scene(128, 0), 1.0, chance), "blank"),
        # Flat frames whose color changes.
        (lambda chance: np.linspace(30, 220, SHAPE[0])[:, None, None, None] * np.ones(SHAPE), "blank"),
        (lambda chance: still(scene(128, 60), 0.0, chance), "frozen"),
        (lambda chance: still(scene(128, 60), 2.0, chance), "frozen"),
        (lambda chance: moving(128, 60), None),
        (lambda chance: moving(128, 60, size=1), None),
        # Night, fog, and a star in a black sky.
        (lambda chance: moving(12, 10), None),
        (lambda chance: moving(235, 8), None),
        (lambda chance: moving(2, 0, size=4), None),
        (lambda chance: chance.uniform(0, 255, SHAPE), None),
    ],
)
@pytest.mark.parametrize("chunk", [1, 4, 17])
def test_degenerate_clips_are_detected(make: Make, fault: Fault | None, chunk: int) -> None:
    frames = make(np.random.default_rng(1)).round().astype(np.uint8)
    detector = Detector()
    for start in range(0, len(frames), chunk):
        detector.inspect(frames[start : start + chunk])
    assert detector.fault == fault


def test_differences_in_the_first_frames_are_ignored() -> None:
    frames = np.repeat(scene(128, 60)[None], SHAPE[0], axis=0).round().astype(np.uint8)
    frames[0] //= 2
    detector = Detector()
    detector.inspect(frames)
    assert detector.fault == "frozen"


def test_short_clips_are_not_frozen() -> None:
    frame = scene(128, 60).round().astype(np.uint8)
    for count in (1, 5):
        detector = Detector()
        detector.inspect(np.repeat(frame[None], count, axis=0))
        assert detector.fault is None
    assert Detector().fault is None


def test_large_clips_are_sampled() -> None:
    frames = np.zeros((2, 256, 512, 3), dtype=np.uint8)
    frames[:, 100:140, 100:140] = 200
    detector = Detector()
    detector.inspect(frames)
    assert detector.fault is None
