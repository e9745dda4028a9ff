"""`plan`, `models list` and `doctor`: what they find, for people on standard error, returned for programs."""

from dataclasses import asdict
from typing import Any

from runtime.cli import show
from runtime.core import settings
from runtime.core.errors import TandemError
from runtime.core.plan import BACKEND_TITLES
from runtime.core.request import GenerationRequest
from runtime.engines.service import EngineService
from runtime.jobs.outputs import output_path
from runtime.manager.doctor import examine
from runtime.manager.machine import probe
from runtime.manager.planner import resolve
from runtime.models.catalogue import folders, look_up, not_here
from runtime.models.known import named
from runtime.models.spec import ModelSpec
from runtime.models.wan import read_spec

_MIB = 1 << 20


def show_plan(request: GenerationRequest) -> dict[str, Any]:
    """Print and return what would run where, and why."""
    loaded = settings.load()
    spec = look_up(request.model, loaded.weights_dir)
    machine = probe()
    offers = EngineService.from_settings(loaded, machine).offers(spec)
    plan = resolve(request, spec, machine, output_path(loaded.outputs_dir, request.prompt), offers)
    show.line(
        f"{spec.title}: {plan.width}x{plan.height}, {plan.frames} frames ({plan.seconds_of_video:.1f} s at {plan.fps} "
        f"fps), {plan.steps} steps, {plan.tokens:,} tokens, seed {plan.seed}"
    )
    show.table(
        ("Component", "Runs on", "Weights", "Why"),
        [
            (
                plan.title(name),
                f"{BACKEND_TITLES[part.backend]}, {part.device}",
                _size(part.weights_bytes),
                part.reason,
            )
            for name, part in plan.components.items()
        ],
    )
    stay = "parts stay loaded" if plan.keep_loaded else "parts are loaded one at a time"
    show.line(f"Memory at the peak: about {_size(plan.memory_bytes)} ({stay})")
    for message in plan.warnings:
        show.warning(message)
    return {"request": plan.request_json(), "plan": plan.to_json(), "warnings": list(plan.warnings)}


def show_models() -> dict[str, Any]:
    """Print and return the models at hand; one that cannot be used says why."""
    weights_dir = settings.load().weights_dir
    rows, listed = [], []
    for name, folder in folders(weights_dir).items():
        try:
            spec = named(read_spec(folder, name))
        except TandemError as error:
            listed.append({"name": name, "folder": str(folder), "here": True, "problem": error.what})
            rows.append((name, "", "", f"{error.what} {error.remedy}"))
        else:
            listed.append(_model(spec))
            rows.append(_model_row(spec))
    for spec in not_here(weights_dir):
        listed.append(_model(spec))
        rows.append(_model_row(spec))
    show.table(("Name", "Weights", "By default", "Licence"), rows)
    return {"models": listed}


def _model(spec: ModelSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "folder": str(spec.directory),
        "here": spec.here,
        "problem": None,
        "title": spec.title,
        "license": spec.license,
        "parameters": spec.total_parameters,
        "sizes": [list(size) for size in spec.sizes],
        "frame_counts": list(spec.frame_counts),
        "defaults": vars(spec.defaults),
    }


def _model_row(spec: ModelSpec) -> tuple[str, str, str, str]:
    defaults = spec.defaults
    clip = f"{defaults.width}x{defaults.height}, {defaults.frames} frames, {defaults.steps} steps"
    weights = f"{spec.total_parameters / 1e6:,.1f} M{'' if spec.here else ', not here'}"
    return spec.name, weights, clip, spec.license


def show_doctor() -> dict[str, Any]:
    """Print and return what this machine has; "ok" is whether videos can be made."""
    loaded = settings.load()
    machine = probe(loaded.engines_dir)
    findings = examine(machine, loaded.cache_dir, loaded.weights_dir, loaded.engines_dir)
    marks = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
    show.table(("", "What", "Found"), [(marks[found.state], found.name, found.detail) for found in findings])
    for found in findings:
        if found.fix:
            show.line(f"{found.name}: {found.fix}")
    return {
        "ok": all(found.state != "problem" for found in findings),
        "findings": [found.to_json() for found in findings],
        "machine": asdict(machine) | {"packages": dict(machine.packages)},
    }


def _size(count: int) -> str:
    return f"{count / _MIB:,.0f} MiB"
