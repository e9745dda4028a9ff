"""Compare ways to compute the frames between two others: PSNR in dB and SSIM of the new frames, and the time.

    .venv/bin/python -m bench.interpolation
    .venv/bin/python -m bench.interpolation --size 832x480 --clips 4 --frames 17
    .venv/bin/python -m bench.interpolation a.mp4 b.mp4

Of each clip, every second or fourth frame is kept, and those between are computed and compared with the true ones.
Clips are renders of the shipped model's world (tools/diorama) or given videos. A line has the mean of all clips.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from runtime.core.request_fields import read_size
from runtime.families.interpolator.frames import NetworkInterpolator
from runtime.pipeline.interpolate import AnyInterpolator
from runtime.planner.interpolation import FACTORS
from runtime.video.interpolation import FrameInterpolator
from runtime.video.lossless import write_frames
from runtime.video.reader import read_info, read_video
from runtime.video.similarity import Similarity, similarity
from tools.diorama import world
from tools.diorama.render import Renderer, to_uint8

_SEED = 7

# Returns all frames of a clip, (n, height, width, 3) uint8, of those that are kept; the last ones do not count.
Method = Callable[[np.ndarray, int], np.ndarray]


def repeated(kept: np.ndarray, factor: int) -> np.ndarray:
    """Return the frames, each as often as the factor."""
    return np.repeat(kept, factor, axis=0)


def blended(kept: np.ndarray, factor: int) -> np.ndarray:
    """Return the frames, and between them the weighted mean of both."""
    after = np.concatenate([kept[1:], kept[-1:]]).astype("float32")
    shares = [(kept * (1 - step / factor) + after * (step / factor)).round() for step in range(factor)]
    return np.stack(shares, axis=1).reshape(-1, *kept.shape[1:]).astype("uint8")


def interpolated(kept: np.ndarray, factor: int, by: type[AnyInterpolator]) -> np.ndarray:
    """Return what Tandem makes of the frames."""
    with by(kept.shape[2], kept.shape[1], factor) as interpolator:
        return np.concatenate([*interpolator.add(kept), *interpolator.finish()])


METHODS: dict[str, Method] = {
    "repeated": repeated,
    "blended": blended,
    "minterpolate": partial(interpolated, by=FrameInterpolator),
    "network": partial(interpolated, by=NetworkInterpolator),
}


def rendered(count: int, size: tuple[int, int], frames: int) -> Iterator[np.ndarray]:
    """Yield clips of the shipped model's world."""
    scenes, renderer = world.sample(count, _SEED, keep="any"), Renderer(size, frames)
    for index in range(count):
        yield to_uint8(renderer(scenes[slice(index, index + 1)]))[0].numpy()


def compared(made: np.ndarray, true: np.ndarray, factor: int) -> Similarity:
    """Return how similar the new frames are to the true ones."""
    new = [index for index in range(len(true)) if index % factor]
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "made.mkv", Path(folder) / "true.mkv"
        for file, clip in zip(files, (made, true), strict=True):
            write_frames(file, [clip[new]], clip.shape[2], clip.shape[1], 1)
        return similarity(*files)


def main() -> None:
    """Print a line for each factor and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", nargs="*", type=Path, help="compare with these instead of renders")
    parser.add_argument("--clips", type=int, default=24)
    parser.add_argument("--size", default="192x112")
    parser.add_argument("--frames", type=int, default=33)
    arguments = parser.parse_args()
    size = read_size(arguments.size)
    if size is None:
        parser.error("--size takes a width and a height, such as 192x112")
    torch.set_grad_enabled(False)
    given = [np.concatenate(list(read_video(read_info(video), 16))) for video in arguments.videos]
    clips = given or list(rendered(arguments.clips, size, arguments.frames))
    for factor in FACTORS:
        for name, method in METHODS.items():
            results, seconds, pixels = [], 0.0, 0
            for clip in clips:
                true = clip[: (len(clip) - 1) // factor * factor + 1]
                kept, began = true[::factor], time.perf_counter()
                made = method(kept, factor)[: len(true)]
                seconds, pixels = seconds + time.perf_counter() - began, pixels + kept[..., 0].size
                results.append(compared(made, true, factor))
            psnr, ssim = (np.mean([getattr(result, value) for result in results]) for value in ("psnr", "ssim"))
            rate = pixels / 1e6 / seconds
            sys.stdout.write(f"{factor} times  {name:13s} {psnr:6.2f} dB  SSIM {ssim:.4f}  {rate:6.2f} Mpx/s kept\n")


if __name__ == "__main__":
    main()
