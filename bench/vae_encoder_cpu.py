"""Measures how long the latents of a control video and a mask take on a CPU, in Tandem and in diffusers.

    python -m bench.vae_encoder_cpu --width 64 --height 64 --frames 81

The encoder has Wan2.1's width and random weights. Times are processor time, which other programs change little. Both
sides run in turn; "error" is their largest difference.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from runtime.core.cancel import never
from runtime.families.wan.vae_encoder import PyTorchVideoEncoder

# Latent frames in one call, as jobs have on a CPU.
_CHUNK = 2


def cases(frames: int, height: int, width: int) -> dict[str, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Return videos, (frames, height, width, 3), uint8, each with where it changes, (frames, height, width), bool."""
    random = torch.Generator().manual_seed(0)
    moving = torch.randint(256, (frames, height, width, 3), generator=random, dtype=torch.uint8)
    box = torch.zeros(frames, height, width, dtype=torch.bool)
    box[:, height // 4 : 3 * height // 4, width // 4 : 3 * width // 4] = True
    later = torch.zeros_like(box)
    later[frames // 4 :] = True
    given = moving.clone()
    given[frames // 4 :] = 128
    return {
        "no control video": (None, None),
        "a control video": (moving, None),
        "a control video and a mask in the middle": (moving, box),
        "a quarter of the frames, the rest gray": (given, later),
    }


def in_diffusers(vae: AutoencoderKLWan, clips: list[torch.Tensor]) -> list[torch.Tensor]:
    """Encode clips, (1, 3, frames, height, width), in -1 to 1, as `WanVACEPipeline` does."""
    found = []
    for clip in clips:
        distribution: DiagonalGaussianDistribution = vae.encode(clip).latent_dist
        found.append(distribution.mode())
    return found


def timed(compute: Callable[[], list[torch.Tensor]]) -> tuple[float, list[torch.Tensor]]:
    """Return the seconds of processor time of a call, and its result."""
    start = time.process_time()
    result = compute()
    return time.process_time() - start, result


@torch.no_grad()
def main() -> None:
    """Measure each case and print its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 64), ("height", 64), ("frames", 81)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    size = arguments.frames, arguments.height, arguments.width
    torch.manual_seed(0)
    vae = AutoencoderKLWan().eval()
    encoder = PyTorchVideoEncoder(vae)
    mean, std = (tensor.cpu() for tensor in (encoder._mean, encoder._std))
    gray = torch.zeros(3, *size[1:])
    sys.stdout.write("| inputs | diffusers | Tandem | ratio | error |\n| --- | ---: | ---: | ---: | ---: |\n")
    for title, (video, changes) in cases(*size).items():
        clip = torch.zeros(1, 3, *size) if video is None else video.permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        shown = torch.ones(size, dtype=torch.bool) if changes is None else changes
        parts = [clip * ~shown, clip * shown]

        def reference(parts: list[torch.Tensor] = parts) -> list[torch.Tensor]:
            return in_diffusers(vae, parts)

        def ours(video: torch.Tensor | None = video, changes: torch.Tensor | None = changes) -> list[torch.Tensor]:
            if video is None:
                return [encoder.latents([gray], size[0])] * 2
            if changes is None:
                return [encoder.latents([gray], size[0]), encoder.video_latents(video, None, never, None, _CHUNK)]
            return [encoder.video_latents(video, None, never, part, _CHUNK) for part in (~changes, changes)]

        (theirs, wanted), (seconds, got) = timed(reference), timed(ours)
        error = max(float((a * std + mean - b).abs().max()) for a, b in zip(got, wanted, strict=True))
        sys.stdout.write(f"| {title} | {theirs:.1f} s | {seconds:.1f} s | {theirs / seconds:.2f} | {error:.1e} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
