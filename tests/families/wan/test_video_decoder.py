"""The PyTorch decoder continues from an engine's caches."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runtime.engines.programs import load_program
from runtime.execution.residency import Residency
from runtime.families.wan.vae import PyTorchVideoDecoder
from runtime.models.spec import ModelSpec
from tests.plans import Alone, tiny_plan
from tests.tiny_models import VAES


@pytest.mark.slow
@pytest.mark.parametrize("architecture", VAES)
@pytest.mark.parametrize("steps", [1, 2])
@torch.inference_mode()
def test_continuing_from_caches_equals_decoding_at_once(
    architecture: str, steps: int, tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    spec = tiny(architecture)
    latents = torch.randn((1, spec.vae.z_dim, 4, 4, 4), generator=torch.Generator().manual_seed(1))
    first = load_program(spec, "vae", "vae_first", device="cpu", dtype="float32").module
    following = load_program(spec, "vae", "vae_next", device="cpu", dtype="float32").module
    _, *caches = first(latents[:, :, :1])
    if steps > 1:
        _, *caches = following(latents[:, :, 1:steps], *caches)
    with Residency() as residency, residency.video_decoder(spec, Alone(tiny_plan(spec, tmp_path / "x.mp4"))) as decoder:
        assert isinstance(decoder, PyTorchVideoDecoder)
        whole = torch.cat(list(decoder.frames(latents, 1)))
        rest = torch.cat(list(decoder.decode_from(latents, 2, steps, caches)))
    expected = whole[-len(rest) :]
    assert len(rest) == 4 * (4 - steps)
    assert (rest - expected).norm() / expected.norm() < 1e-5
