"""Programs: example inputs, signatures, and exports that are valid at every size of their profile."""

from collections.abc import Callable

import pytest
import torch

from runtime.engines.component_programs import TEXT_PADDING, Program, cut_text
from runtime.engines.programs import load_program
from runtime.engines.signatures import IOSignature
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import ShapeProfile
from tests.engines.conftest import PROFILES, relative
from tests.engines.engine_files import refusal

Case = tuple[str, str, str]
CASES: list[Case] = [
    ("wan2.2-a14b", "text_encoder", "text_encoder"),
    ("wan2.2-a14b", "transformer", "transformer"),
    ("wan2.1", "vae", "vae_first"),
    ("wan2.1", "vae", "vae_next"),
    ("wan2.2-ti2v-5b", "transformer", "transformer"),
    ("wan2.2-ti2v-5b", "vae", "vae_first"),
    ("wan2.2-ti2v-5b", "vae", "vae_next"),
    ("wan2.1-flf2v", "transformer", "transformer"),
    ("wan2.1-i2v", "image_encoder", "image_encoder"),
    ("wan2.1-i2v", "vae_encoder", "vae_encoder_next"),
]
# One of each kind; tests of sessions run exports of the others.
EXPORTED = [
    pytest.param(case, id="-".join(case), marks=() if case[1].endswith("encoder") else pytest.mark.slow)
    for case in (CASES[0], CASES[1], CASES[6], CASES[8])
]


def load(case: Case, tiny: Callable[[str], ModelSpec]) -> Program:
    """Return a program."""
    architecture, component, name = case
    assert name in tiny(architecture).programs[component]
    return load_program(tiny(architecture), component, name, device="cpu", dtype="float32")


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def program(request: pytest.FixtureRequest, tiny: Callable[[str], ModelSpec]) -> Program:
    """Return each program in turn."""
    return load(request.param, tiny)


def test_inputs_depend_on_the_seed(program: Program) -> None:
    size = PROFILES[program.name].opt
    first, again, other = program.inputs(size), program.inputs(size), program.inputs(size, seed=1)
    assert tuple(first) == program.input_names
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert tuple(program.run(**first)) == program.output_names


@pytest.mark.parametrize("case", EXPORTED)
def test_exported_program_equals_the_module_at_every_size(case: Case, tiny: Callable[[str], ModelSpec]) -> None:
    program = load(case, tiny)
    profile = PROFILES[program.name]
    exported = program.export(profile).module()
    for size in (profile.min, profile.opt, profile.max):
        inputs = program.inputs(size)
        given = exported(*(inputs[name] for name in program.input_names))
        given = given if isinstance(given, tuple) else (given,)
        for output, expected in zip(given, program.run(**inputs).values(), strict=True):
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_signature_has_every_output(program: Program) -> None:
    profile = PROFILES[program.name]
    signature = IOSignature.from_text(program.signature(profile, program.example(profile)).to_text())
    for size in (profile.min, profile.opt, profile.max):
        inputs = program.inputs(size)
        _, sizes = signature.convert(inputs, torch.device("cpu"))
        assert [(tensor.name, tensor.torch_dtype, tensor.shape(sizes)) for tensor in signature.outputs] == [
            (name, output.dtype, tuple(output.shape)) for name, output in program.run(**inputs).items()
        ]


def test_fixed_profile_has_no_dynamic_sizes(tiny: Callable[[str], ModelSpec]) -> None:
    program = load_program(tiny("wan2.1"), "transformer", "transformer", device="cpu", dtype="float32")
    profile = ShapeProfile.fixed((2, 4, 6))
    signature = program.signature(profile, program.example(profile))
    assert signature.ranges == {}
    cut = program.signature(profile, program.example(profile, cut=True))
    assert cut.ranges == {"text": (2, 512)}


def test_tokens_of_images_are_not_cut(tiny: Callable[[str], ModelSpec]) -> None:
    program = load_program(tiny("wan2.1-flf2v"), "transformer", "transformer", device="cpu", dtype="float32")
    profile = ShapeProfile.fixed((2, 4, 4))
    signature = program.signature(profile, program.example(profile, cut=True))
    assert signature.ranges == {"text": (12, 522)}


@pytest.mark.slow
def test_export_with_cut_text_accepts_any_length(tiny: Callable[[str], ModelSpec]) -> None:
    program = load_program(tiny("wan2.1-flf2v"), "transformer", "transformer", device="cpu", dtype="float32")
    profile, inputs = ShapeProfile.fixed((2, 4, 4)), program.inputs((2, 4, 4))
    least, _ = program.signature(profile, program.example(profile, cut=True)).ranges["text"]
    exported = program.export(profile, cut=True).module()
    # Ten tokens of images come before those of the text, and are not cut.
    for images, words in ((10, 0), (10, 512), (10, 30), (0, 1), (0, 0)):
        embeds = torch.randn(inputs["text_embeds"].shape, generator=torch.Generator().manual_seed(words))
        embeds[:, images:10] = embeds[:, 10 + words :] = 0
        inputs["text_embeds"] = embeds
        with torch.inference_mode():
            given = exported(*cut_text(inputs, least).values())
        assert relative(given, program.run(**inputs)["velocity"]) < 1e-5


def _signature(tiny: Callable[[str], ModelSpec], name: str) -> tuple[IOSignature, dict[str, torch.Tensor]]:
    program = load_program(
        tiny("wan2.1"), "vae" if name != "transformer" else name, name, device="cpu", dtype="float32"
    )
    profile = PROFILES[name]
    return program.signature(profile, program.example(profile)), program.inputs(profile.opt)


@pytest.mark.parametrize(
    ("shape", "given"),
    [
        ((1, 16, 3, 6, 7), "1×16×3×6×7"),
        ((1, 16, 6, 6, 8), "1×16×6×6×8"),
        ((1, 16, 3, 6), "1×16×3×6"),
        ((2, 16, 3, 6, 8), "2×16×3×6×8"),
    ],
)
def test_another_size_is_refused(tiny: Callable[[str], ModelSpec], shape: tuple[int, ...], given: str) -> None:
    signature, inputs = _signature(tiny, "transformer")
    with refusal("engine.other_shape") as refused:
        signature.convert(inputs | {"latents": torch.zeros(shape)}, torch.device("cpu"))
    expected = "1×16×(1 to 5)×(4 to 10)×(4 to 12)"
    assert refused.value.data == {"tensor": "latents", "expected": expected, "given": given}


def test_caches_of_another_size_are_refused(tiny: Callable[[str], ModelSpec]) -> None:
    signature, inputs = _signature(tiny, "vae_next")
    with refusal("engine.other_shape") as refused:
        signature.convert(inputs | {"cache_3": inputs["cache_3"][..., :-1]}, torch.device("cpu"))
    assert refused.value.data["tensor"] == "cache_3"
    del inputs["cache_3"]
    with refusal("engine.other_inputs") as refused:
        signature.convert(inputs, torch.device("cpu"))
    assert "cache_3" in refused.value.data["expected"]
    assert "cache_3" not in refused.value.data["given"]


def test_inputs_are_converted_to_the_engines_dtype(tiny: Callable[[str], ModelSpec]) -> None:
    signature, inputs = _signature(tiny, "transformer")
    strided = inputs["latents"].double().transpose(3, 4).contiguous().transpose(3, 4)
    tensors, _ = signature.convert(inputs | {"latents": strided}, torch.device("cpu"))
    assert tensors[0].dtype is torch.float32
    assert tensors[0].is_contiguous()
    assert torch.equal(tensors[0], inputs["latents"])


def test_cut_text_keeps_a_word_of_zeros_between_others(tiny: Callable[[str], ModelSpec]) -> None:
    program = load_program(tiny("wan2.1"), "transformer", "transformer", device="cpu", dtype="float32")
    inputs = program.inputs((1, 4, 4))
    inputs["text_embeds"][:, 3] = 0
    cut = cut_text(inputs)
    assert cut["text_embeds"].shape[1] == 24
    assert cut[TEXT_PADDING].tolist() == [488.0]
