"""`plan` and `doctor`: print the result and return it for `--json`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runtime.cli import terminal
from runtime.core import settings
from runtime.core.errors import MemoryShortError, ModelError
from runtime.core.estimates import MemoryStrategy, Seconds, StrategyForecast
from runtime.core.events import FINISHING
from runtime.core.facts import Fact, Words, render, short
from runtime.core.images import field_of
from runtime.core.plan import BACKEND_TITLES, ExecutionPlan
from runtime.core.request import FIELDS, GenerationRequest
from runtime.core.units import duration, memory_size
from runtime.engines.service import EngineService
from runtime.machine.doctor import Finding, check, examine
from runtime.machine.probe import probe
from runtime.models.catalogue import folders
from runtime.models.registry import read_spec
from runtime.models.requested import model_for
from runtime.models.spec import ModelSpec
from runtime.models.wildcards import with_prompt
from runtime.pipeline.files import output_path
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.resolve import PlanningContext, resolve

_STAGES = ("encode", "denoise", "decode", *FINISHING, "mux")
_TENTHS_BELOW = 10


def show_plan(request: GenerationRequest) -> dict[str, Any]:
    """Print and return the plan of a request with its reasons.

    Raises:
        MemoryShortError: if no strategy fits; the strategies are printed first.
        TandemError: if the request cannot run for another reason.
    """
    loaded = settings.load()
    request = with_prompt(request, loaded.cache_dir)
    spec = model_for(request, loaded.weights_dir, loaded.cache_dir, needs_weights=False, keep=False)
    machine = probe()
    engines = EngineService.from_settings(loaded, machine)
    history = HistoryFile(loaded.cache_dir, machine).read()
    output = output_path(loaded.outputs_dir, request.prompt)
    offers = engines.offers(spec)
    context = PlanningContext(machine, output, offers, history, compares=True, idle_builds=engines.idle_builds)
    try:
        plan = resolve(request, spec, context)
        in_app = resolve(request, spec, context, builds_later=True)
    except MemoryShortError as error:
        terminal.result("Memory is short. Strategies for weight placement, fastest first:")
        _show_strategies(error.strategies, error.where)
        raise
    if "later" in in_app.seconds:
        plan = plan.replace(seconds={**plan.seconds, "later": in_app.seconds["later"]})
    terminal.result(clip_text(spec, plan))
    if len(plan.expert_steps) > 1:
        steps = ", ".join(f"{plan.title(name)} {count}" for name, count in plan.expert_steps.items())
        terminal.result(f"Steps of each expert: {steps}")
    for reason in (plan.guidance_reason, plan.shift_reason):
        if reason is not None:
            terminal.result(str(reason))
    if plan.loras:
        terminal.result(f"LoRA: {', '.join(str(use.requested()) for use in plan.loras)}")
    if spec.sound is None:
        terminal.result(str(Fact("planner.makes_no_sound", {"model": spec.title})))
    for key, use in plan.inputs.items():
        place = plan.keyframe_places.get(key)
        at = "" if place is None else f", guides frame {place} ({place / plan.fps:.2f} s)"
        terminal.result(f"{FIELDS[field_of(key)].label}: {use.name}, {use.width}x{use.height}{at}")
    _show_components(plan)
    if plan.split is not None:
        terminal.result(f"{plan.gpus} GPUs ({', '.join(plan.split.devices)}): {plan.split.reason}")
    if plan.speed.reasons:
        terminal.result(f"PyTorch options: {' '.join(dict.fromkeys(map(str, plan.speed.reasons)))}")
    _show_memory(plan)
    terminal.result(time_text(plan))
    terminal.result(_second_text(in_app))
    warnings = [render(fact, Words(plan.components)).what for fact in plan.warnings]
    for text in warnings:
        terminal.warning(text)
    return {"request": plan.request_json(), "plan": plan.to_json(), "warnings": warnings}


def clip_text(spec: ModelSpec, plan: ExecutionPlan) -> str:
    """Return a line on the clip that a plan makes."""
    run = f"{plan.denoising_steps} of " if plan.skipped_steps else ""
    steps = f"{run}{plan.steps} step{'' if plan.steps == 1 else 's'}"
    if plan.sections > 1:
        steps = f"{plan.sections} sections of {steps}"
    if plan.refinement is not None:
        first, second = plan.by_stage
        steps = f"{steps} at {first.width}x{first.height} and then {second.steps} at full size"
    size = f"{plan.width}x{plan.height}"
    if plan.upscaling is not None:
        width, height = plan.video_size
        size = f"{size}, upscaled {plan.upscale} times to {width}x{height} by {plan.upscaler}"
    frames = f"{plan.frames} frames ({plan.seconds_of_video:.1f} s at {plan.fps} fps)"
    if plan.extend is not None:
        frames = f"{frames} after the {plan.extend.frames} of {plan.extend.name}"
        frames = f"{frames}, {plan.extend_frames} of them again" if plan.extend_frames > 1 else frames
    if plan.join is not None:
        frames = f"{frames}, before the {plan.join.frames} of {plan.join.name}"
    if plan.looping is not None:
        way = "without the last one" if plan.looping == "same frame" else "then backwards"
        frames = f"{frames}, {way} as a loop"
    if plan.interpolation > 1:
        frames = f"{frames}, interpolated to {plan.video_frames} frames at {plan.video_fps} fps"
    frames = f"{frames}, with sound" if plan.sound else frames
    return f"{spec.title}: {size}, {frames}, {steps}, {plan.tokens:,} tokens, seed {plan.seed}"


def _show_components(plan: ExecutionPlan) -> None:
    """Print where each component runs and why; reasons that all components have are printed once."""
    reasons = [tuple(map(str, part.reasons)) for part in plan.components.values()]
    common = [reason for reason in reasons[0] if all(reason in part_reasons for part_reasons in reasons)]
    rows = [
        (
            plan.title(name),
            f"{BACKEND_TITLES[part.backend]}, {part.device}",
            memory_size(part.weights_bytes),
            " ".join(reason for reason in map(str, part.reasons) if reason not in common),
        )
        for name, part in plan.components.items()
    ]
    columns = 4 if any(why for *_, why in rows) else 3
    headings = ("Component", "Runs on", "Weights", "Why")
    terminal.table(headings[:columns], [row[:columns] for row in rows])
    if common:
        terminal.result(f"All components: {' '.join(common)}")


def _show_memory(plan: ExecutionPlan) -> None:
    where = "video memory" if plan.components["transformer"].device.startswith("cuda") else "memory"
    rows = []
    for stage in plan.memory:
        how = "measured" if stage.measured else "estimated"
        sizes = (stage.weights_bytes, stage.working_bytes, stage.overhead_bytes, stage.peak_bytes)
        rows.append((plan.title(stage.component), *map(memory_size, sizes), how))
    terminal.table(("Running component", "Weights", "Working set", "Overhead", "Peak", ""), rows)
    peak, free = memory_size(plan.memory_bytes), memory_size(plan.free_bytes)
    terminal.result(f"Peak memory: about {peak} of {free} of free {where}. {plan.forecast.title}")
    if plan.strategy == plan.strategies[0].strategy:
        return
    terminal.result("Memory is short for the fastest strategy. All strategies, fastest first:")
    _show_strategies(plan.strategies, where, plan.strategy)


def _show_strategies(strategies: Sequence[StrategyForecast], where: str, chosen: MemoryStrategy | None = None) -> None:
    fastest = strategies[0].seconds.likely
    rows = []
    for forecast in strategies:
        ram = memory_size(forecast.ram_bytes) if forecast.ram_bytes else ""
        duration_ratio = f"{forecast.seconds.likely / fastest:.1f} times"
        verdict = str(forecast.verdict(where, taken=forecast.strategy == chosen))
        peak, flags = memory_size(forecast.peak_bytes), forecast.strategy.flags
        rows.append((str(forecast.title).rstrip("."), flags, peak, ram, duration_ratio, verdict))
    terminal.table(("Strategy", "Options", "Peak", "RAM", "Duration", ""), rows)


def time_text(plan: ExecutionPlan) -> str:
    """Return a line with the forecast of a plan's duration."""
    stages = ", ".join(f"{name} {_about(plan.seconds[name].likely)}" for name in _STAGES if name in plan.seconds)
    first = forecast_text(plan.seconds["total"], plan.seconds["load"].likely, f": {stages}")
    compiling = plan.seconds.get("compile")
    return first if compiling is None else f"{first}, {_about(compiling.likely)} of it compiling"


def _second_text(plan: ExecutionPlan) -> str:
    """Return a line with the forecast of a second clip in the web app, which makes the first one by `plan`."""
    second = plan.second_seconds
    about = f"about {_about(second.likely)}"
    if plan.builds:
        about = f"{_about(second.low)} to {_about(second.high)}, on engines that are built when no video waits"
    elif plan.speed.compiled_later:
        about = f"{about}, with code that is compiled when no video waits"
    return f"A second clip in the web app: {about}"


def forecast_text(seconds: Seconds, load_seconds: float, stages: str = "") -> str:
    """Return a line with a duration, its range, what it rests on, its stages, and how long loading takes before."""
    span = f"{_about(seconds.low)} to {_about(seconds.high)}"
    about = f"Time: about {_about(seconds.likely)}, {span} ({short(seconds.basis)}){stages}"
    return f"{about}; before that loading, about {_about(load_seconds)}"


def _about(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < _TENTHS_BELOW else duration(seconds)


def show_doctor() -> dict[str, Any]:
    """Print and return the state of this machine; "ok" in the result means that it can generate videos."""
    from runtime.video.mp4 import find_ffmpeg

    loaded = settings.load()
    machine = probe(loaded.engines_dir)
    findings = [
        *examine(machine, loaded.cache_dir, loaded.engines_dir),
        check("ffmpeg", lambda: Fact("doctor.path", {"path": find_ffmpeg()})),
        *_models(loaded.weights_dir),
    ]
    rows = [finding.to_json() for finding in findings]
    marks = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
    terminal.table(("", "What", "Found"), [(marks[row["state"]], row["name"], row["detail"]) for row in rows])
    for row in rows:
        if row["fix"]:
            terminal.result(f"{row['name']}: {row['fix']}")
    return {
        "ok": all(row["state"] != "problem" for row in rows),
        "findings": rows,
        "machine": machine.to_json(),
    }


def _models(weights_dir: Path) -> list[Finding]:
    try:
        model_folders = folders(weights_dir)
    except ModelError as error:
        return [Finding("Weights folder", "problem", error.fact)]
    return [check(f"Model {name}", partial(_model, name, folder)) for name, folder in model_folders.items()]


def _model(name: str, folder: Path) -> Fact:
    return Fact("doctor.model", {"millions": read_spec(folder, name).total_parameters / 1e6})
