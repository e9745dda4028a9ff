"""Videos steered by control videos: latents equal `WanVACEPipeline`'s, and jobs resume after kills and failures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanVACEPipeline
from PIL import Image

from runtime.core.request import GenerationRequest
from runtime.models.control import with_control
from runtime.models.spec import ModelSpec
from runtime.pipeline.stages import control_clip
from runtime.planner.resolve import PlanningContext, resolve
from tests.pipeline.test_from_video import Clip, final_latents
from tests.plans import machine
from tests.video.test_reader import H264, make

Tiny = Callable[[str], ModelSpec]
# A box that grows: black outside, white inside, and gray between.
_LUMA = "255*lt(X,8+4*N)*gt(Y,8)+90*between(X,8+4*N,20+4*N)"
_MASK = f"color=black:size=64x32:rate=8:duration=2,geq=lum='{_LUMA}':cb=128:cr=128"


def planned(spec: ModelSpec, folder: Path, *inputs: str, **values: Any) -> Clip:
    """Plan a tiny clip that is steered by files of these fields, of which copies are in the folder."""
    files: dict[str, Any] = {}
    if "control" in inputs:
        files["control"] = str(folder / "control.mp4")
        make(folder / "control.mp4", *H264, inputs=("-f", "lavfi", "-i", "testsrc=size=64x32:rate=8:duration=2"))
    if "mask" in inputs:
        files["mask"] = str(folder / "mask.mp4")
        make(folder / "mask.mp4", *H264, inputs=("-f", "lavfi", "-i", _MASK))
    if "references" in inputs:
        files["references"] = [str(folder / "wide.png"), str(folder / "high.png")]
        Image.linear_gradient("L").convert("RGB").resize((93, 40)).save(folder / "wide.png")
        Image.radial_gradient("L").convert("RGB").resize((24, 72)).save(folder / "high.png")
    fields: dict[str, Any] = {"prompt": "a red boat", "negative_prompt": "blue ball", "width": 64, "height": 32}
    fields |= {"frames": 9, "steps": 3, "seed": 3, "fps": 8, "guidance_scale": 4.0}
    request = GenerationRequest.from_mapping(fields | files | values)
    spec = with_control(spec, request, folder, folder)
    return Clip(resolve(request, spec, PlanningContext(machine(), folder / "x.mp4")), spec)


def by_diffusers(clip: Clip) -> torch.Tensor:
    """Return the latents that `WanVACEPipeline` makes of a plan."""
    pipeline = WanVACEPipeline.from_pretrained(clip.spec.directory).to(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    plan, given = clip.plan, control_clip(clip.plan)
    scales = plan.control_scale
    latents: torch.Tensor = pipeline(
        prompt=plan.prompt,
        negative_prompt=plan.negative_prompt,
        video=None if given.video is None else [Image.fromarray(frame.numpy()) for frame in given.video],
        mask=None if given.mask is None else [Image.fromarray(frame.numpy()) for frame in given.mask],
        reference_images=given.references or None,
        conditioning_scale=scales[0] if len(scales) == 1 else list(scales),
        height=plan.height,
        width=plan.width,
        num_frames=plan.frames,
        num_inference_steps=plan.steps,
        guidance_scale=plan.guidance_scale,
        guidance_scale_2=plan.guidance_scale_2,
        generator=torch.Generator("cpu").manual_seed(plan.seed),
        output_type="latent",
    ).frames
    return latents


CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "text only": ("wan2.1-vace", (), {}),
    "control": ("wan2.1-vace", ("control",), {}),
    "control and mask": ("wan2.1-vace", ("control", "mask"), {}),
    "references": ("wan2.1-vace", ("references",), {"guidance_scale": 1.0}),
    "all": ("wan2.1-vace", ("control", "mask", "references"), {}),
    "scale": ("wan2.1-vace", ("control",), {"control_scale": 0.4, "guidance_scale": 1.0}),
    "scales": ("wan2.1-vace", ("control", "references"), {"control_scale": [1.5, 0.25]}),
    "experts": ("wan2.2-vace", ("control", "mask", "references"), {"guidance_scale_2": 2.5, "control_scale": [0.5, 2]}),
    "experts, text only": ("wan2.2-vace", (), {"guidance_scale_2": 1.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_latents_equal_wan_vace_pipelines(case: str, tiny: Tiny, tmp_path: Path) -> None:
    architecture, inputs, values = CASES[case]
    clip = planned(tiny(architecture), tmp_path, *inputs, **values)
    wanted = by_diffusers(clip)
    made = final_latents(clip, tmp_path / "job")
    assert wanted.std() > 0.1 and made.shape == wanted.shape
    assert made.shape[2] == 3 + len(clip.plan.references)
    assert abs(made - wanted).max() < 1e-4
