"""Rerun the low-noise transformer of a finished video with other settings, from where the high-noise one ended."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.core.errors import CheckpointError, InvalidRequestError
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.request import AUTO, GenerationRequest
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.pipeline.files import BOUNDARY, COMPUTE_FIELDS, LATEST, LOW_NOISE_FIELD, checkpoint_step
from runtime.planner.engine_offers import Offers, no_offers
from runtime.planner.history import History
from runtime.planner.resolve import resolve

if TYPE_CHECKING:  # it imports torch
    from runtime.pipeline.checkpoint import CheckpointFolder

# Fields that the checkpoint between the two transformers does not depend on.
CHANGEABLE = (LOW_NOISE_FIELD, *COMPUTE_FIELDS)
# They decide the timesteps of both transformers.
_OF_THE_SCHEDULE = ("steps", "shift")


def plan_rerun(
    finished: ExecutionPlan,
    changes: Mapping[str, Any],
    spec: ModelSpec,
    source: Path,
    target: Path,
    machine: Machine,
    output: Path,
    offers: Offers = no_offers,
    history: History = (),
) -> ExecutionPlan:
    """Plan a job that runs the low-noise transformer and decodes, and copy the checkpoint it starts from.

    `prepare_rerun` and `run_job` with this plan and `target` do the rest; the job can be interrupted and resumed like
    any other. Imports no torch.

    Args:
        finished: the plan of the job to rerun, which ended or was interrupted after its high-noise steps.
        changes: request fields by name, of those in `CHANGEABLE`; backends by component.
        source: the folder of that job's checkpoints.
        target: the new job's.
        machine, output, offers, history: as for `planner.resolve.resolve`.

    Raises:
        InvalidRequestError: for a model with one transformer, a setting of the high-noise steps, or an invalid value.
        CheckpointError: if the checkpoint between the two transformers is missing, unusable, or cannot be copied.
        MachineError: if there is not enough memory.
    """
    if spec.experts == 1:
        raise InvalidRequestError("model", "rerun.one_transformer", model=spec.title)
    _check_changeable(changes)
    if finished.expert_steps.get("transformer_2") == 0:
        raise InvalidRequestError("model", "rerun.no_low_noise_steps", steps=finished.steps)
    values = finished.request_json() | {"offload": AUTO} | dict(changes)
    backends = changes.get("backends", {})
    values["backends"] = {**finished.asked.backends, **backends} if isinstance(backends, Mapping) else backends
    plan = resolve(GenerationRequest.from_mapping(values), spec, machine, output, offers, history, builds_later=True)
    if not (source / BOUNDARY).is_file():
        raise CheckpointError("checkpoint.boundary_missing")
    if checkpoint_step(source, BOUNDARY) is None:
        raise CheckpointError("checkpoint.boundary_unusable", cause=Fact("checkpoint.damaged"))
    try:
        target.mkdir(parents=True, exist_ok=True)
        try:
            (target / BOUNDARY).hardlink_to(source / BOUNDARY)
        except OSError:  # a disk without links
            shutil.copyfile(source / BOUNDARY, target / BOUNDARY)
    except OSError as error:
        cause = Fact("checkpoint.not_writable", {"folder": target, "reason": error.strerror or str(error)})
        raise CheckpointError("checkpoint.boundary_not_copied", cause=cause) from error
    return plan


def prepare_rerun(checkpoints: "CheckpointFolder", plan: ExecutionPlan, spec: ModelSpec) -> None:
    """Make the copied checkpoint the job's own, unless the job has a checkpoint already.

    Raises:
        CheckpointError: if it cannot be used or written.
    """
    if (checkpoints.path / LATEST).is_file():
        return
    try:
        boundary = checkpoints.boundary(spec, plan)
    except CheckpointError as error:
        raise CheckpointError("checkpoint.boundary_unusable", cause=error.fact) from error
    if boundary is None:
        return
    try:
        checkpoints.save(replace(boundary, planned=plan, plan=plan), spec, boundary=True)
    except CheckpointError as error:
        raise CheckpointError("checkpoint.boundary_not_copied", cause=error.fact) from error


def _check_changeable(changes: Mapping[str, Any]) -> None:
    for name in changes:
        if name in _OF_THE_SCHEDULE:
            raise InvalidRequestError(name, "rerun.schedule_fixed", field=name)
        if name not in CHANGEABLE:
            raise InvalidRequestError(name, "rerun.not_changeable", field=name, changeable=CHANGEABLE)
