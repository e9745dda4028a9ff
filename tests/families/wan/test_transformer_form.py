"""The transformer's exportable form equals diffusers' module, with and without text padding."""

from collections.abc import Callable

import pytest
import torch
from diffusers import WanTransformer3DModel

from runtime.engines.component_programs import TEXT_PADDING, cut_text
from runtime.engines.programs import load_program
from runtime.families.wan.transformer import PyTorchDenoiser
from runtime.models.spec import ModelSpec, is_transformer
from tests.engines.conftest import relative
from tests.tiny_models import IN_JOBS

SIZES = [(1, 4, 4), (3, 6, 8), (5, 10, 12)]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", IN_JOBS)
@pytest.mark.parametrize("size", SIZES)
def test_it_equals_diffusers(tiny: Callable[[str], ModelSpec], architecture: str, size: tuple[int, int, int]) -> None:
    spec = tiny(architecture)
    for component in filter(is_transformer, spec.component_names):
        module = WanTransformer3DModel.from_pretrained(spec.directory / component).eval()
        denoiser = PyTorchDenoiser(module)
        program = load_program(spec, component, "transformer", device="cpu", dtype="float32")
        inputs = program.inputs(size)
        expected = denoiser(inputs["latents"], inputs["timestep"], inputs["text_embeds"])
        assert relative(program.run(**inputs)["velocity"], expected) < 1e-5


@pytest.mark.parametrize("words", [0, 1, 24, 505, 512])
def test_padding_counts_as_one_key(tiny: Callable[[str], ModelSpec], words: int) -> None:
    program = load_program(tiny("wan2.1"), "transformer", "transformer", device="cpu", dtype="float32")
    inputs = program.inputs((2, 4, 4))
    embeds = torch.randn(inputs["text_embeds"].shape, generator=torch.Generator().manual_seed(1))
    embeds[:, words:] = 0
    inputs["text_embeds"] = embeds
    cut = cut_text(inputs)
    assert cut["text_embeds"].shape[1] + cut[TEXT_PADDING].item() == 512
    assert cut["text_embeds"].shape[1] < words + 9
    with torch.inference_mode():
        assert relative(program.module(*cut.values()), program.module(*inputs.values())) < 1e-5


def test_half_precision_is_close(tiny: Callable[[str], ModelSpec]) -> None:
    programs = {
        dtype: load_program(tiny("wan2.1"), "transformer", "transformer", device="cpu", dtype=dtype)
        for dtype in ("float32", "bfloat16", "float16")
    }
    inputs = programs["float32"].inputs((3, 6, 8))
    expected = programs["float32"].run(**inputs)["velocity"]
    for dtype, limit in (("bfloat16", 2e-2), ("float16", 3e-3)):
        velocity = programs[dtype].run(**inputs)["velocity"]
        assert velocity.dtype is torch.float32
        assert relative(velocity, expected) < limit
