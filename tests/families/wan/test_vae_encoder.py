"""The faster VAE encoder equals `AutoencoderKLWan.encode`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

from runtime.core.cancel import never
from runtime.families.wan.vae_encoder import Clip, EncoderSteps, PyTorchVideoEncoder
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from tests.tiny_models import VAES


@pytest.mark.slow
@pytest.mark.parametrize("architecture", VAES)
@pytest.mark.parametrize("last", [False, True], ids=["image", "two images"])
@torch.inference_mode()
def test_latents_of_an_image_and_gray_frames_equal_autoencoder_encode(
    architecture: str, last: bool, tiny: Callable[[str], ModelSpec]
) -> None:
    vae = AutoencoderKLWan.from_pretrained(tiny(architecture).directory, subfolder="vae").eval()
    steps, patch_size = EncoderSteps(vae.encoder), vae.config.patch_size
    side = 2 * vae.config.scale_factor_spatial
    image, other = torch.rand(2, 1, 3, 1, side, 2 * side, generator=torch.Generator().manual_seed(5)) * 2 - 1
    for frames in (1, 5, 9, 17, 45):
        gray = frames - 1 - last
        if gray < 0:
            continue
        start = torch.cat([image, torch.zeros_like(image)], dim=2) if gray else image
        clip = Clip(start, max(gray - 1, 0), other if last else None)
        assert clip.frames == frames
        wanted = vae.encode(clip.whole()).latent_dist.mode()
        got = vae.quant_conv(steps(clip.each(lambda part: patchify(part, patch_size or 1)))).chunk(2, dim=1)[0]
        assert got.shape == wanted.shape
        assert (got - wanted).abs().max() < 1e-5, frames


@pytest.mark.slow
def test_tiles_are_close_to_whole_frames() -> None:
    spec = find("diorama", Path("none"))  # trained: random weights attend to all pixels alike
    encoder = PyTorchVideoEncoder(AutoencoderKLWan.from_pretrained(spec.directory, subfolder="vae").float())
    scale = spec.vae.scale_factor_spatial
    rows, columns = torch.linspace(-1, 1, 12 * scale), torch.linspace(-1, 1, 20 * scale)
    image = torch.stack([rows[:, None] * columns, rows[:, None].expand(-1, 20 * scale), columns.expand(12 * scale, -1)])
    images = [image, image.flip(1)]
    whole = encoder.latents(images, 5)
    assert torch.equal(encoder.latents(images, 5, 20), whole)
    tiled = encoder.latents(images, 5, 8)
    assert tiled.shape == whole.shape
    assert 0 < (tiled - whole).norm() / whole.norm() < 0.1
    video = torch.stack([image.roll(frame, 1) for frame in range(9)]).add(1).mul(127.5).byte().permute(0, 2, 3, 1)
    every, in_tiles = (encoder.video_latents(video, tile, never) for tile in (None, 8))
    assert every.shape[2] == 3 and in_tiles.shape == every.shape
    assert 0 < (in_tiles - every).norm() / every.norm() < 0.1
