"""Animate in several processes: passes equal those of one, also where processes share a latent frame's tokens."""

from collections.abc import Callable
from contextlib import closing

import pytest
import torch

from runtime.core.plan import EAGER, Speed
from runtime.execution.components import PROMPTED, UNPROMPTED
from runtime.execution.parallel.proxies import GroupManager, SharedControlDenoiser
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from tests.families.ltx2.test_several_gpus import PART, TWO
from tests.families.wan.test_animate import SIDE, Inputs
from tests.tiny_models import ANIMATE

Tiny = Callable[[str], ModelSpec]
# Frames, rows and columns of latents. Shares of whole latent frames; in the middle of one; of 23 tokens, padded; and of
# one latent frame with its pose, of which each process has one token.
SIZES = ((4, 6, 8), (3, 6, 8), (3, 6, 10), (2, 2, 2))


def test_a_pass_of_two_processes_equals_that_of_one(tiny: Tiny, subtests: pytest.Subtests) -> None:
    spec, timestep = tiny(ANIMATE), torch.tensor(400.0)
    given, generator = Inputs(spec), torch.Generator().manual_seed(2)
    texts = {which: given.with_image(text) for which, text in zip((PROMPTED, UNPROMPTED), given.texts, strict=True)}
    alone, manager = PyTorchDenoiser(load_module(spec, "transformer", PART)), GroupManager()
    try:
        for speed in (EAGER, Speed(text_kept=True, fused=True)):
            with closing(manager.load(TWO, spec, "transformer", PART, lambda: None, speed)) as shared:
                assert isinstance(shared.part, SharedControlDenoiser)
                for size in SIZES:
                    frames = 4 * (size[0] - 2) + 1
                    face = torch.randint(0, 256, (frames, SIDE, SIDE, 3), dtype=torch.uint8, generator=generator)
                    latents = torch.randn(1, 36 + 16, *size, generator=generator)
                    for denoiser in (alone, shared.part):
                        denoiser.steer((), face)
                    wanted = [alone(latents, timestep, text, which) for which, text in texts.items()]
                    found = shared.part.together(latents, timestep, texts)
                    with subtests.test(speed=speed, size=size):
                        assert (wanted[0] - wanted[1]).norm() > 1e-3 * wanted[0].norm()
                        for one, other in zip(found, wanted, strict=True):
                            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    finally:
        manager.stop_processes()


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 12])
def test_shares_of_the_attention_to_a_face_are_those_of_the_whole(count: int, tiny: Tiny) -> None:
    """Whatever the shares' limits are; what a process has beyond the last token does not matter."""
    from runtime.families.wan.animate import FaceBranch

    denoiser = PyTorchDenoiser(load_module(tiny(ANIMATE), "transformer", PART))
    module, frames, of_frame = denoiser._module, 3, 5
    x, face = torch.randn(2, frames * of_frame, 24), torch.randn(2, frames, 3, 24)
    tokens = frames * of_frame

    def added(start: int, share: int) -> torch.Tensor:
        hint = FaceBranch(module, face, tokens, (start, share)).hint(0)
        assert hint is not None
        own = x[:, start : start + share]
        return hint.added_to(torch.nn.functional.pad(own, (0, 0, 0, share - own.shape[1])))

    whole, share = added(0, tokens), -(-tokens // count)
    parts = torch.cat([added(number * share, share) for number in range(count)], dim=1)
    torch.testing.assert_close(parts[:, :tokens], whole)
    assert (whole - x).norm() > 1e-3 * x.norm()
