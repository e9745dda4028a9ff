"""Decoding in 16 bits: close to float32, also in strips; an overflow is an error, not a white pixel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.core.cancel import Cancel
from runtime.core.errors import BadResultError
from runtime.core.plan import ComponentPlan
from runtime.execution.decoded_frames import not_finite
from runtime.families.wan.vae import PyTorchVideoDecoder, StripDecoder, as_frames
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from runtime.pipeline.sampling import decode
from tests.tiny_models import VAES

Tiny = Callable[[str], ModelSpec]
LEAST_DB = 40.0


def part(dtype: str) -> ComponentPlan:
    """Return the plan of a VAE on the CPU."""
    return ComponentPlan(backend="pytorch", device="cpu", dtype=dtype, weights_bytes=1, reasons=())


def latents_of(spec: ModelSpec) -> torch.Tensor:
    """Return made-up latents: two frames."""
    return torch.randn((1, spec.vae.z_dim, 2, 4, 6), generator=torch.Generator().manual_seed(1))


def frames(decoder: PyTorchVideoDecoder | StripDecoder, latents: torch.Tensor) -> torch.Tensor:
    """Decode a whole clip."""
    return torch.cat(list(decoder.frames(latents, 2)))


def psnr(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return how far frames in -1 to 1 are apart, in dB."""
    return float(10 * torch.log10(4 / (one - other).pow(2).mean()))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", VAES)
def test_bfloat16_is_close_to_float32(architecture: str, tiny: Tiny) -> None:
    spec = tiny(architecture)
    latents = latents_of(spec)
    made_in: list[Any] = [load_module(spec, "vae", part(dtype)) for dtype in ("float32", "bfloat16")]
    full, half = made_in
    wanted, made = (frames(PyTorchVideoDecoder(module), latents) for module in (full, half))
    assert made.dtype == torch.float32 and made.shape == wanted.shape
    assert LEAST_DB < psnr(made, wanted) < 100.0
    strips = torch.cat([frames(StripDecoder(half, "cpu", number, 2), latents) for number in range(2)], dim=2)
    assert LEAST_DB < psnr(strips, wanted) < 100.0


def test_float16_is_closer(tiny: Tiny) -> None:
    spec = tiny("wan2.1")
    latents = latents_of(spec)
    modules: dict[str, Any] = {
        dtype: load_module(spec, "vae", part(dtype)) for dtype in ("float32", "bfloat16", "float16")
    }
    made = {dtype: frames(PyTorchVideoDecoder(module), latents) for dtype, module in modules.items()}
    assert psnr(made["float16"], made["float32"]) > psnr(made["bfloat16"], made["float32"]) + 6


@pytest.mark.parametrize("strips", [False, True])
def test_latents_are_denormalised_in_float32(strips: bool, tiny: Tiny) -> None:
    """A mean that bfloat16 does not hold is not rounded before the sum."""
    spec = tiny("wan2.1")
    vae: Any = load_module(spec, "vae", part("bfloat16"))
    size = spec.vae.z_dim
    vae.register_to_config(latents_mean=[1.001] * size, latents_std=[1.003] * size)
    given: list[torch.Tensor] = []
    vae.post_quant_conv.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0]))
    latents = latents_of(spec)
    frames(StripDecoder(vae, "cpu", 0, 2) if strips else PyTorchVideoDecoder(vae), latents)
    z = torch.cat(given, dim=2)
    assert torch.equal(z, (latents * 1.003 + 1.001).bfloat16())
    assert not torch.equal(z, latents.bfloat16() * torch.tensor(1.003).bfloat16() + 1.0)


def test_an_overflow_is_not_a_colour() -> None:
    pixels = torch.tensor([0.5, -3.0, 2.0, torch.inf, -torch.inf, torch.nan]).view(1, 3, 1, 1, 2).half()
    # Along the width: the colours are the last axis.
    assert torch.equal(as_frames(pixels)[0, 0].isnan(), torch.tensor([[False, False, True], [False, True, True]]))
    assert as_frames(pixels)[0, 0, 0, :2].tolist() == [0.5, 1.0] and as_frames(pixels)[0, 0, 1, 0] == -1.0


@pytest.mark.parametrize(("dtype", "white"), [("bfloat16", True), ("float16", False)])
def test_an_overflow_is_an_error_that_names_the_cause(dtype: str, white: bool, tiny: Tiny) -> None:
    spec = tiny("wan2.1")
    vae: Any = load_module(spec, "vae", part(dtype))
    with torch.no_grad():
        bias = vae.decoder.conv_out.bias
        bias.copy_(torch.full(bias.shape, 1e6))  # more than float16 holds
    made = decode(PyTorchVideoDecoder(vae), latents_of(spec), 2, Cancel(), part=lambda: part(dtype))
    if white:
        assert (torch.cat(list(made)) == 255).all()
        return
    with pytest.raises(BadResultError) as bad:
        list(made)
    assert (bad.value.code, bad.value.data) == ("execution.vae_overflow", {"dtype": "float16"})


@pytest.mark.parametrize(
    ("planned", "code"),
    [
        ({"dtype": "float32"}, "execution.vae_not_finite"),
        ({"dtype": "bfloat16"}, "execution.vae_overflow"),
        ({"dtype": "float16"}, "execution.vae_overflow"),
        # An engine has its own precision.
        ({"dtype": "bfloat16", "backend": "tensorrt"}, "execution.vae_not_finite"),
    ],
)
def test_the_cause_of_nan_depends_on_the_precision(planned: dict[str, Any], code: str) -> None:
    found = not_finite(part("float32").replace(**planned))
    assert found.code == code
    assert found.data.get("dtype", planned["dtype"]) == planned["dtype"]
    assert not_finite(None).code == "execution.vae_not_finite"
