"""Schedulers that add noise at each step: the same seed gives the same video, also after a resume."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from runtime.core.errors import InvalidRequestError, ModelError
from runtime.core.events import Paused, StepDone, VideoSaved
from runtime.execution.residency import Residency
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_scheduler
from runtime.pipeline.checkpoint import CheckpointFolder
from runtime.pipeline.sampling import advanced, get_schedule, noise_seed
from tests.pipeline.runs import events_of
from tests.pipeline.test_loras import Place
from tests.pipeline.test_run import frames_of
from tests.plans import tiny_plan

Tiny = Callable[[str], ModelSpec]
NOISY: dict[str, dict[str, Any]] = {
    "FlowMatchLCMScheduler": {"shift": 3.0},
    "FlowMatchEulerDiscreteScheduler": {"shift": 3.0, "stochastic_sampling": True},
    "DPMSolverMultistepScheduler": {
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "algorithm_type": "sde-dpmsolver++",
    },
}


# diffusers' own, in DPMSolverMultistepScheduler.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("name", NOISY)
def test_the_same_seed_gives_the_same_video(name: str, tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / "model")
    getattr(diffusers, name)(**NOISY[name]).save_pretrained(tmp_path / "model" / "scheduler")
    spec, out = read_spec(tmp_path / "model", "noisy"), tmp_path / "x.mp4"
    plan = tiny_plan(spec, out)
    torch.manual_seed(0)
    with Residency() as residency:
        assert isinstance(events_of(plan, spec, residency)[-1], VideoSaved)
    wanted = frames_of(out)
    folder = CheckpointFolder(tmp_path / "job")
    with Residency() as residency:
        paused = events_of(
            plan, spec, residency, checkpoints=folder, pause_at=lambda e: isinstance(e, StepDone) and e.step == 2
        )
    assert isinstance(paused[-1], Paused)
    torch.manual_seed(9)
    with Residency() as residency:
        resumed = events_of(plan, spec, residency, checkpoints=folder)
        assert [event.step for event in resumed if isinstance(event, StepDone)] == [3, 4]
        assert frames_of(out) == wanted
        events_of(plan.replace(seed=plan.seed + 1), spec, residency)
    assert frames_of(out) != wanted


def test_levels_of_a_lora_are_sampled_as_published(tiny: Tiny, tmp_path: Path) -> None:
    """`DmdDenoisingStage` in https://github.com/hao-ai-lab/FastVideo, fastvideo/pipelines/stages/denoising.py."""
    place = Place(tiny("wan2.1"), tmp_path)
    place.lora.rename(place.lora.with_name("FastWan.safetensors"))
    plan, spec = place.plan("FastWan", steps="auto", guidance_scale="auto", shift=None)
    assert (plan.steps, plan.guidance_scale) == (3, 1.0)
    scheduler = load_scheduler(spec, plan.shift)
    steps = get_schedule(plan, scheduler, spec.boundary_ratio, spec.noise.sigmas(plan.steps))
    levels = [1.0, 0.757, 0.522]
    assert [step.timestep.item() for step in steps] == pytest.approx([1000 * level for level in levels])
    noise = torch.randn(1, 16, 3, 4, 8, generator=torch.Generator().manual_seed(1))
    latents = wanted = noise
    for step, level, following in zip(steps, levels, [*levels[1:], 0.0], strict=True):
        latents = advanced(scheduler, torch.tanh(latents * level), step.timestep, latents, step.noise_seed)
        clean = wanted - level * torch.tanh(wanted * level)
        new = torch.randn(noise.shape, generator=torch.Generator().manual_seed(step.noise_seed))
        wanted = (1 - following) * clean + following * new
        torch.testing.assert_close(latents, wanted, atol=1e-5, rtol=0)
    # A job of it, and one with other steps, whose levels are between those.
    for asked, of in (("auto", 3), (2, 2)):
        plan, spec = place.plan("FastWan", steps=asked, guidance_scale="auto")
        events = place.run(plan, spec)
        assert isinstance(events[-1], VideoSaved)
        assert [event.of for event in events if isinstance(event, StepDone)] == [of] * of
    with pytest.raises(InvalidRequestError) as refused:
        place.plan("FastWan", shift=5.0)
    assert refused.value.code == "scheduler.shift_fixed"


def test_the_noise_of_a_step_depends_on_seed_section_and_step() -> None:
    seeds = {noise_seed(seed, *number) for seed in (0, 1, 2**63 - 1) for number in ((0,), (1,), (0, 1), (1, 0))}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)


class _Unseeded:
    """A scheduler with a source of noise of its own, whose step takes no generator, such as DPMSolverSDEScheduler."""

    noise_sampler = None

    def step(self, velocity: torch.Tensor, timestep: torch.Tensor, latents: torch.Tensor, return_dict: bool) -> Any:
        return (latents - velocity + torch.randn_like(latents),)


def test_noise_that_does_not_follow_the_seed_is_refused() -> None:
    latents = torch.zeros(1, 4, 1, 2, 2)
    with pytest.raises(ModelError) as refused:
        advanced(_Unseeded(), latents, torch.tensor(500), latents, 7)
    assert (refused.value.code, refused.value.data["scheduler"]) == ("pipeline.scheduler_noise", "_Unseeded")
