"""Verification passes engines that equal PyTorch, and fails errors, NaN and Inf."""

import math

import pytest
import torch

from runtime.core.facts import Fact
from runtime.engines.sessions.inductor import InductorSession
from runtime.engines.verify import TOLERANCES, verify
from tests.engines.conftest import PROFILES, Build

pytestmark = [pytest.mark.slow, pytest.mark.compiler]

NAME = "blocks.1.ffn.net.2.bias"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_outputs_with_nan_or_inf_fail(built: Build, value: float) -> None:
    engine = built("inductor", "wan2.2-a14b", "transformer", "transformer")
    program = engine.program()
    weights = engine.program().module.state_dict()
    weights[NAME][3] = value
    with InductorSession(engine.folder / "engine.pt2", device="cpu", weights=weights) as session:
        result = verify(session, program, PROFILES["transformer"], "bfloat16")
    assert math.isnan(result.error)
    assert not result.passed
    assert result.detail == Fact("engine.compared_not_finite", {"where": "velocity at 1×4×4"})


def test_small_error_fails_in_float32_and_names_the_output(built: Build) -> None:
    engine = built("inductor", "wan2.2-a14b", "transformer", "transformer")
    weights = engine.program().module.state_dict()
    weights[NAME] += 0.003
    with InductorSession(engine.folder / "engine.pt2", device="cpu", weights=weights) as session:
        result = verify(session, engine.program(), PROFILES["transformer"], "float32")
        assert TOLERANCES["float32"] < result.error < 0.1
        assert not result.passed
        assert result.detail.code == "engine.compared"
        assert result.detail.data["where"].startswith("velocity at ")
        assert result.detail.data["error"] == result.error
        assert verify(session, engine.program(), PROFILES["transformer"], "bfloat16").passed
    torch.testing.assert_close(result.tolerance, 1e-4)
