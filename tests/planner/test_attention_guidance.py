"""Plans with normalized attention guidance: which models and transformers have it, its time, and its measurements."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import InvalidRequestError
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.models.spec import ModelSpec
from runtime.planner.history import runs_of
from runtime.planner.resolve import PlanningContext, resolve
from tests.plans import gpu, machine, tiny_plan
from tests.published_specs import spec as published

Tiny = Callable[[str], ModelSpec]
OUT = Path("x.mp4")
BOTH, NONE = {"guidance_scale": 4.0}, {"guidance_scale": 1.0}


def guided(plan: ExecutionPlan) -> set[str]:
    """Return the components whose attention is guided."""
    parts = plan.components.items()
    return {name for name, part in parts if "planner.nag" in {reason.code for reason in part.reasons}}


@pytest.mark.parametrize(
    ("model", "values", "expected"),
    [
        ("wan2.1", NONE, {"transformer"}),
        ("wan2.1", BOTH, "planner.nag_with_guidance"),
        ("wan2.1-vace", NONE, {"transformer"}),
        ("wan2.2-a14b", NONE, {"transformer", "transformer_2"}),
        ("wan2.2-a14b", NONE | {"guidance_scale_2": 3.0}, {"transformer"}),
        ("wan2.2-a14b", BOTH | {"guidance_scale_2": 1.0}, {"transformer_2"}),
        ("wan2.2-a14b", BOTH | {"guidance_scale_2": 3.0}, "planner.nag_with_guidance"),
        ("ltx-2.3-distilled", {}, {"transformer"}),
        ("ltx-2.3", {}, "planner.nag_with_guidance"),
        ("hunyuan-video", {}, "family.option_unsupported"),
        ("hunyuan-video-cfg", NONE, "family.option_unsupported"),
    ],
)
def test_transformers_without_guidance_have_it(
    model: str, values: dict[str, Any], expected: set[str] | str, tiny: Tiny
) -> None:
    spec = tiny(model)
    if isinstance(expected, set):
        plan = tiny_plan(spec, OUT, nag=11, **values)
        assert (guided(plan), plan.nag, plan.speed.nag) == (expected, 11.0, 11.0)
        assert plan.request_json()["nag"] == plan.to_json()["nag"] == 11.0
        for off in ({}, {"nag": 1}, {"nag": "auto"}):
            plain = tiny_plan(spec, OUT, **values, **off)
            assert (guided(plain), plain.nag, plain.speed.nag) == (set(), 1.0, 1.0)
        return
    with pytest.raises(InvalidRequestError) as refused:
        tiny_plan(spec, OUT, nag=11, **values)
    assert (refused.value.code, refused.value.field) == (expected, "nag")


def test_time_counts_attention_to_the_negative_prompt(tiny: Tiny) -> None:
    spec = tiny("wan2.1")
    plain, plan = (tiny_plan(spec, OUT, nag=scale, **NONE) for scale in (1, 11))
    assert plan.seconds["encode"].likely == pytest.approx(2 * plain.seconds["encode"].likely)
    assert plan.seconds["denoise"].likely > plain.seconds["denoise"].likely
    large, on = published("wan2.2-a14b"), machine(gpu=gpu(), torch_cuda="13.0", ram_free_gib=200)
    seconds = []
    for scale in (1, 11):
        request = GenerationRequest(prompt="a boat", guidance_scale=1.0, nag=scale)
        decided = resolve(request, large, PlanningContext(on, OUT))
        assert not decided.speed.paired
        seconds.append(decided.seconds["denoise"].likely)
    # A step with guidance would take twice as long.
    assert seconds[0] * 1.001 < seconds[1] < seconds[0] * 1.1


def test_measurements_are_of_plans_with_it(tiny: Tiny) -> None:
    spec = tiny("wan2.1")
    plain, plan = (tiny_plan(spec, OUT, nag=scale, **NONE) for scale in (1, 11))

    def forecast(request: ExecutionPlan, ran: ExecutionPlan) -> float:
        runs = runs_of(ran, ran, spec, machine(), {"denoise": 8.0}, {})
        context = PlanningContext(machine(), OUT, history=runs)
        return resolve(request.request, spec, context).seconds["denoise"].likely

    assert forecast(plan, plan) == pytest.approx(8.0)
    assert forecast(plain, plain) == pytest.approx(8.0)
    # Inferred from a plan without it.
    assert 8.0 < forecast(plan, plain) < 16.0
