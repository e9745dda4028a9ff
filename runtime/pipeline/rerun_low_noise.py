"""A finished video's second half anew: its low-noise expert with other settings, from where the first expert ended."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.core.errors import CheckpointError, InvalidRequestError
from runtime.core.plan import ExecutionPlan
from runtime.core.request import AUTO, GenerationRequest, label
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint import HOW, SECOND_HALF, CheckpointFolder
from runtime.planner.engine_offers import Offers, no_offers
from runtime.planner.history import History
from runtime.planner.resolve import resolve

# What may be asked for anew: what the checkpoint between both experts does not depend on.
CHANGEABLE = (SECOND_HALF, *HOW)
_OF_THE_SCHEDULE = {"steps": "The number of steps", "shift": "The shift"}


def redo_second_half(
    made: ExecutionPlan,
    changes: Mapping[str, Any],
    spec: ModelSpec,
    source: CheckpointFolder,
    target: CheckpointFolder,
    machine: Machine,
    output: Path,
    offers: Offers = no_offers,
    history: History = (),
) -> ExecutionPlan:
    """Plan a job that runs the low-noise expert and decodes, and put what it starts from into its folder.

    `run_job` with this plan and `target` then does the rest, and can be interrupted and resumed like any other.

    Args:
        made: the plan of the job whose second half is redone; it ended, or was interrupted in its second half.
        changes: by the names of `GenerationRequest`, of those in `CHANGEABLE`; backends by component.
        source: that job's checkpoints.
        target: the new job's.
        machine, output, offers, history: as for `planner.resolve.resolve`.

    Raises:
        InvalidRequestError: for a model with one transformer, a setting of the first half, or one out of bounds.
        CheckpointError: if that job's checkpoint between both experts is not there, of no use, or cannot be written.
        MachineError: if memory does not suffice.
    """
    if spec.experts == 1:
        raise InvalidRequestError(
            "model",
            f"{spec.title} has one transformer, so there is no second half to redo.",
            "Generate the video anew with the settings that you want.",
        )
    _check_changeable(changes)
    if made.expert_steps.get("transformer_2") == 0:
        raise InvalidRequestError(
            "model",
            f"The low-noise transformer took none of the {made.steps} steps, so there is no second half to redo.",
            "Generate the video anew with the settings that you want.",
        )
    values = made.request_json() | {"offload": AUTO} | dict(changes)
    backends = changes.get("backends", {})
    values["backends"] = {**made.asked.backends, **backends} if isinstance(backends, Mapping) else backends
    plan = resolve(GenerationRequest.from_mapping(values), spec, machine, output, offers, history)
    try:
        boundary = source.boundary(spec, plan)
    except CheckpointError as error:
        raise CheckpointError("checkpoint.boundary_unusable", cause=error.fact) from error
    if boundary is None:
        raise CheckpointError("checkpoint.boundary_missing")
    try:
        target.save(replace(boundary, planned=plan, plan=plan), spec, boundary=True)
    except CheckpointError as error:
        raise CheckpointError("checkpoint.boundary_not_copied", cause=error.fact) from error
    return plan


def _check_changeable(changes: Mapping[str, Any]) -> None:
    for name in changes:
        if name in _OF_THE_SCHEDULE:
            raise InvalidRequestError(
                name,
                f"{_OF_THE_SCHEDULE[name]} is the whole video's: the schedule of its second half follows from the "
                "first.",
                f"Leave the {name} as {'they are' if name == 'steps' else 'it is'}, or generate the video anew.",
            )
        if name not in CHANGEABLE:
            raise InvalidRequestError(
                name,
                f"The {label(name)} belongs to the first half too.",
                f"Change one of {', '.join(CHANGEABLE)}, or generate the video anew.",
            )
