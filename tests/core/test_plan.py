"""Plans as stored JSON, also those of the version before strategies and requests were types of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from runtime.core.plan import EAGER, ExecutionPlan
from runtime.models.catalogue import EMBEDDED
from runtime.models.registry import read_spec
from tests.plans import tiny_plan

# A plan as the previous version stored it in jobs.sqlite, with the request that it wrote into the MP4.
STORED = json.loads((Path(__file__).parent / "plan_before_one_strategy.json").read_text())


def read(**changes: Any) -> ExecutionPlan:
    return ExecutionPlan.model_validate_json(json.dumps(STORED["plan"] | changes))


def test_json_round_trip(tmp_path: Path) -> None:
    plan = tiny_plan(read_spec(EMBEDDED / "diorama", "diorama"), tmp_path / "x.mp4")
    assert ExecutionPlan.model_validate_json(plan.model_dump_json()) == plan


def test_the_previous_versions_plan_is_migrated() -> None:
    plan, stored = read(), STORED["plan"]
    assert STORED["request"].items() <= plan.request_json().items()  # later versions have more fields
    for name in ("backend", "device", "dtype", "weights_bytes", "quantization"):
        assert {key: getattr(part, name) for key, part in plan.components.items()} == {
            key: part[name] for key, part in stored["components"].items()
        }
    engines = {key: [use.id for use in part.engines] for key, part in plan.components.items()}
    assert engines == {key: [use["id"] for use in part["engines"]] for key, part in stored["components"].items()}
    assert plan.strategy.model_dump(mode="json").items() <= stored.items()
    assert plan.memory_bytes == stored["memory_bytes"] == plan.forecast.peak_bytes
    assert len(plan.strategies) == len(stored["ladder"])
    assert ExecutionPlan.model_validate_json(plan.model_dump_json()) == plan


def test_fields_that_older_versions_lacked_have_defaults() -> None:
    stored = dict(STORED["plan"])
    for name in ("speed", "attention", "compile", "shift", "shift_reason", "expert_steps", "vae_precision", "loras"):
        del stored[name]
    plan = ExecutionPlan.model_validate_json(json.dumps(stored))
    assert (plan.speed, plan.shift, plan.shift_reason, plan.expert_steps, plan.loras) == (EAGER, None, None, {}, ())
    assert (plan.request.attention, plan.request.compile, plan.request.vae_precision) == ("auto", "auto", "auto")
    assert STORED["request"].items() <= plan.request_json().items()  # later versions have more fields


@pytest.mark.parametrize(
    "changes", [{"steps": 0}, {"steps": "many"}, {"components": []}, {"ladder": [{}]}, {"later": 1}, {"split": 1}]
)
def test_other_plans_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        read(**changes)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"prompt": 1}', "null", "{"])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        ExecutionPlan.model_validate_json(text)


@pytest.mark.parametrize(
    ("size", "asked", "used"), [((320, 240), "auto", 10), ((336, 240), "auto", 17), ((64, 32), 30, 30)]
)
def test_a_plan_stored_without_a_constant_rate_factor_has_the_one_that_it_used(
    tmp_path: Path, size: tuple[int, int], asked: int | str, used: int
) -> None:
    plan = tiny_plan(
        read_spec(EMBEDDED / "diorama", "diorama"), tmp_path / "x.mp4", width=size[0], height=size[1], crf=asked
    )
    assert plan.crf == used
    stored = json.loads(plan.model_dump_json())
    del stored["crf"]
    assert ExecutionPlan.model_validate_json(json.dumps(stored)).crf == used
    with pytest.raises(ValueError, match="not a plan"):
        ExecutionPlan.model_validate_json(json.dumps(stored | {"asked": None}))
