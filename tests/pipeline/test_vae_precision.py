"""Decoding in 16 bits on tiny models: same clip, overflows name their cause, old plans load."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from runtime.core.events import Failed, Resumed, VideoSaved
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import identity
from runtime.pipeline.files import stamps
from runtime.video.mp4 import read_metadata
from tests.pipeline.test_resume import run, steps_of
from tests.pipeline.test_run import frames_of
from tests.plans import tiny_plan

Tiny = Callable[[str], ModelSpec]


def decoding_in(plan: ExecutionPlan, dtype: str) -> ExecutionPlan:
    """Return a plan as a GPU would have it: on a CPU 16 bits are refused."""
    return plan.with_component("vae", plan.components["vae"].replace(dtype=dtype)).replace(
        request=plan.request.replace(vae_precision=dtype)
    )


def test_the_same_latents_are_decoded_in_any_precision(tiny: Tiny, tmp_path: Path) -> None:
    spec, out = tiny("wan2.1"), tmp_path / "x.mp4"
    plan = tiny_plan(spec, out)
    rounded = decoding_in(plan, "bfloat16")
    assert isinstance(run(plan, spec, tmp_path / "job")[-1], VideoSaved)
    full = frames_of(out)
    again = run(rounded, spec, tmp_path / "job")
    assert Resumed(step=4, of=4) in again and steps_of(again) == []
    assert isinstance(again[-1], VideoSaved)
    assert frames_of(out) != full
    facts = read_metadata(out)
    assert facts["request"]["vae_precision"] == facts["plan"]["components"]["vae"]["dtype"] == "bfloat16"
    assert GenerationRequest.from_mapping(facts["request"]).vae_precision == "bfloat16"
    assert identity(stamps(spec), plan) == identity(stamps(spec), rounded)


def test_an_overflow_names_its_cause_and_float32_resumes(tiny: Tiny, tmp_path: Path) -> None:
    """A convolution whose weights float16 does not hold; what follows normalises, so float32 shows the same clip."""
    shutil.copytree(tiny("wan2.1").directory, tmp_path / "model")
    weights = tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    large = "decoder.mid_block.resnets.0.conv1"
    tensors |= {name: 1e7 * tensor for name, tensor in tensors.items() if name.startswith(large)}
    save_file(tensors, weights, metadata={"format": "pt"})
    spec = read_spec(tmp_path / "model", "large")
    plan = tiny_plan(spec, tmp_path / "x.mp4")
    end = run(decoding_in(plan, "float16"), spec, tmp_path / "job")[-1]
    assert isinstance(end, Failed) and not end.internal
    assert end.fact == Fact("execution.vae_overflow", {"dtype": "float16"})
    assert not (tmp_path / "x.mp4").exists()
    again = run(tiny_plan(spec, tmp_path / "x.mp4", vae_precision="float32"), spec, tmp_path / "job")
    assert Resumed(step=4, of=4) in again and steps_of(again) == []
    assert isinstance(again[-1], VideoSaved)


@pytest.mark.parametrize("architecture", ["wan2.1", "wan2.2-a14b"])
def test_plans_stored_before_vae_precision_are_read(architecture: str, tiny: Tiny, tmp_path: Path) -> None:
    plan = tiny_plan(tiny(architecture), tmp_path / "x.mp4")
    assert ExecutionPlan.model_validate_json(plan.model_dump_json()) == plan
