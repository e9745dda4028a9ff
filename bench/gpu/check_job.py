"""Check a job, from request to MP4, on the engines of one backend and in PyTorch."""

import os
import shutil
import statistics
from pathlib import Path

import torch

from bench.gpu.check_clip import PROMPT
from bench.gpu.check_common import CLIP, HOME, Checks, profile_of, programs_of, psnr, ssim
from runtime.core.cancel import Cancel
from runtime.core.events import Event, FellBack, VideoSaved
from runtime.core.request import GenerationRequest
from runtime.engines.builders import BUILDERS
from runtime.engines.service import EngineService
from runtime.execution.residency import Residency
from runtime.models.catalogue import find
from runtime.models.images import with_images
from runtime.pipeline.run import run_job
from runtime.planner.resolve import PlanningContext, resolve
from tests.pipeline.test_run import frames_of

RUNS = 5


def job(checks: Checks) -> None:
    """One clip from an image by `run_job`: engines planned from the library, loaded, run; alternating with PyTorch."""
    image = {"image": str(Path(__file__).parents[2] / "examples" / "boat.png")}
    request = GenerationRequest.from_mapping({"prompt": PROMPT, **image})
    spec = with_images(find("diorama", Path("none")), request, HOME, None)
    service = EngineService(checks.store, checks.machine, None)
    for component, program in programs_of(spec):
        profile = profile_of(program, CLIP, chunk=1)
        with checks.going_on(f"build {component} {program}"):
            checks.engine(spec, component, checks.key(spec, component, program, (profile,), "default"))
    out = Path(os.environ.get("OUT", HOME))
    backend = BUILDERS[checks.arguments.builder].backend
    events: dict[str, list[Event]] = {}
    with Residency(service) as first, Residency(service) as second:
        for residency, asked in (*[(first, backend), (second, "pytorch")] * RUNS,):
            request = GenerationRequest.from_mapping(
                {"prompt": PROMPT, "seed": 7, "backends": {"all": asked}, "build": "never", **image}
            )
            plan = resolve(request, spec, PlanningContext(checks.machine, HOME / f"{asked}.mp4", service.offers(spec)))
            run_job(plan, spec, events.setdefault(asked, []).append, Cancel(), residency)
    frames = {}
    for asked, emitted in events.items():
        saved = [event for event in emitted if isinstance(event, VideoSaved)]
        if not saved:
            checks.say("job", asked=asked, failed=emitted[-1])
            continue
        video = saved[0].video
        shutil.copy(video, out / f"{checks.arguments.builder}-{asked}.mp4")
        pixels = torch.frombuffer(bytearray(frames_of(video)), dtype=torch.uint8)
        frames[asked] = pixels.reshape(-1, saved[0].request["height"], saved[0].request["width"], 3)
        warm = {stage: statistics.median(run.timings[stage] for run in saved[1:]) for stage in saved[0].timings}
        checks.say(
            "job",
            asked=asked,
            components={name: part["backend"] for name, part in saved[-1].plan["components"].items()},
            reasons={name: part["reason"] for name, part in saved[-1].plan["components"].items()},
            fell_back=[str(event.reason) for event in emitted if isinstance(event, FellBack)],
            load_seconds=saved[0].load_seconds,
            first_seconds=saved[0].timings["total"],
            seconds={stage: round(seconds, 4) for stage, seconds in warm.items()},
            peak_memory_bytes=saved[-1].peak_memory_bytes,
        )
    if len(frames) > 1:
        ours, wanted = frames[backend], frames["pytorch"]
        checks.say("jobs", builder=checks.arguments.builder, psnr_db=psnr(ours, wanted), ssim=ssim(ours, wanted))
