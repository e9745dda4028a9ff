"""The DC-AE that ships: its size and licence, and the example, decoded to the clip that it was encoded from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runtime.families.dcae import load_decoder, make_batched_decode_fn

EXAMPLE = Path(__file__).parents[3] / "examples" / "world.safetensors"


@pytest.mark.slow
@pytest.mark.usefixtures("cache_dir")
def test_the_shipped_decoder_shows_the_world_that_the_example_was_made_of() -> None:
    from tools.diorama import train_dcae, world
    from tools.diorama.render import Renderer

    decoder: Any = load_decoder(train_dcae.NAME)
    spec = decoder.tandem_spec
    assert spec.license == "Apache-2.0"
    assert sum(path.stat().st_size for path in spec.directory.iterdir()) < 3_000_000
    latents = load_file(EXAMPLE)["latents"].float()
    assert latents.shape == (49, spec.vae.z_dim, 7, 12)
    shown = slice(0, 49, 6)
    frames = make_batched_decode_fn(decoder)(latents[None, shown] * spec.vae.latent_factor)[0].clamp(-1, 1)
    assert frames.shape == (9, 3, 112, 192)
    scene = world.sample(1, train_dcae.CLIP_SEED, keep="held_out", two_subjects=1.0)
    clip = Renderer(train_dcae.LANDSCAPE, 49)(scene)[0][shown]
    assert train_dcae.psnr(torch.square(frames - clip).mean()) > 30
