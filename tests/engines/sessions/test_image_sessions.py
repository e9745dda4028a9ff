"""Engines of what starts from images equal PyTorch on every backend of a CPU."""

import pytest
import torch

from runtime.engines.verify import verify
from runtime.planner.choice.engine_index import ShapeProfile
from tests.engines.conftest import INDUCTOR, PROFILES, Build, relative
from tests.tiny_models import SHALLOW_FLF2V, SHALLOW_TI2V

CASES = [
    (SHALLOW_FLF2V, "transformer", "transformer"),
    (SHALLOW_TI2V, "transformer", "transformer"),
    (SHALLOW_FLF2V, "image_encoder", "image_encoder"),
    (SHALLOW_FLF2V, "vae_encoder", "vae_encoder_next"),
    (SHALLOW_TI2V, "vae_encoder", "vae_encoder_first"),
]

# Inductor compiles C++: one is enough beside those of videos without images.
COMPILED = pytest.param("inductor", *CASES[2], marks=INDUCTOR.marks)
# Both read the same files.
EXPORTED = [*(("cpu", *case) for case in CASES), ("openvino", *CASES[2])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "architecture", "component", "program"),
    [*EXPORTED, COMPILED],
)
def test_engines_equal_pytorch(built: Build, builder: str, architecture: str, component: str, program: str) -> None:
    profile = ShapeProfile.fixed(PROFILES[program].opt) if program.startswith("vae") else PROFILES[program]
    engine = built(builder, architecture, component, program, "float32", profile)
    with engine.session() as session:
        result = verify(session, engine.program(), profile, "float32")
    assert result.error < 1e-5, result.detail


@pytest.mark.slow
def test_text_is_cut_without_the_tokens_of_images(built: Build) -> None:
    engine = built("cpu", SHALLOW_FLF2V, "transformer", "transformer")
    program = engine.program()
    inputs = program.inputs((3, 6, 8))
    with engine.session() as session:
        for images, words in ((10, 0), (10, 512), (0, 1), (0, 0)):
            embeds = torch.randn(inputs["text_embeds"].shape, generator=torch.Generator().manual_seed(words))
            embeds[:, images:10] = embeds[:, 10 + words :] = 0
            inputs["text_embeds"] = embeds
            assert relative(session.infer(**inputs)["velocity"], program.run(**inputs)["velocity"]) < 1e-5
