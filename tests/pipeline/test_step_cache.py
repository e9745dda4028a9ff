"""A step cache on tiny real models equals `WanPipeline` with the same hooks, and leaves none behind."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig, MagCacheConfig

from runtime.core.images import VideoUse
from runtime.core.plan import ExecutionPlan
from runtime.core.step_cache import most_reused
from runtime.execution.residency import Residency
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_scheduler
from runtime.pipeline.sampling import get_schedule, resumable_after
from tests.pipeline.computed_blocks import blocks_computed
from tests.pipeline.test_parity import by_wan_pipeline, sample
from tests.plans import tiny_plan

Tiny = Callable[[str], ModelSpec]
# A tiny random transformer's first block changes by about half from step to step.
STRENGTH = 0.9


def planned(spec: ModelSpec, step_cache: str, steps: int = 8) -> ExecutionPlan:
    return tiny_plan(spec, Path("x.mp4"), steps=steps, step_cache=step_cache, guidance_scale=3.0)


def with_ratios(spec: ModelSpec) -> ModelSpec:
    """Return a model with magnitude ratios of its transformers, as if they had been measured."""
    ratios = {"transformer": (1.0, 1.02, 0.99, 0.97), "transformer_2": (1.0, 0.97, 0.96, 0.9)}
    return replace(spec, mag_ratios={name: own for name, own in ratios.items() if name in spec.component_names})


def blocks(spec: ModelSpec, plan: ExecutionPlan, residency: Residency) -> tuple[int, torch.Tensor]:
    """Return how many blocks were computed, and the latents."""
    made: list[torch.Tensor] = []
    count = blocks_computed(lambda: made.append(sample(spec, plan, residency)))
    return count, made[0]


@pytest.mark.slow
def test_latents_equal_wan_pipelines_with_the_same_cache(tiny: Tiny) -> None:
    spec = tiny("wan2.1")
    plan = planned(spec, f"first-block:{STRENGTH}")
    with Residency() as residency:
        ours, plain = sample(spec, plan, residency), sample(spec, planned(spec, "none"), residency)
    theirs = by_wan_pipeline(spec, plan, "latent", FirstBlockCacheConfig(threshold=STRENGTH))
    assert abs(ours - theirs).max() < 1e-4
    assert abs(ours - plain).max() > 1e-3


@pytest.mark.slow
def test_blocks_are_skipped_and_the_hooks_removed(tiny: Tiny) -> None:
    spec = tiny("wan2.2-a14b")
    every = 2 * 2 * 8  # blocks, passes, steps
    with Residency() as residency:
        plain, before = blocks(spec, planned(spec, "none"), residency)
        cached, with_cache = blocks(spec, planned(spec, f"first-block:{STRENGTH}"), residency)
        weak, unchanged = blocks(spec, planned(spec, "first-block:1e-9"), residency)
        again, after = blocks(spec, planned(spec, "none"), residency)
        # The first block of each pass, and all blocks at least in the first step of each expert.
        assert (plain, again) == (every, every) and every // 2 + 4 <= cached < every
        assert weak == every and torch.equal(unchanged, before) and torch.equal(after, before)
        assert not torch.equal(with_cache, before)
        # A job does not see the cache of an earlier one, although both use the same module.
        assert torch.equal(blocks(spec, planned(spec, f"first-block:{STRENGTH}"), residency)[1], with_cache)


@pytest.mark.slow
@pytest.mark.parametrize("strength", [0.05, 0.12, 0.3])
def test_magcache_equals_wan_pipelines_with_diffusers_own_decision(strength: float, tiny: Tiny) -> None:
    spec, steps = with_ratios(tiny("wan2.1")), 12
    plan = planned(spec, f"magcache:{strength}", steps=steps)
    with Residency() as residency:
        ours, plain = sample(spec, plan, residency), sample(spec, planned(spec, "none", steps), residency)
    ratios = list(spec.mag_ratios["transformer"])
    config = MagCacheConfig(strength, most_reused(strength), num_inference_steps=steps, mag_ratios=ratios)
    assert abs(ours - by_wan_pipeline(spec, plan, "latent", config)).max() < 1e-4
    assert abs(ours - plain).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("step_cache", ["magcache:0.12", "taylorseer:2", "taylorseer:5"])
def test_as_many_steps_are_computed_as_planned(step_cache: str, tiny: Tiny) -> None:
    spec = with_ratios(tiny("wan2.2-a14b"))
    plan = planned(spec, step_cache, steps=16)
    assert 4 <= sum(plan.computed) < 16 and plan.computed[plan.expert_steps["transformer"]], "experts share nothing"
    with Residency() as residency:
        cached, count = blocks(spec, plan, residency)[::-1]
        plain = sample(spec, planned(spec, "none", 16), residency)
        assert count == 2 * 2 * sum(plan.computed)  # blocks, passes
        assert not torch.equal(cached, plain)
        assert torch.equal(sample(spec, plan, residency), cached)
        # Where no step is left out, nothing changes: two steps of each transformer are always computed.
        few = {"steps": 2} if step_cache.startswith("taylorseer") else {"step_cache": "magcache:1e-9"}
        whole = plan.replace(**few)
        assert torch.equal(sample(spec, whole, residency), sample(spec, whole.replace(step_cache="none"), residency))


@pytest.mark.parametrize(("architecture", "expected"), [("wan2.1", {0, 8, 16}), ("wan2.2-a14b", {0, 8, 16})])
def test_a_cache_is_reset_before_resumable_steps(architecture: str, expected: set[int], tiny: Tiny) -> None:
    spec = tiny(architecture)
    plan = planned(spec, "first-block", steps=20)
    steps = get_schedule(plan, load_scheduler(spec), spec.boundary_ratio)
    second = {index for index in range(1, 20) if steps[index].expert != steps[index - 1].expert}
    assert len(second) == spec.experts - 1
    assert {index for index, step in enumerate(steps) if step.fresh} == expected | second
    assert {done for done in range(21) if resumable_after(steps, done)} == expected | second | {20}
    without = get_schedule(plan.replace(step_cache="none"), load_scheduler(spec), spec.boundary_ratio)
    assert all(resumable_after(without, done) for done in range(21))


@pytest.mark.parametrize(("skipped", "exact"), [(0, "xxxx" + 16 * "."), (3, "x" + 16 * "."), (5, 15 * ".")])
def test_the_first_fifth_of_a_schedule_is_exact(skipped: int, exact: str, tiny: Tiny) -> None:
    spec = tiny("wan2.2-a14b")
    video = VideoUse(name="x.mp4", path=Path("x.mp4"), digest="0" * 64, width=64, height=32, fps=8, frames=5)
    plan = planned(spec, "none", steps=20).replace(video=video, strength=1 - skipped / 20)
    assert plan.skipped_steps == skipped
    steps = get_schedule(plan, load_scheduler(spec), spec.boundary_ratio)
    assert "".join("x" if step.exact else "." for step in steps) == exact
