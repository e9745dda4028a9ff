"""Compare ways to make frames 4 times larger with true large frames: PSNR in dB, SSIM, and sharpness.

    .venv/bin/python -m bench.upscaler_quality --clips 12

Scenes of the shipped model's world (tools/diorama) are rendered at both sizes, and the smaller frames enlarged.
Sharpness is the root mean square of the differences between neighboring pixels, as a share of that of the true frames.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from runtime.core.settings import ROOT
from runtime.families.esrgan.components import load_upscaler
from runtime.families.esrgan.upscalers import find_upscaler
from runtime.video.lossless import write_frames
from runtime.video.similarity import Similarity, similarity
from tools.diorama import world
from tools.diorama.render import Renderer, to_uint8

_SEED = 7
_SIZE, _SCALE = (192, 112), 4
_LARGE = (_SIZE[0] * _SCALE, _SIZE[1] * _SCALE)

# Returns frames (n, height, width, 3), uint8, enlarged.
Method = Callable[[np.ndarray], np.ndarray]


def resampled(filter_: Image.Resampling) -> Method:
    """Return what enlarges frames with one of Pillow's filters."""
    return lambda frames: np.stack([np.asarray(Image.fromarray(frame).resize(_LARGE, filter_)) for frame in frames])


def upscaled(name: str, dtype: str) -> Method:
    """Return what enlarges frames with an upscaler of the package."""
    module = load_upscaler(find_upscaler(name, _SCALE, ROOT), dtype=dtype)

    def method(frames: np.ndarray) -> np.ndarray:
        colors = torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255
        larger = torch.cat([module(frame[None]) for frame in colors])
        return larger.mul(255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()

    return method


def compared(made: np.ndarray, true: np.ndarray) -> Similarity:
    """Return how similar enlarged frames are to the true ones."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "made.mkv", Path(folder) / "true.mkv"
        for file, clip in zip(files, (made, true), strict=True):
            write_frames(file, [clip], clip.shape[2], clip.shape[1], 1)
        return similarity(*files)


def steepness(frames: np.ndarray) -> float:
    """Return the root mean square of the differences between neighboring pixels."""
    values = frames.astype("float32")
    return float(np.sqrt(np.mean(np.diff(values, axis=1) ** 2) + np.mean(np.diff(values, axis=2) ** 2)))


def main() -> None:
    """Print a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=12)
    parser.add_argument("--frames", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    methods: dict[str, Method] = {
        "bicubic": resampled(Image.Resampling.BICUBIC),
        "Lanczos": resampled(Image.Resampling.LANCZOS),
        **{
            f"{name} {dtype}": upscaled(name, dtype)
            for name, dtype in (
                ("realesr-animevideov3", "float32"),
                ("realesr-animevideov3", "bfloat16"),
                ("realesrgan-x4plus-anime", "float32"),
            )
        },
    }
    scenes = world.sample(arguments.clips, _SEED, keep="any")
    small, large = (Renderer(size, arguments.frames) for size in (_SIZE, _LARGE))
    clips = [
        tuple(to_uint8(renderer(scenes[slice(index, index + 1)]))[0].numpy() for renderer in (small, large))
        for index in range(arguments.clips)
    ]
    for name, method in methods.items():
        pairs = [(method(frames), true) for frames, true in clips]
        results = [compared(made, true) for made, true in pairs]
        psnr, ssim = (np.mean([getattr(result, value) for result in results]) for value in ("psnr", "ssim"))
        sharpness = np.mean([steepness(made) / steepness(true) for made, true in pairs])
        sys.stdout.write(f"{name:34s} {psnr:6.2f} dB  SSIM {ssim:.4f}  sharpness {sharpness:.2f}\n")


if __name__ == "__main__":
    main()
