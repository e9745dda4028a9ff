"""Check a FramePack video of three sections with every component on the engines of one backend, against PyTorch."""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench.gpu.check_clip import PROMPT
from bench.gpu.check_common import HOME, Checks, psnr, ssim
from runtime.core.cancel import Cancel, CancelledError
from runtime.core.events import Event, FellBack, VideoSaved
from runtime.core.plan import EAGER, EngineRef, ExecutionPlan, is_block_program
from runtime.core.request import GenerationRequest
from runtime.engines.builders import BUILDERS, tensorrt
from runtime.engines.service import EngineService
from runtime.execution.residency import Residency
from runtime.models.images import with_images
from runtime.models.spec import ModelSpec
from runtime.pipeline import section_stages
from runtime.pipeline.blank_video import Detector
from runtime.pipeline.run import run_job
from runtime.planner.choice.engine_index import EngineRecord
from runtime.planner.resolve import PlanningContext, resolve

# 320×192: TensorRT 8.6 computes the VAE without tensor cores, and measures each kernel at the largest size.
SIZE = (24, 40)
SECTIONS, STEPS = 3, 4
Report = Callable[[Checks, ModelSpec, str, EngineRecord], None]


class Unjudged(Detector):
    """Disables the check for degenerate clips: random weights show noise."""

    def inspect(self, frames: Any) -> None:
        """Accept any frames."""


def sections(checks: Checks, report: Report) -> None:
    """Build what a video needs, several engines at once; time each engine; make the video on them and in PyTorch.

    Engines that are not there after `--seconds` are given up, and PyTorch takes their components.

    Args:
        report: reports an engine of a component.
    """
    height, width = checks.arguments.latent[1:] if checks.arguments.latent else SIZE
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(section_stages, "Detector", Unjudged))
        if checks.arguments.builder == "onnx_tensorrt":
            # The level is part of the key.
            stack.enter_context(mock.patch.object(tensorrt, "_OPTIMIZATION_LEVEL", checks.arguments.level))
        bare = checks.model()
        scale = bare.vae.scale_factor_spatial
        fields = {
            "prompt": PROMPT,
            "seed": 7,
            "steps": STEPS,
            "frames": 36 * SECTIONS + 1,
            "width": width * scale,
            "height": height * scale,
            # `blocks` compares with compiled blocks.
            "compile": "never",
            "image": str(Path(__file__).parents[2] / "examples" / "boat.png"),
        }
        spec = with_images(bare, GenerationRequest.from_mapping(fields), HOME, None)
        service = EngineService(checks.store, checks.machine, HOME)
        backend = BUILDERS[checks.arguments.builder].backend
        wanted = _planned(checks, spec, service, fields | {"backends": {"all": backend}, "build": "missing"})
        built = _build(checks, spec, service, wanted)
        ready = [name for name, part in wanted.components.items() if all((name, use) in built for use in part.engines)]
        backends = {name: backend if name in ready else "pytorch" for name in wanted.components}
        plans = {
            backend: _planned(checks, spec, service, fields | {"backends": backends, "build": "never"}),
            "pytorch": _planned(checks, spec, service, fields | {"backends": {"all": "pytorch"}}),
        }
        parts = {name: part.replace(dtype="float32") for name, part in plans["pytorch"].components.items()}
        plans["pytorch float32"] = plans["pytorch"].replace(components=parts, speed=EAGER)
        _compare(checks, spec, service, plans)
        for (component, use), record in built.items():
            if not is_block_program(use.program):
                with checks.going_on(f"time {component} {use.program}"):
                    report(checks, spec, component, record)


def _planned(checks: Checks, spec: ModelSpec, service: EngineService, fields: dict[str, Any]) -> ExecutionPlan:
    request = GenerationRequest.from_mapping(fields)
    return resolve(request, spec, PlanningContext(checks.machine, HOME / "sections.mp4", service.offers(spec)))


def _build(
    checks: Checks, spec: ModelSpec, service: EngineService, plan: ExecutionPlan
) -> dict[tuple[str, EngineRef], EngineRecord]:
    """Build the engines of a plan, report each as it is done, and return those that passed verification."""
    offers, cancel, began = service.offers(spec), Cancel(), time.perf_counter()
    todo = [(name, use) for name, part in plan.components.items() for use in part.engines]
    # The VAE's take longest.
    todo.sort(key=lambda one: one[0] not in {"vae", "vae_encoder"})

    def one(item: tuple[str, EngineRef]) -> EngineRecord | None:
        component, use = item
        with checks.going_on(f"build {component} {use.program}"):
            key = offers.key(BUILDERS[use.builder], component, use, checks.device)
            try:
                record = checks.engine(spec, component, key, cancel)
            except CancelledError:
                checks.say("given up", component=component, program=use.program)
                return None
            checks.say(
                "built",
                component=component,
                program=use.program,
                precision=use.precision,
                error=record.error,
                tolerance=record.tolerance,
                verified=record.verified,
                detail=record.detail,
                build_seconds=record.build_seconds,
                file_mib=round(record.file_bytes / (1 << 20), 2),
                context_bytes=record.context_bytes,
                after_seconds=round(time.perf_counter() - began, 1),
            )
            return record if record.verified else None
        return None

    timer = Timer(checks.arguments.seconds, cancel.request)
    timer.start()
    try:
        with ThreadPoolExecutor(checks.arguments.jobs) as pool:
            records = list(pool.map(one, todo))
    finally:
        timer.cancel()
    return {item: record for item, record in zip(todo, records, strict=True) if record is not None}


def _compare(checks: Checks, spec: ModelSpec, service: EngineService, plans: dict[str, ExecutionPlan]) -> None:
    """Make the video with each plan twice, the second time with everything loaded, and compare its frames."""
    frames: dict[str, torch.Tensor] = {}
    for name, plan in plans.items():
        events: list[Event] = []
        with Residency(service, keep_prompts=False) as residency:
            for _ in range(2):
                made: list[np.ndarray] = []
                run_job(plan, spec, events.append, Cancel(), residency, on_frames=made.append)
        saved = [event for event in events if isinstance(event, VideoSaved)]
        if not saved:
            checks.say("video", plan=name, failed=events[-1])
            continue
        frames[name] = torch.from_numpy(np.concatenate(made))
        checks.say(
            "video",
            plan=name,
            sections=plan.sections,
            size=[plan.width, plan.height, plan.frames],
            steps=plan.steps,
            components={part: used["backend"] for part, used in saved[-1].plan["components"].items()},
            fell_back=[str(event.reason) for event in events if isinstance(event, FellBack)],
            load_seconds=saved[0].load_seconds,
            seconds={stage: round(seconds, 3) for stage, seconds in saved[-1].timings.items()},
            peak_memory_bytes=saved[-1].peak_memory_bytes,
            spread=float(frames[name].float().std()),
        )
    for one, other in itertools.combinations(frames, 2):
        pair = frames[one], frames[other]
        checks.say("videos", plans=[one, other], psnr_db=round(psnr(*pair), 2), ssim=round(_ssim(*pair), 5))


def _ssim(frames: torch.Tensor, reference: torch.Tensor, at_once: int = 16) -> float:
    """Return the mean of `ssim` over a few frames at a time."""
    parts = zip(frames.split(at_once), reference.split(at_once), strict=True)
    return sum(ssim(a, b) * len(a) for a, b in parts) / len(frames)
