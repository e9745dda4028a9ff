"""Each component of a video is compared with the reference's on the same inputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.bench.component_errors import errors, reference_passes
from runtime.core.cancel import Cancel
from runtime.core.request import GenerationRequest
from runtime.execution.residency import Residency
from runtime.models.images import with_images
from runtime.models.spec import ModelSpec
from runtime.planner.resolve import resolve
from tests.image_files import picture
from tests.plans import machine


@pytest.mark.parametrize(("architecture", "images"), [("wan2.1-flf2v", 2), ("wan2.2-ti2v-5b", 1)])
def test_components_of_a_video_from_images(
    architecture: str, images: int, tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"prompt": "a red boat", "width": 64, "height": 32, "frames": 9, "steps": 2, "seed": 3}
    for field in ("image", "last_image")[:images]:
        picture(64, 32).save(tmp_path / f"{field}.png")
        fields[field] = str(tmp_path / f"{field}.png")
    request = GenerationRequest.from_mapping(fields)
    spec = with_images(tiny(architecture), request, tmp_path, tmp_path)
    plan = resolve(request, spec, machine(), tmp_path / "x.mp4")
    with Residency() as residency:
        passes = reference_passes(spec, plan, residency, Cancel())
        found = errors(passes, spec, plan, residency, Cancel())
        assert list(found) == list(plan.components)
        assert {name: part.error for name, part in found.items()} == dict.fromkeys(found, 0.0)
        # Another image changes the outputs that depend on it, and no others.
        picture(64, 32).rotate(180).save(tmp_path / "image.png")
        other = with_images(tiny(architecture), request, tmp_path, tmp_path)
        changed = errors(passes, other, plan.replace(image=other.image), residency, Cancel())
    assert {name for name, part in changed.items() if part.error} == {"image_encoder", "vae_encoder"} & {*found}
    assert all(torch.isfinite(output).all() for output in passes.outputs.values())


def test_components_of_a_model_with_two_text_encoders(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> None:
    fields = {"prompt": "a red boat", "width": 64, "height": 32, "frames": 9, "steps": 2, "seed": 3}
    request, spec = GenerationRequest.from_mapping(fields), tiny("hunyuan-video")
    plan = resolve(request, spec, machine(), tmp_path / "x.mp4")
    with Residency() as residency:
        passes = reference_passes(spec, plan, residency, Cancel())
        found = errors(passes, spec, plan, residency, Cancel())
        assert {name: part.error for name, part in found.items()} == dict.fromkeys(plan.components, 0.0)
        changed = errors(passes, spec, plan.replace(prompt="two blue balls"), residency, Cancel())
    assert {name for name, part in changed.items() if part.error or part.why} == {*spec.text_encoders}
