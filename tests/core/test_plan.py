"""Plans as stored JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from runtime.core.plan import ExecutionPlan
from runtime.models.catalogue import EMBEDDED
from runtime.models.registry import read_spec
from tests.plans import tiny_plan


@pytest.fixture
def plan(tmp_path: Path) -> ExecutionPlan:
    return tiny_plan(read_spec(EMBEDDED / "diorama", "diorama"), tmp_path / "x.mp4")


def test_json_round_trip(plan: ExecutionPlan) -> None:
    assert ExecutionPlan.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize(
    "changes", [{"steps": "many"}, {"components": []}, {"strategies": [{}]}, {"later": 1}, {"split": 1}, {"request": 1}]
)
def test_other_plans_are_refused(plan: ExecutionPlan, changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ExecutionPlan.model_validate_json(json.dumps(json.loads(plan.model_dump_json()) | changes))


def test_a_plan_that_lacks_a_field_is_refused(plan: ExecutionPlan) -> None:
    stored = json.loads(plan.model_dump_json())
    for field in ("crf", "request", "strategy"):
        with pytest.raises(ValidationError):
            ExecutionPlan.model_validate_json(json.dumps({name: stored[name] for name in stored if name != field}))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"prompt": 1}', "null", "{"])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        ExecutionPlan.model_validate_json(text)
