"""What is shown beside a finished video: download, seed, and how, where and how fast it was made. HTML as text."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runtime.core.events import VideoSaved
from runtime.core.facts import render
from runtime.core.plan import BACKEND_TITLES, ExecutionPlan
from runtime.core.step_cache import NONE
from runtime.core.units import memory_size
from runtime.ui import fields, formatting

_STAGES = {"encode": "reading the prompt", "denoise": "denoising", "decode": "decoding", "mux": "saving"}


def file_url(path: Path) -> str:
    """Return the address of a served file, relative to the page so that it holds behind a proxy too."""
    return f"gradio_api/file={quote(path.as_posix())}"


def facts(saved: VideoSaved, plan: ExecutionPlan, model: str, address: str) -> str:
    """Return the block under the video; what ran where is from the result, names are from the plan.

    Args:
        address: where the video is served.
    """
    request = saved.request
    name = escape(saved.video.name, quote=True)
    settings = escape(json.dumps(dict(request)), quote=True)
    components: Mapping[str, Mapping[str, Any]] = saved.plan["components"]
    reasons = dict.fromkeys(choice["reason"] for choice in components.values())
    return (
        f'<p class="caption">{escape(request["prompt"])}</p>'
        f"{notes([render(fact).what for fact in saved.warnings])}"
        '<div class="actions">'
        f'<a class="button strong" href="{address}" download="{name}">Download video</a>'
        f'<button type="button" class="button" data-use="seed" data-request="{settings}">Use this seed</button>'
        f'<button type="button" class="button" data-use="all" data-request="{settings}">Use all its settings</button>'
        "</div>"
        f"{listed(rows(saved, plan, model))}"
        f'<p class="why">{escape(" ".join(reasons))}</p>'
    )


def rows(saved: VideoSaved, plan: ExecutionPlan, model: str) -> list[tuple[str, str]]:
    """Return what there is to know of a video, each with its name."""
    request = saved.request
    size = formatting.size(request["width"], request["height"])
    told = [
        ("Seed", str(request["seed"])),
        ("Video", f"{size}, {formatting.length(request['frames'], request['fps'])}"),
        ("Model", f"{model}, {request['steps']} steps, {_guidance(request)}"),
        *_extras(request),
        ("Time", _time(saved)),
        ("Memory", f"{memory_size(saved.peak_memory_bytes)} at most"),
    ]
    return told + [("Ran on", place) for place in _places(saved.plan["components"], plan)]


def listed(told: Sequence[tuple[str, str]]) -> str:
    """Return names and what they stand for as a list."""
    items = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(value)}</dd></div>" for term, value in told)
    return f"<dl>{items}</dl>"


def notes(warnings: Sequence[str]) -> str:
    """Return the warnings as a list."""
    items = "".join(f"<li>{escape(warning)}</li>" for warning in warnings)
    return f'<ul class="notes" aria-label="Notes on this video">{items}</ul>'


def _guidance(request: Mapping[str, Any]) -> str:
    second = request.get("guidance_scale_2")
    return f"guidance {request['guidance_scale']:g}" + ("" if second is None else f" and {second:g}")


def _extras(request: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what not every video has."""
    loras, step_cache = fields.loras_text(request.get("loras")), request.get("step_cache", NONE)
    told = [("LoRA", line) for line in loras.splitlines()]
    told += [] if step_cache == NONE else [("Step cache", str(step_cache))]
    shift = request.get("shift")
    return told if shift is None else [*told, ("Shift", f"{shift:g}")]


def _time(saved: VideoSaved) -> str:
    stages = ", ".join(
        f"{_STAGES.get(name, name)} {formatting.duration(seconds)}"
        for name, seconds in saved.timings.items()
        if name != "total"
    )
    loading = f"; loading before that {formatting.duration(saved.load_seconds)}" if saved.load_seconds >= 0.05 else ""  # noqa: PLR2004 - shows as 0.0 s
    return f"{formatting.duration(saved.timings['total'])}: {stages}{loading}"


def _places(components: Mapping[str, Mapping[str, Any]], plan: ExecutionPlan) -> list[str]:
    """Return each place with the parts that ran there."""
    parts: dict[str, list[str]] = {}
    for name, choice in components.items():
        title = plan.title(name)
        parts.setdefault(_where(choice), []).append(title if title.startswith("VAE") else title.lower())
    return [f"{place}: {', '.join(names)}" for place, names in parts.items()]


def _where(choice: Mapping[str, Any]) -> str:
    backend = BACKEND_TITLES.get(choice["backend"], choice["backend"])
    return f"{backend} on {choice['device'].replace('cpu', 'the CPU')}, {choice['dtype']}"
