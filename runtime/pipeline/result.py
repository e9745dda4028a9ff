"""What is said of a finished video: to whoever watches, and by the MP4 itself."""

import platform
from datetime import datetime, timezone
from typing import Any

import diffusers
import torch

from runtime import __version__
from runtime.core.events import VideoSaved
from runtime.pipeline.metrics import PeakMemory
from runtime.pipeline.run_context import RunContext


def outcome(context: RunContext, peak: PeakMemory) -> VideoSaved:
    """Return what came of a job whose frames are all encoded."""
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


def facts(saved: VideoSaved, job_id: str | None) -> dict[str, Any]:
    """Return what the MP4 says about itself."""
    told = {key: value for key, value in saved.result_json().items() if key != "video"}
    versions = {
        "tandem": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    named = {} if job_id is None else {"job": job_id}
    return {"tandem": {**told, **named, "versions": versions, "created": created}}
