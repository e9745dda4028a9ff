"""The presets of the web form, for models and machines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.request import GenerationRequest
from runtime.machine.probe import Machine
from runtime.models.catalogue import look_up
from runtime.planner.presets import presets
from tests.plans import GPU_PACKAGES, gpu, machine

CPU = machine()
PACKAGES = (*GPU_PACKAGES, ("torchao", "0.14"), ("nvidia-cudnn-frontend", "1.15"))
HOPPER = machine(gpu=gpu(capability=(9, 0)), torch_cuda="13.0", packages=PACKAGES)
AMPERE = machine(gpu=gpu(capability=(8, 0)), torch_cuda="13.0", packages=PACKAGES)


@pytest.mark.parametrize(
    ("model", "here", "steps", "fast"),
    [
        ("wan2.1-t2v-1.3b", CPU, (25, 50, 50), ("auto", "auto")),
        ("wan2.2-t2v-a14b", CPU, (20, 40, 50), ("auto", "auto")),
        ("wan2.2-t2v-a14b", AMPERE, (20, 40, 50), ("auto", "auto")),
        ("wan2.2-t2v-a14b", HOPPER, (20, 40, 50), ("fp8", "fp8")),
        ("wan2.1-t2v-1.3b", HOPPER, (25, 50, 50), ("fp8", "fp8")),
    ],
)
def test_presets_of_a_model(model: str, here: Machine, steps: tuple[int, ...], fast: tuple[str, str]) -> None:
    spec = look_up(model, Path("none"))
    found = presets(spec, here)
    assert [one.name for one in found] == ["fast", "balanced", "best"]
    assert tuple(one.changes["steps"] for one in found) == steps
    assert (found[0].changes["quantization"], found[0].changes["attention"]) == fast
    # Balanced changes nothing that a new request does not have.
    assert found[1].matches(GenerationRequest(prompt="x"), spec)
    assert dict(found[2].changes) == {
        "steps": steps[2],
        "step_cache": "none",
        "guidance_cache": "off",
        "quantization": "none",
        "attention": "auto",
        "vae_precision": "float32",
    }
    # All set the same fields, so that each undoes the others.
    assert len({frozenset(one.changes) for one in found}) == 1
    requests = [GenerationRequest(prompt="x", **one.changes) for one in found]
    for request, one in zip(requests, found, strict=True):
        assert [other.name for other in found if other.matches(request, spec)] == [one.name]


@pytest.mark.parametrize(("default", "steps"), [(4, (4, 8)), (8, (8, 16)), (10, (8, 10, 20)), (60, (30, 60, 60))])
def test_presets_keep_to_sensible_numbers_of_steps(default: int, steps: tuple[int, ...]) -> None:
    spec = look_up("diorama", Path("none"))
    spec = replace(spec, defaults=replace(spec.defaults, steps=default))
    assert tuple(one.changes["steps"] for one in presets(spec, CPU)) == steps


@pytest.mark.parametrize("change", [{"steps": 21}, {"step_cache": "first-block"}, {"quantization": "fp8"}])
def test_a_request_that_was_changed_by_hand_is_no_preset(change: dict[str, Any]) -> None:
    spec = look_up("diorama", Path("none"))
    request = GenerationRequest(prompt="x", **change)
    assert not any(one.matches(request, spec) for one in presets(spec, CPU))
