"""Sample requests, plans and results for tests of the store; none is run."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from runtime.core.events import VideoSaved
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.models.catalogue import EMBEDDED
from runtime.models.registry import read_spec
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue.records import Control, JobRecord
from runtime.queue.store import JobStore
from tests.plans import machine


def sample_request(**values: Any) -> GenerationRequest:
    """Return a request for the shipped model."""
    return GenerationRequest.from_mapping({"prompt": "a red boat"} | values)


@lru_cache
def sample_plan(seed: int = 7, steps: int = 4) -> ExecutionPlan:
    """Return a plan of `sample_request`."""
    spec = read_spec(EMBEDDED / "diorama", "diorama")
    return resolve(sample_request(seed=seed, steps=steps), spec, PlanningContext(machine(), Path("/nowhere/boat.mp4")))


def sample_result() -> VideoSaved:
    """Return the result of `sample_plan`."""
    return result_of(sample_plan(), Fact("pipeline.text_cut", {"field": "prompt"}))


def result_of(plan: ExecutionPlan, *warnings: Fact) -> VideoSaved:
    """Return the result of a plan."""
    return VideoSaved(
        video=plan.output,
        request=plan.request_json(),
        plan=json.loads(json.dumps(plan.to_json())),
        timings={"encode": 0.2, "denoise": 3.0, "decode": 1.0, "mux": 0.1, "total": 4.3},
        load_seconds=1.5,
        peak_memory_bytes=1 << 30,
        warnings=warnings,
    )


def add_job(store: JobStore, prompt: str = "a red boat", instance: str | None = None) -> JobRecord:
    """Add a sample job to a store, as running if `instance` is given."""
    return store.add(sample_request(prompt=prompt), sample_plan(), instance=instance)


def requests(store: JobStore, *ids: str) -> dict[str, Control]:
    """Return the pending pause and cancel requests of running jobs."""
    return {job: one.request for job, one in store.controls(ids).items() if one.running and one.request}
