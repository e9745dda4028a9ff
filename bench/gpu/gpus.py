"""Measure a job on several GPUs: steps, decoding, clips, and a killed process.

    python bench/gpu/gpus.py [--gpus 2] [--model wan2.2-a14b] [--steps 3] [--seconds 480] [PART …]
    python bench/gpu/gpus.py clip --gpus 1 --clip-steps 40 --asked '{"quantization": "fp8"}'
    python bench/gpu/gpus.py clip --gpus 1 --clip-steps 40 --asked '{"step_cache": "magcache:0.12"}'
    python bench/gpu/gpus.py --small --device cpu --gpus 4       the same with a tiny model, on the CPU

Parts are `passes` (and with them decoding), `cache` (a step cache), `kill` and `clip`; all by default. Random weights
at full size in `TANDEM_CHECKS`; only a step cache's seconds depend on their values. Each variant loads its own
processes, prints a JSON object and appends it to $OUT/gpus.jsonl. `--asked` overrides fields of the request. Errors
are ‖out - one‖ / ‖one‖ relative to one GPU, next to the differences between two equal runs on one GPU and with another
attention kernel, which are left out at 720p. `clip` needs ffmpeg; set GOMP_SPINCOUNT=1000 for it, as the app does.
wan2.2-i2v-a14b starts from examples/boat.png.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from bench.gpu import results
from bench.gpu.jobs import HOME, MODELS, Unjudged, save
from runtime.core.cancel import Cancel
from runtime.core.errors import GroupError
from runtime.core.events import Event, Failed, StepDone, VideoSaved
from runtime.core.plan import ExecutionPlan, Split
from runtime.core.request import GenerationRequest
from runtime.execution.components import PROMPTED, UNPROMPTED
from runtime.execution.residency import Residency
from runtime.machine.probe import Machine, probe
from runtime.models.catalogue import known_as
from runtime.models.images import with_images
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.pipeline import video_output
from runtime.pipeline.run import run_job
from runtime.pipeline.sampling import decode
from runtime.planner.resolve import PlanningContext, resolve
from tests import tiny_models
from tests.gpu.errors import relative_error
from tests.pipeline.computed_blocks import blocks_computed
from tests.pipeline.test_parity import sample
from tests.plans import Alone, machine, with_strategy
from tests.published_specs import TRANSFORMERS, VAES

PARTS = ("passes", "cache", "kill", "clip")
# Strengths at which random weights leave out some passes, and the steps and frames of a clip that is soon made.
CACHES = ("none", "first-block:0.05", "first-block:0.075", "first-block:0.2", "magcache:0.12", "taylorseer:3")
CACHED_STEPS, CACHED_FRAMES = 12, 17
# UMT5-XXL's width, in one layer: 11 GB less to write.
TEXT = {"vocab_size": 32, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 1, "num_heads": 64}
# As many steps as the clip that is extrapolated to.
STEPS = 40
IMAGE = Path(__file__).parents[2] / "examples" / "boat.png"
STARTED = time.monotonic()


def say(**found: Any) -> None:
    """Report a measurement with the seconds since the start."""
    results.say("gpus.jsonl", at=round(time.monotonic() - STARTED, 1), **found)


def model(arguments: argparse.Namespace) -> ModelSpec:
    """Return a model of one of the published architectures; both experts share the same files."""
    architecture = MODELS[arguments.model][0]
    folder = HOME / f"gpus-{'small-' if arguments.small else ''}{arguments.model}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        tiny_models.build(architecture, folder)
        if not arguments.small:
            device = f"{arguments.device}:0"
            save(lambda: UMT5EncoderModel(UMT5Config(**TEXT)), folder / "text_encoder", device)
            save(partial(WanTransformer3DModel, **TRANSFORMERS[arguments.model]), folder / "transformer", device)
            if (folder / "transformer_2").exists():
                shutil.rmtree(folder / "transformer_2")
                (folder / "transformer_2").symlink_to(folder / "transformer")
            save(partial(AutoencoderKLWan, **VAES.get(arguments.model, VAES["wan2.1"])), folder / "vae", device)
        (folder / "complete").touch()
    spec = read_spec(folder, arguments.model)
    known = known_as(arguments.model)
    # Which steps MagCache computes depends on the ratios alone, not on the weights.
    spec = spec if known is None else replace(spec, mag_ratios=known.mag_ratios)
    needs_image = spec.image_input is not None and spec.image_input.required
    return with_images(spec, GenerationRequest(prompt="a boat", image=str(IMAGE)), HOME, None) if needs_image else spec


def variants(arguments: argparse.Namespace) -> Iterator[tuple[str, Split | None]]:
    """Yield every split of a job over a number of GPUs."""
    yield "one", None
    for count in arguments.counts:
        if count > arguments.gpus:
            return
        devices = tuple("cpu" if arguments.device == "cpu" else f"cuda:{index}" for index in range(count))
        for guidance in (2, 1):
            name = "guidance" if guidance == 2 else "tokens"
            name = f"{name} x tokens" if guidance == 2 and count > 2 else name
            # The tiny models have two heads.
            if not (arguments.small and count // guidance > 2):
                sequence = count // guidance
                split = Split(devices=devices, guidance=guidance, sequence=sequence, decode=True)
                yield f"{count}: {name}", split


def planned(spec: ModelSpec, computer: Machine, arguments: argparse.Namespace, **values: Any) -> ExecutionPlan:
    """Plan a clip for one GPU."""
    _, width, height, frames = MODELS[arguments.model]
    size = {"width": width, "height": height, "frames": frames}
    if arguments.small:
        size = {"width": 64, "height": 96, "frames": 9}
    elif arguments.large:
        size = {"width": 1280, "height": 720, "frames": frames}
    asked = {"prompt": "a red boat", "model": str(spec.directory), "seed": 1, "steps": 4, **size, **arguments.asked}
    asked |= values
    if spec.images:
        asked["image"] = str(IMAGE)
    request = GenerationRequest.from_mapping(asked)
    plan = resolve(request, spec, PlanningContext(computer, Path(os.environ.get("OUT", ".")) / "x.mp4"))
    return with_strategy(plan, keep_loaded=True, freed=())


def synchronize(arguments: argparse.Namespace) -> None:
    """Wait for the GPU of this process."""
    if arguments.device != "cpu":
        torch.cuda.synchronize()


def guided(denoiser: Any, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return both passes of a step, as `sampling` calls them."""
    latents, when, positive, negative = given
    if denoiser.pairs:
        return torch.cat(tuple(denoiser.together(latents, when, {PROMPTED: positive, UNPROMPTED: negative})))
    return torch.cat([denoiser(latents, when, positive), denoiser(latents, when, negative)])


def seconds_of(work: Any, repeats: int, arguments: argparse.Namespace) -> tuple[list[float], Any]:
    """Return the seconds of each call after a warm-up call, and the last result."""
    found, out = [], None
    for number in range(repeats + 1):
        synchronize(arguments)
        began = time.perf_counter()
        out = work()
        synchronize(arguments)
        if number:
            found.append(round(time.perf_counter() - began, 4))
    return found, out


def passes(spec: ModelSpec, computer: Machine, arguments: argparse.Namespace) -> None:
    """Measure steps with guidance, and decoding, in every variant."""
    plan = planned(spec, computer, arguments)
    device = plan.components["transformer"].device
    noise = torch.Generator().manual_seed(1)
    latents = torch.randn(plan.latent_shape, generator=noise).to(device)
    text = torch.randn((2, 1, 512, spec.transformer.text_dim), generator=noise).to(device)
    given = (latents, torch.tensor(500.0, device=device), text[0], text[1])
    step: torch.Tensor | None = None
    clip: torch.Tensor | None = None
    one = 0.0
    for name, split in variants(arguments):
        with reporting_failure("passes", name, arguments), Residency() as residency:
            job = Alone(plan.replace(split=split))
            began = time.perf_counter()
            with residency.denoiser(spec, job, "transformer") as denoiser:
                loaded = time.perf_counter() - began
                seconds, made = seconds_of(partial(guided, denoiser, given), arguments.steps, arguments)
                made = made.float().cpu()
                found: dict[str, Any] = {}
                if step is None:
                    step, one = made, statistics.median(seconds)
                    found = {} if arguments.large else floors(denoiser, given, step, plan, arguments)
            median = statistics.median(seconds)
            say(
                part="step",
                variant=name,
                seconds=median,
                all=seconds,
                times_as_fast=round(one / median, 3),
                error=relative_error(made, step),
                load_seconds=round(loaded, 1),
                peak_bytes=residency.group_manager.peak_bytes,
                tokens=plan.tokens,
                **found,
            )
            with residency.video_decoder(spec, job) as decoder:
                frames = partial(decode, decoder, latents, plan.strategy.decode_chunk, Cancel())
                seconds, made = seconds_of(lambda: torch.cat(list(frames())), 2, arguments)  # noqa: B023 - called at once
            clip = made if clip is None else clip
            apart = (made.int() - clip.int()).abs()
            say(
                part="decode",
                variant=name,
                seconds=statistics.median(seconds),
                all=seconds,
                most_apart_of_255=int(apart.max()),
                share_apart=float((apart > 0).double().mean()),
                chunk=plan.strategy.decode_chunk,
                dtype=plan.components["vae"].dtype,
            )


def floors(
    denoiser: Any, given: tuple[torch.Tensor, ...], step: torch.Tensor, plan: ExecutionPlan, arguments: Any
) -> dict[str, float]:
    """Return the differences on one GPU: between two equal runs, and with other attention kernels."""
    found = {"two_equal_runs": relative_error(guided(denoiser, given), step)}
    for kind in ("flash", "cudnn"):
        if arguments.device != "cpu" and kind != plan.speed.attention:
            denoiser.compute(plan.speed.replace(attention=kind))
            found[kind] = relative_error(guided(denoiser, given), step)
    return found


def cache(spec: ModelSpec, computer: Machine, arguments: argparse.Namespace) -> None:
    """Check latents with a step cache in every variant: equal to one GPU's, without a deadlock."""
    wanted: dict[str, tuple[torch.Tensor, float]] = {}
    frames = {} if arguments.small else {"frames": CACHED_FRAMES}
    for name, split in variants(arguments):
        with reporting_failure("cache", name, arguments), Residency() as residency:
            for step_cache in CACHES:
                plan = planned(spec, computer, arguments, steps=CACHED_STEPS, step_cache=step_cache, **frames)
                plan = plan.replace(split=split)
                latents: list[torch.Tensor] = []
                synchronize(arguments)
                began = time.perf_counter()
                blocks = blocks_computed(
                    lambda: latents.append(sample(spec, plan, residency).float().cpu())  # noqa: B023 - called at once
                )
                seconds = time.perf_counter() - began
                (made,) = latents
                one, once = wanted.setdefault(step_cache, (made, seconds))
                say(
                    part="cache",
                    variant=name,
                    step_cache=step_cache,
                    seconds=round(seconds, 2),  # the first has the loading in it
                    times_as_fast=round(once / seconds, 3),
                    error=relative_error(made, one),
                    beside_none=relative_error(made, wanted["none"][0]),
                    blocks=blocks or None,  # computed by this process, of 2 passes
                    peak_bytes=residency.group_manager.peak_bytes,
                )


def kill(spec: ModelSpec, computer: Machine, arguments: argparse.Namespace) -> None:
    """Kill a process during an exchange: measure when it is reported and what remains."""
    plan = planned(spec, computer, arguments)
    _, split = next(found for found in variants(arguments) if found[1] is not None and found[1].sequence > 1)
    assert split is not None
    device = plan.components["transformer"].device
    latents = torch.randn(plan.latent_shape).to(device)
    text = torch.randn((2, 1, 512, spec.transformer.text_dim)).to(device)
    given = (latents, torch.tensor(500.0, device=device), text[0], text[1])
    with reporting_failure("kill", "", arguments), Residency() as residency:
        with residency.denoiser(spec, Alone(plan.replace(split=split)), "transformer") as denoiser:
            guided(denoiser, given)
            group = residency.group_manager.group
            assert group is not None
            there = [psutil.Process(process.pid) for process in group.processes]
            killed: list[float] = []

            def later() -> None:
                time.sleep(0.3)
                killed.append(time.perf_counter())
                os.kill(there[1].pid, signal.SIGKILL)

            threading.Thread(target=later).start()
            message = ""
            try:
                while True:
                    guided(denoiser, given)
            except GroupError as error:
                message = error.what
            took = time.perf_counter() - killed[0]
        left = [process.pid for process in there if process.is_running()]
        free = [] if arguments.device == "cpu" else [torch.cuda.mem_get_info(one)[0] for one in split.devices]
        say(part="kill", message=message, seconds=round(took, 2), left=left, free_bytes=free)


def clip(spec: ModelSpec, computer: Machine, arguments: argparse.Namespace) -> None:
    """Measure jobs and extrapolate to `STEPS` steps; this process plans, decodes and writes an MP4."""
    vars(video_output)["Detector"] = Unjudged  # random weights show noise
    one = 0.0
    asked_plan = planned(spec, computer, arguments, steps=arguments.clip_steps)
    for name, split in variants(arguments):
        # As the planner splits: with guidance, processes take one pass each first.
        if split is not None and (split.guidance == 2) != (asked_plan.guidance_scale > 1):
            continue
        with reporting_failure("clip", name, arguments), Residency() as residency:
            plan = asked_plan.replace(split=split)
            events: list[Event] = []
            # The first run loads, tries kernels and compiles: one step of each expert is enough.
            for turn, run_plan in (("first", plan.replace(steps=2)), ("second", plan)):
                events.clear()
                run_job(run_plan, spec, events.append, Cancel(), residency)
                end = events[-1]
                if isinstance(end, Failed):
                    say(part="clip", variant=name, failed=end.what)
                    break
                assert isinstance(end, VideoSaved)
                steps = [event.seconds for event in events if isinstance(event, StepDone)]
                total = end.timings["total"] + (STEPS - len(steps)) * statistics.median(steps)
                one = total if split is None else one
                say(
                    part="clip",
                    variant=name,
                    run=turn,
                    seconds_of_40_steps=round(total, 2),
                    times_as_fast=round(one / total, 3) if one else None,
                    steps=[round(step, 3) for step in steps],
                    computed_steps=sum(run_plan.computed) if run_plan is plan else None,
                    timings=dict(end.timings),
                    load_seconds=end.load_seconds,
                    peak_bytes=end.peak_memory_bytes,
                    speed=run_plan.speed.model_dump(),
                    warnings=[str(fact) for fact in end.warnings],
                )


@contextmanager
def reporting_failure(part: str, variant: str, arguments: argparse.Namespace) -> Iterator[None]:
    """Report a failure and continue.

    Raises:
        SystemExit: if no time is left.
    """
    if time.monotonic() - STARTED > arguments.seconds:
        sys.exit(f"No time is left for {part} {variant} and what follows.")
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        say(part=part, variant=variant, failed=f"{type(error).__name__}: {error}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=[], metavar="PART")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[2, 4, 8], help="GPUs that share a job, in addition to one"
    )
    parser.add_argument("--model", default="wan2.2-a14b", choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each variant")
    parser.add_argument("--clip-steps", type=int, default=4, help="of a clip")
    parser.add_argument("--asked", type=json.loads, default={}, help="fields of the request to override, JSON")
    parser.add_argument("--large", action="store_true", help="720p")
    parser.add_argument("--seconds", type=float, default=480, help="start no part after this time")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        computer, arguments.gpus = machine(), arguments.gpus or 2
    else:
        computer, arguments.gpus = probe(), arguments.gpus or torch.cuda.device_count()
        say(part="machine", gpus=[gpu.name for gpu in computer.gpus], torch=torch.__version__, system=computer.system)
    began = time.monotonic()
    spec = model(arguments)
    say(part="model", model=arguments.model, seconds=round(time.monotonic() - began, 1))
    for part in arguments.parts or PARTS:
        {"passes": passes, "cache": cache, "kill": kill, "clip": clip}[part](spec, computer, arguments)


if __name__ == "__main__":
    main()
