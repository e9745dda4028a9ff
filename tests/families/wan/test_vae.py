"""The faster VAE decoder equals `AutoencoderKLWan.decode` in every memory layout."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan

from runtime.core.facts import Fact
from runtime.core.plan import Speed
from runtime.execution.compilation import discard_compiled_code
from runtime.families.wan import vae
from runtime.families.wan.vae import CACHED_FRAMES, DecoderSteps, PyTorchVideoDecoder, TritonVaeOps
from runtime.models.spec import ModelSpec
from tests.tiny_models import VAES


@pytest.mark.slow
@pytest.mark.parametrize("architecture", VAES)
@pytest.mark.parametrize("chunk", [1, 3])
@torch.inference_mode()
def test_decoding_pixel_by_pixel_equals_autoencoder_decode(
    architecture: str, chunk: int, tiny: Callable[[str], ModelSpec]
) -> None:
    vae = AutoencoderKLWan.from_pretrained(tiny(architecture).directory, subfolder="vae").eval()
    latents = torch.randn(1, vae.config.z_dim, 5, 4, 6, generator=torch.Generator().manual_seed(5))
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    wanted = vae.decode(latents * std + mean).sample[0].permute(1, 2, 3, 0)
    decoder = PyTorchVideoDecoder(vae)
    for speed in (Speed(channels_last=True), Speed()):
        decoder.compute(speed)
        got = torch.cat(list(decoder.frames(latents, chunk)))
        assert got.shape == wanted.shape
        assert (got - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("channels_last", [False, True])
@torch.inference_mode()
def test_caches_have_two_frames_and_own_their_storage(channels_last: bool, tiny: Callable[[str], ModelSpec]) -> None:
    vae = AutoencoderKLWan.from_pretrained(tiny("wan2.1").directory, subfolder="vae").eval()
    steps = DecoderSteps(vae.decoder, channels_last=channels_last)
    z = torch.randn(1, 16, 4, 4, 6, generator=torch.Generator().manual_seed(5))
    _, caches = steps(z[:, :, :1], [], first=True)
    shapes = [cache.shape for cache in caches]
    _, following = steps(z[:, :, 1:], caches, first=False)
    assert not caches, "what was used is freed before the call ends"
    assert shapes == [cache.shape for cache in following]
    for cache in following:
        assert cache.shape[2] == CACHED_FRAMES
        assert cache.is_contiguous(memory_format=torch.channels_last_3d if channels_last else torch.contiguous_format)
        # A view would keep all that it is a part of in memory.
        assert cache.untyped_storage().nbytes() == cache.nbytes


class Kernels:
    """PyTorch in the place of Triton's kernels, with what was asked of it."""

    norm_activate, add_residual, upsample = (
        staticmethod(vae.norm_activate),
        staticmethod(vae.add_residual),
        staticmethod(vae.upsample),
    )

    def __init__(self) -> None:
        self.taken: list[tuple[int, ...]] = []

    def convolve(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert weight.permute(2, 3, 4, 1, 0).is_contiguous()
        self.taken.append(tuple(weight.shape))
        return F.conv3d(x, weight)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3])
@torch.inference_mode()
def test_kernels_compute_the_convolutions_of_96_channels(chunk: int) -> None:
    discard_compiled_code()
    torch.manual_seed(0)
    # Of as many in the last block as Wan's.
    vae = AutoencoderKLWan(base_dim=96, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True]).eval().bfloat16()
    z = torch.randn(1, vae.config.z_dim, 5, 4, 6).bfloat16()

    def decoded(steps: DecoderSteps) -> tuple[torch.Tensor, list[torch.Tensor]]:
        parts: list[torch.Tensor] = []
        caches: list[torch.Tensor] = []
        for start, end in [(0, 1), *((at, min(at + chunk, 5)) for at in range(1, 5, chunk))]:
            out, caches = steps(z[:, :, start:end], caches, first=start == 0)
            parts.append(out)
        return torch.cat(parts, dim=2), caches

    wanted, wanted_caches = decoded(DecoderSteps(vae.decoder, channels_last=True))
    kernels = Kernels()
    fast = TritonVaeOps(torch.device("cpu"), torch.bfloat16, kernels=kernels)
    got, caches = decoded(DecoderSteps(vae.decoder, channels_last=True, ops=fast))
    taken, (again, _) = fast.compile_seconds, decoded(DecoderSteps(vae.decoder, channels_last=True, ops=fast))
    assert torch.equal(again, got)
    # Once: then it is there. By the second call, it is known how long one takes that compiles nothing.
    assert 0 < fast.compile_seconds <= taken
    calls = 2 * (1 + -(-4 // chunk))
    assert kernels.taken == [(96, 96, 3, 3, 3)] * 4 * calls, "two blocks of two convolutions"
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.02)
    torch.testing.assert_close(caches, wanted_caches, rtol=0.05, atol=0.05)


@torch.inference_mode()
def test_a_failing_kernel_is_reported_once(tiny: Callable[[str], ModelSpec]) -> None:
    class Broken(Kernels):
        @staticmethod
        def add_residual(*_: object) -> torch.Tensor:
            raise RuntimeError("no such instruction")

    vae = AutoencoderKLWan.from_pretrained(tiny("wan2.1").directory, subfolder="vae").eval()
    z, reasons = torch.randn(1, 16, 1, 4, 6), list[Fact]()
    fast = TritonVaeOps(torch.device("cpu"), torch.float32, reasons.append, Broken())
    got, _ = DecoderSteps(vae.decoder, channels_last=True, ops=fast)(z, [], first=True)
    wanted, _ = DecoderSteps(vae.decoder, channels_last=True)(z, [], first=True)
    assert torch.equal(got, wanted)
    assert reasons == [Fact("execution.triton_failed", {"error": "RuntimeError: no such instruction"})]
