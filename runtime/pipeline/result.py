"""The result of a finished job: for the user, and for the metadata of the MP4."""

import platform
from datetime import datetime, timezone
from typing import Any

import diffusers
import torch

from runtime import __version__
from runtime.core.events import VideoSaved
from runtime.pipeline.metrics import PeakMemory
from runtime.pipeline.run_context import RunContext


def result_of(context: RunContext, peak: PeakMemory) -> VideoSaved:
    """Return the result of a job whose frames are all encoded."""
    return VideoSaved(
        video=context.plan.output,
        request=context.plan.request_json(),
        plan=context.plan.to_json(),
        timings=context.clock.timings(),
        load_seconds=round(context.clock.load_seconds, 3),
        peak_memory_bytes=peak.bytes(),
        warnings=tuple(context.warnings),
        earlier=context.earlier,
    )


def metadata_of(saved: VideoSaved, job_id: str | None) -> dict[str, Any]:
    """Return the metadata of the MP4: the result without its path, the job and the versions."""
    result = {key: value for key, value in saved.result_json().items() if key != "video"}
    versions = {
        "tandem": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    job = {} if job_id is None else {"job": job_id}
    return {"tandem": {**result, **job, "versions": versions, "created": created}}
