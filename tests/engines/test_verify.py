"""Verification passes engines that equal PyTorch, and fails errors, NaN and Inf, wherever they occur."""

import itertools
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from runtime.core.facts import Fact
from runtime.engines.component_programs import Program
from runtime.engines.programs import load_program
from runtime.engines.reference import encoded_prompt
from runtime.engines.sessions import Session
from runtime.engines.sessions.inductor import InductorSession
from runtime.engines.verify import TIMESTEPS, TOLERANCES, Verification, cases_of, compare, verify
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec, component_of
from runtime.planner.choice.engine_index import ShapeProfile
from tests.engines.conftest import PROFILES, Build
from tests.tiny_models import SHALLOW

NAME = "blocks.0.ffn.net.2.bias"
SIZE = (3, 6, 8)
Tensors = dict[str, torch.Tensor]


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_outputs_with_nan_or_inf_fail(built: Build, value: float) -> None:
    engine = built("inductor", SHALLOW, "transformer", "transformer")
    program = engine.program()
    weights = engine.program().module.state_dict()
    weights[NAME][3] = value
    with InductorSession((engine.folder / "engine.pt2").read_bytes(), device="cpu", weights=weights) as session:
        result = verify(session, program, PROFILES["transformer"], "bfloat16")
    assert math.isnan(result.error)
    assert not result.passed
    assert result.detail == Fact("engine.compared_not_finite", {"where": "velocity at 1×4×4"})


@pytest.mark.slow
@pytest.mark.compiler
def test_small_error_fails_in_float32_and_names_the_output(built: Build) -> None:
    engine = built("inductor", SHALLOW, "transformer", "transformer")
    weights = engine.program().module.state_dict()
    weights[NAME] += 0.003
    with InductorSession((engine.folder / "engine.pt2").read_bytes(), device="cpu", weights=weights) as session:
        result = verify(session, engine.program(), PROFILES["transformer"], "float32")
        assert TOLERANCES["float32"] < result.error < 0.1
        assert not result.passed
        fact = result.detail if result.detail.code == "engine.compared" else result.detail.data["compared"]
        assert fact.code == "engine.compared"
        assert fact.data["where"].startswith("velocity at ")
        assert fact.data["error"] == result.error
        assert verify(session, engine.program(), PROFILES["transformer"], "bfloat16").passed
    torch.testing.assert_close(result.tolerance, 1e-4)


class Faulty(Session):
    """A program in PyTorch, with a fault before or after it.

    Args:
        program: computes what is right.
        before, after: change its inputs, or its outputs for given inputs.
    """

    def __init__(
        self,
        program: Program,
        before: Callable[[Tensors], Tensors] = lambda inputs: inputs,
        after: Callable[[Tensors, torch.Tensor], torch.Tensor] = lambda _, velocity: velocity,
    ) -> None:
        self._program, self._before, self._after = program, before, after

    def infer(self, **inputs: torch.Tensor) -> Tensors:
        return {"velocity": self._after(inputs, self._program.run(**self._before(inputs))["velocity"].clone())}

    def close(self) -> None:
        """Nothing is loaded."""


@pytest.fixture(scope="module")
def program(tiny: Callable[[str], ModelSpec]) -> Program:
    return load_program(tiny("wan2.1"), "transformer", "transformer", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def text(program: Program) -> torch.Tensor:
    found = encoded_prompt(program.spec, "cpu")
    assert found is not None
    return found


def verified(
    session: Session,
    program: Program,
    text: torch.Tensor | None,
    precision: str = "float16",
    size: tuple[int, ...] = SIZE,
) -> Verification:
    """Verify at one size."""
    frames, height, width = size
    return verify(session, program, ShapeProfile.fixed((frames, height, width)), precision, text)


def test_an_equal_engine_passes(program: Program, text: torch.Tensor) -> None:
    found = verified(Faulty(program), program, text, "float32")
    assert found.passed
    assert (found.error, found.largest_error) == (0, 0)
    assert found.detail == Fact("engine.compared_equal")
    assert min(found.seconds_per_call, found.pytorch_seconds_per_call) > 0


@pytest.mark.parametrize("timestep", TIMESTEPS)
def test_an_engine_wrong_at_one_timestep_only_fails(program: Program, text: torch.Tensor, timestep: float) -> None:
    def scaled(inputs: Tensors, velocity: torch.Tensor) -> torch.Tensor:
        return velocity * 1.1 if inputs["timestep"].item() == timestep else velocity

    found = verified(Faulty(program, after=scaled), program, text)
    assert not found.passed
    assert found.error == pytest.approx(0.1, rel=1e-3)
    assert found.detail.data["compared"].data["where"] == f"velocity at 3×6×8, t = {timestep:g}"


def test_an_engine_with_nan_at_one_timestep_only_fails(program: Program, text: torch.Tensor) -> None:
    def spoiled(inputs: Tensors, velocity: torch.Tensor) -> torch.Tensor:
        if inputs["timestep"].item() == 500:
            velocity[0, 0, 0, 0, 0] = math.nan
        return velocity

    found = verified(Faulty(program, after=spoiled), program, text)
    assert math.isnan(found.error)
    assert (found.passed, found.largest_error) == (False, 0)
    assert found.detail == Fact("engine.compared_not_finite", {"where": "velocity at 3×6×8, t = 500"})


def test_an_engine_wrong_in_one_token_fails(program: Program, text: torch.Tensor) -> None:
    def off(_: Tensors, velocity: torch.Tensor) -> torch.Tensor:
        velocity[..., -1, -2:, -2:] *= 1.2
        return velocity

    # Of the norm of all tokens, it is less than rounding to float16 in every layer takes.
    found = verified(Faulty(program, after=off), program, text, size=(5, 20, 24))
    assert found.error < found.tolerance == 1e-2
    assert found.largest_error > 2e-2
    assert not found.passed
    assert found.detail.code == "engine.compared_largest"
    assert found.detail.data["largest"] == found.largest_error
    assert found.detail.data["compared"].data["error"] == found.error


def test_an_engine_wrong_for_prompts_only_fails(program: Program, text: torch.Tensor) -> None:
    def cut(inputs: Tensors) -> Tensors:
        # The last words are lost, unless their number is a multiple of 8, as that of the random text.
        embeds = inputs["text_embeds"].clone()
        words = int(embeds[0].any(dim=1).sum())
        embeds[:, words // 8 * 8 :] = 0
        return inputs | {"text_embeds": embeds}

    session = Faulty(program, before=cut)
    assert verified(session, program, None, "float32").passed
    found = verified(session, program, text, "float32")
    assert not found.passed
    assert found.error > 5 * found.tolerance


def test_latents_follow_the_reference_from_noise(program: Program, text: torch.Tensor) -> None:
    cases = list(cases_of(program, PROFILES["transformer"], text))
    assert [case.where for case in cases] == [
        "1×4×4",
        *(f"3×6×8, t = {timestep:g}" for timestep in TIMESTEPS),
        "5×10×12",
    ]
    trajectory = cases[1:-1]
    assert all(torch.equal(case.inputs["text_embeds"], text) for case in trajectory)
    assert torch.equal(trajectory[0].inputs["latents"], program.inputs(SIZE)["latents"])
    for one, other in pairwise(trajectory):
        assert one.expected is not None
        step = (other.inputs["timestep"] - one.inputs["timestep"]) / 1000
        after = one.inputs["latents"] + step * one.expected["velocity"]
        torch.testing.assert_close(other.inputs["latents"], after)


def test_both_kinds_of_videos_of_one_engine_are_compared(tiny: Callable[[str], ModelSpec]) -> None:
    program = load_program(tiny("wan2.2-ti2v-5b"), "transformer", "transformer", device="cpu", dtype="float32")
    cases = cases_of(program, ShapeProfile.fixed((2, 4, 4)))
    given = [case.inputs["timestep"].tolist() for case in cases]
    assert given == [[999, 999], [0, 900], [800, 800], [0, 500], [50, 50]]


def test_given_frames_and_images_stay_along_the_trajectory(tiny: Callable[[str], ModelSpec]) -> None:
    program = load_program(tiny("wan2.1-flf2v"), "transformer", "transformer", device="cpu", dtype="float32")
    text = torch.randn(1, 512, 32)
    cases = list(cases_of(program, ShapeProfile.fixed((2, 4, 4)), text))
    first, *_, last = (case.inputs for case in cases)
    assert first["latents"].shape == last["latents"].shape == (1, 36, 2, 4, 4)
    assert torch.equal(first["latents"][:, 16:], last["latents"][:, 16:])
    assert not torch.equal(first["latents"][:, :16], last["latents"][:, :16])
    embeds = program.inputs((2, 4, 4))["text_embeds"]
    assert torch.equal(last["text_embeds"], torch.cat([embeds[:, :10], text], dim=1))


# In float16, convolutions take minutes on a CPU.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "name", "dtype"),
    [
        *itertools.product(["diorama"], ["text_encoder", "transformer"], ["float16", "bfloat16"]),
        *itertools.product(["diorama"], ["vae_first", "vae_next"], ["bfloat16"]),
        *itertools.product(["wan2.2-ti2v-5b"], ["transformer", "vae_first", "vae_next"], ["bfloat16"]),
        ("wan2.1-flf2v", "transformer", "float16"),
        *itertools.product(["wan2.1-flf2v"], ["vae_encoder_first", "vae_encoder_next"], ["bfloat16"]),
    ],
)
def test_rounding_of_pytorch_passes(tiny: Callable[[str], ModelSpec], architecture: str, name: str, dtype: str) -> None:
    spec = find("diorama", Path("none")) if architecture == "diorama" else tiny(architecture)
    component = component_of(name)
    if architecture == "diorama" and component == "transformer":
        component = "transformer_2"  # rounds more than the other expert
    rounded = load_program(spec, component, name, device="cpu", dtype=dtype)
    exact = load_program(spec, component, name, device="cpu", dtype="float32")
    size = {"text_encoder": (1, 1, 1), "transformer": SIZE, "vae_next": (2, 6, 8)}.get(name, (1, 6, 8))
    profile = ShapeProfile.fixed(size)

    class Rounded(Session):
        def infer(self, **inputs: torch.Tensor) -> Tensors:
            kept = getattr(torch, dtype)
            return rounded.run(**{key: one.to(kept) if key.startswith("cache") else one for key, one in inputs.items()})

        def close(self) -> None:
            """Nothing is loaded."""

    found = compare(Rounded(), cases_of(exact, profile, encoded_prompt(spec, "cpu")), name, dtype)
    assert found.passed, found.detail
    assert found.error > 0
    assert not compare(Rounded(), cases_of(exact, profile), name, "float32").passed
