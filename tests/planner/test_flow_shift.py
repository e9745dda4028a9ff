"""The shift of a plan: checks, reasons, warnings, and steps of each expert."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.estimates import Seconds
from runtime.core.loras import LoraUse
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.models.catalogue import known_as
from runtime.models.spec import ModelSpec
from runtime.models.timesteps import NoiseLevels, noise_levels
from runtime.planner import clip
from runtime.planner.history import Kind, Run, architecture, calls_of, runs_of
from runtime.planner.resolve import PlanningContext, resolve
from tests.facts import fact
from tests.plans import machine, tiny_plan

Tiny = Callable[[str], ModelSpec]
OUT = Path("x.mp4")


def plan(spec: ModelSpec, **values: Any) -> ExecutionPlan:
    """Plan a tiny clip."""
    return tiny_plan(spec, OUT, **values)


@pytest.mark.parametrize(
    ("asked", "steps", "used", "taken"),
    [
        (None, 4, None, (2, 2)),
        (3.0, 4, None, (2, 2)),  # what the folder says
        (5.0, 4, 5.0, (2, 2)),
        (12.0, 4, 12.0, (3, 1)),
        (100.0, 4, 100.0, (4, 0)),
        (0.1, 4, 0.1, (1, 3)),
        (None, 40, None, (13, 27)),
        (12.0, 40, 12.0, (26, 14)),
    ],
)
def test_a_shift_says_how_many_steps_each_expert_takes(
    asked: float | None, steps: int, used: float | None, taken: tuple[int, int], tiny: Tiny
) -> None:
    made = plan(tiny("wan2.2-a14b"), shift=asked, steps=steps)
    assert made.shift == made.request_json()["shift"] == made.to_json()["shift"] == used
    assert made.expert_steps == dict(zip(("transformer", "transformer_2"), taken, strict=True))
    assert made.to_json()["expert_steps"] == made.expert_steps
    assert (made.shift_reason is None) == (used is None)
    assert ("planner.expert_without_steps" in {one.code for one in made.warnings}) == (0 in taken)


def test_the_reason_names_other_shifts(tiny: Tiny) -> None:
    spec = tiny("wan2.2-a14b")
    known = known_as("wan2.2-t2v-a14b")
    assert known is not None
    away = known.spec(Path("weights"))
    here = replace(away, is_downloaded=True, noise=replace(spec.noise, shift=3.0))
    own, authors = fact("planner.shift_of_scheduler", shift=3.0), fact("planner.shift_published", shift=12.0)
    for shift, of, others in (
        (5.0, spec, [own]),
        (5.0, here, [own, authors]),
        (12.0, here, [own]),
        (5.0, away, [authors]),
    ):
        assert clip.shift_reason(shift, of) == fact("planner.shift_asked", shift=shift, others=others)
    assert plan(spec, shift=5).shift_reason == clip.shift_reason(5.0, spec)
    assert clip.shift_reason(None, here) is None


def test_the_shift_of_a_model_that_is_not_downloaded() -> None:
    known = known_as("wan2.2-t2v-a14b")
    assert known is not None
    spec = known.spec(Path("weights"))
    assert clip.expert_steps(spec, 40, None) == {}
    assert clip.expert_steps(spec, 4, 5.0) == {"transformer": 2, "transformer_2": 2}
    assert clip.shift_override(GenerationRequest(prompt="x", shift=5), spec) == 5.0


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        ({"_class_name": "UniPCMultistepScheduler"}, "scheduler.no_flow_matching"),
        ({"_class_name": "DDIMScheduler"}, "scheduler.no_shift"),
    ],
)
def test_a_scheduler_with_a_fixed_shift_is_refused(config: dict[str, Any], cause: str, tiny: Tiny) -> None:
    spec = replace(tiny("wan2.2-a14b"), noise=noise_levels(config), scheduler=config["_class_name"])
    with pytest.raises(InvalidRequestError) as refused:
        plan(spec, shift=5.0)
    assert (refused.value.code, refused.value.data["cause"].code) == ("scheduler.shift_fixed", cause)
    assert refused.value.data["scheduler"] == config["_class_name"]
    assert refused.value.field == "shift"
    # Nothing asked for, nothing refused; who takes which step is not known.
    assert (plan(spec).shift, plan(spec).expert_steps) == (None, {})


def test_one_transformer_runs_all_steps(tiny: Tiny) -> None:
    made = plan(tiny("wan2.1"), shift=12.0, steps=7)
    assert made.expert_steps == {"transformer": 7} and made.shift == 12.0
    assert made.step_flops == plan(tiny("wan2.1"), steps=7).step_flops


@pytest.mark.parametrize(
    ("given", "calls"),
    [
        ({"transformer": 3, "transformer_2": 1}, {"transformer": 6, "transformer_2": 1}),
        ({"transformer": 4, "transformer_2": 0}, {"transformer": 8, "transformer_2": 0}),
        ({}, {"transformer": 4, "transformer_2": 2}),
    ],
)
def test_each_expert_is_called_for_its_steps(given: dict[str, int], calls: dict[str, float]) -> None:
    once = dict.fromkeys(("image_encoder", "vae_encoder", "latent_upsampler", "vae", "audio_vae", "vocoder"), 1)
    texts = dict.fromkeys(("text_encoder", "text_encoder_2", "connectors"), 2)
    assert calls_of(4, 4.0, 1.0, given) == texts | once | calls


def test_the_forecast_counts_each_experts_steps(tiny: Tiny) -> None:
    """One guided, one not: a step of the first takes twice as long."""
    spec = tiny("wan2.2-a14b")
    scales = {"guidance_scale": 4.0, "guidance_scale_2": 1.0}
    even, high = plan(spec, **scales), plan(spec, shift=12.0, **scales)
    assert high.step_flops / even.step_flops == pytest.approx((2 * 3 + 1) / (2 * 2 + 2))
    measured = Run(
        kind=Kind(device="Test CPU, 2 cores", model=architecture(spec), component="transformer", backend="pytorch",
                  dtype="float32", quantization="none", offload="none"),
        flops=spec.transformer.forward_flops(even.tokens, spec.max_sequence_length),
        seconds=1.0, working_bytes=1, excess_bytes=None,
    )  # fmt: skip

    def denoising(**values: Any) -> Seconds:
        wanted = {"prompt": "a red boat", "width": 64, "height": 32, "frames": 9, "steps": 4} | scales | values
        request = GenerationRequest.from_mapping(wanted)
        return resolve(request, spec, PlanningContext(machine(), OUT, history=[measured])).seconds["denoise"]

    assert denoising().likely == pytest.approx(6.0)
    assert denoising(shift=12).likely == pytest.approx(7.0)
    assert denoising(shift=100).likely == pytest.approx(8.0)
    # The seconds of a job are divided by the same number of calls.
    for made, seconds in ((even, 6.0), (high, 7.0)):
        runs = runs_of(made, made, spec, machine(), {"text_encoder": 1.0, "denoise": seconds, "decode": 1.0}, {})
        assert [run.seconds for run in runs if run.kind.component == "transformer"] == [pytest.approx(1.0)]


@pytest.mark.parametrize(
    ("name", "asked", "warned"),
    [
        ("Wan2.2-Lightning-4steps", None, True),
        ("Wan2.2-Lightning-4steps", 5.0, False),
        ("Wan2.2-Lightning-4steps", 8.0, True),
        ("x_lightx2v_4step", None, True),
        ("CausVid", None, False),  # whose shift is not known
    ],
)
def test_a_lora_distilled_with_another_shift_is_a_warning(
    name: str, asked: float | None, warned: bool, tiny: Tiny
) -> None:
    use = LoraUse(file=name, path=Path("loras") / f"{name}.safetensors", digest="0", weight=1.0, steps=4)
    spec = replace(tiny("wan2.2-a14b"), loras=(use,))
    taken = {"transformer": 2, "transformer_2": 2}
    warnings = clip.shift_warnings(spec, 4, asked, taken)
    assert bool(warnings) == warned
    assert not warned or (warnings[0].code, warnings[0].data["wanted"]) == ("planner.lora_shift", 5.0)
    assert clip.shift_warnings(replace(spec, noise=NoiseLevels()), 4, None, taken) == []
