"""Measure a forward pass of Wan2.2-Animate-14B at full size, by diffusers and by Tandem.

    python bench/gpu/animate.py [--variants NAME,NAME] [--size 480p|720p]
    python bench/gpu/animate.py --tiny --device cpu                               a rehearsal

Random weights; 77 frames with poses and a face of 512x512. Variants, errors and the limits of time are those of
`bench/gpu/vace.py --passes`. diffusers encodes the face in each pass, Tandem once per clip: the first pass of a
variant, in "first", contains it. Prints a JSON object per measurement and appends it to $OUT/animate.jsonl.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from diffusers import WanAnimateTransformer3DModel

from bench.gpu import results
from bench.gpu.speed import TEXT_TOKENS, NoTimeError
from bench.gpu.vace import DEFAULT, VaceBench, passes
from runtime.families.wan.transformer import PyTorchDenoiser

IMAGE_TOKENS = 257
# Of the motion encoder, as a row and as a column.
_BLUR = torch.tensor([1.0, 3.0, 3.0, 1.0])


class AnimateBench(VaceBench):
    """Animate's transformer with seeded inputs."""

    model = "wan2.2-animate-14b"
    tiny: Mapping[str, Any] = {
        "added_kv_proj_dim": 32,
        "face_encoder_hidden_dim": 8,
        "face_encoder_num_heads": 2,
        "image_dim": 24,
        "inject_face_latents_blocks": 3,
        "motion_dim": 2,
        "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
        "motion_encoder_dim": 4,
        "motion_encoder_size": 16,
    }
    transformer = WanAnimateTransformer3DModel

    def say(self, **found: Any) -> None:
        """Print a measurement and append it to animate.jsonl."""
        results.say("animate.jsonl", size=self.size, **found)

    def complete(self, module: Any) -> None:
        """Compute the buffers of a module whose weights are random."""
        super().complete(module)
        for block in module.motion_encoder.modules():
            if getattr(block, "blur_kernel", None) is not None:
                kernel = torch.outer(_BLUR, _BLUR)
                block.blur_kernel = (kernel / kernel.sum()).to(block.blur_kernel)

    def given(self) -> tuple[torch.Tensor, ...]:
        """Return seeded latents, a timestep, a text, an image's embeddings, latents of poses, and a face in uint8."""
        config, generator = self.config, torch.Generator(self.device).manual_seed(1)
        frames, height, width = self.grid
        latents = self.noise(generator, 1, config["in_channels"], frames, height, width)
        poses = self.noise(generator, 1, config["latent_channels"], frames - 1, height, width)
        text = self.noise(generator, 1, TEXT_TOKENS, config["text_dim"]).to(self.dtype)
        image = self.noise(generator, 1, IMAGE_TOKENS, config["image_dim"]).to(self.dtype)
        side = config["motion_encoder_size"]
        face = self.noise(generator, 4 * frames - 7, side, side, 3).mul(64).add(128).clamp(0, 255).to(torch.uint8)
        return latents, torch.tensor(500.0, device=self.device), text, image, poses, face

    def by_module(self, module: Any, dtype: torch.dtype, *inputs: torch.Tensor) -> torch.Tensor:
        """Return diffusers' forward pass."""
        latents, timestep, text, image, poses, face = inputs
        pixels = face.permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        given = (latents.to(dtype), timestep.reshape(1), *(part.to(dtype) for part in (text, image, poses, pixels)))
        predicted: torch.Tensor = module(*given, return_dict=False)[0]
        return predicted

    def by_denoiser(self, denoiser: PyTorchDenoiser, *inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return Tandem's forward pass."""
        latents, timestep, text, image, poses, face = inputs
        denoiser.steer((), face)
        joined = torch.cat([latents, torch.nn.functional.pad(poses, (0, 0, 0, 0, 1, 0))], dim=1)
        with_image = torch.cat([torch.nn.functional.pad(image, (0, text.shape[2] - image.shape[2])), text], dim=1)
        return partial(denoiser, joined, timestep, with_image)

    @contextmanager
    def first(self, module: Any, count: int) -> Iterator[None]:
        """Leave a transformer its first blocks, while entered."""
        blocks = module.blocks
        try:
            module.blocks = blocks[:count]
            yield
        finally:
            module.blocks = blocks

    def more_blocks(self, module: Any) -> list[Any]:
        """Return the attentions to the face."""
        return list(module.face_adapter)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="480p", choices=["480p", "720p"])
    parser.add_argument("--variants", default="", help=f"{DEFAULT}")
    parser.add_argument("--reference-blocks", type=int, default=6, help="0 measures no errors")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    Path(os.environ.get("OUT", ".")).mkdir(parents=True, exist_ok=True)
    bench = AnimateBench(arguments)
    if bench.cuda:
        torch.cuda.set_device(bench.device)
        bench.say(part="machine", gpu=torch.cuda.get_device_name(), torch=torch.__version__)
    try:
        passes(bench)
    except NoTimeError as error:
        bench.say(left_out=f"{error} and what follows")


if __name__ == "__main__":
    main()
