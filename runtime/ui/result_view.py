"""What is shown below a finished video: download, seed, settings, times, memory, and what ran where."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runtime.core.events import VideoSaved
from runtime.core.facts import Fact
from runtime.core.plan import BACKEND_TITLES, ExecutionPlan
from runtime.core.step_cache import NONE
from runtime.core.units import memory_size
from runtime.ui import fields, formatting
from runtime.ui.templating import render
from runtime.ui.words import lowered, page_text

_STAGES = {"encode": "reading the prompt", "denoise": "denoising", "decode": "decoding", "mux": "saving"}


def file_url(path: Path) -> str:
    """Return the address of a video in the outputs folder, relative to the page so that it works behind a proxy."""
    return f"gradio_api/file={quote(path.as_posix())}"


def result_html(saved: VideoSaved, plan: ExecutionPlan, model: str, address: str) -> str:
    """Return the block below a finished video.

    Args:
        model: the model's title.
        address: where the video is served.
    """
    return render(
        "result.html",
        request=dict(saved.request),
        name=saved.video.name,
        address=address,
        warning_lines=[page_text(fact).what for fact in saved.warnings],
        rows=rows(saved, plan, model),
        reasons=reasons(saved),
    )


def warnings_html(warnings: Sequence[Fact]) -> str:
    """Return warnings as a list."""
    return render("warnings.html", lines=[page_text(fact).what for fact in warnings])


def reasons(saved: VideoSaved) -> str:
    """Return why each component ran where it did, equal reasons once."""
    return " ".join(dict.fromkeys(str(part["reason"]) for part in saved.plan["components"].values()))


def rows(saved: VideoSaved, plan: ExecutionPlan, model: str) -> list[tuple[str, str]]:
    """Return names and values that describe a video."""
    request = saved.request
    size = formatting.size(request["width"], request["height"])
    found = [
        ("Seed", str(request["seed"])),
        ("Video", f"{size}, {formatting.length(request['frames'], request['fps'])}"),
        ("Model", f"{model}, {request['steps']} steps, {_guidance(request)}"),
        *_extras(request),
        ("Time", _time(saved)),
        ("Memory", f"{memory_size(saved.peak_memory_bytes)} at most"),
    ]
    return found + [("Ran on", place) for place in _places(saved.plan["components"], plan)]


def _guidance(request: Mapping[str, Any]) -> str:
    second = request.get("guidance_scale_2")
    return f"guidance {request['guidance_scale']:g}" + ("" if second is None else f" and {second:g}")


def _extras(request: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return settings that differ from their defaults."""
    loras, step_cache = fields.loras_text(request.get("loras")), request.get("step_cache", NONE)
    found = [("LoRA", line) for line in loras.splitlines()]
    found += [] if step_cache == NONE else [("Step cache", str(step_cache))]
    shift = request.get("shift")
    return found if shift is None else [*found, ("Shift", f"{shift:g}")]


def _time(saved: VideoSaved) -> str:
    stages = ", ".join(
        f"{_STAGES.get(name, name)} {formatting.duration(seconds)}"
        for name, seconds in saved.timings.items()
        if name != "total"
    )
    loading = f"; loading before that {formatting.duration(saved.load_seconds)}" if saved.load_seconds >= 0.05 else ""  # noqa: PLR2004 - shows as 0.0 s
    return f"{formatting.duration(saved.timings['total'])}: {stages}{loading}"


def _places(components: Mapping[str, Mapping[str, Any]], plan: ExecutionPlan) -> list[str]:
    """Return each place with the components that ran there."""
    parts: dict[str, list[str]] = {}
    for name, choice in components.items():
        title = plan.title(name)
        parts.setdefault(_where(choice), []).append(lowered(title))
    return [f"{place}: {', '.join(names)}" for place, names in parts.items()]


def _where(choice: Mapping[str, Any]) -> str:
    backend = BACKEND_TITLES.get(choice["backend"], choice["backend"])
    return f"{backend} on {choice['device'].replace('cpu', 'the CPU')}, {choice['dtype']}"
