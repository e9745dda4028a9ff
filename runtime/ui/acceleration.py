"""The acceleration panel: its controls, and what it shows of an outlook, as HTML."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

from runtime.core.request import (
    ATTENTIONS,
    BACKENDS,
    COMPILES,
    COMPONENTS,
    FIELDS,
    OFFLOADS,
    QUANTIZATIONS,
    STEP_CACHES,
)
from runtime.core.request_fields import AUTO
from runtime.core.units import memory_size
from runtime.engines.builders import builders_of
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.parallelism import usable_gpus
from runtime.planner.vae_precision import PSNR
from runtime.ui import fields
from runtime.ui.plan_summary import Chip, Memory, Outlook, Step

TENSORRT = "tensorrt"
LABEL = "Acceleration"
_TITLES: Mapping[str, Mapping[str, str]] = {
    "Offload": OFFLOADS,
    "Quantization": QUANTIZATIONS,
    "Attention": ATTENTIONS,
    "Compile": COMPILES,
    "Step cache": STEP_CACHES,
    "Shift": {},
    "VAE precision": {},
}
TITLES = {
    "text_encoder": "Text encoder",
    "transformer": "Transformer",
    "transformer_2": "Low-noise transformer",
    "vae": "VAE decoder",
}
_FLAG = re.compile(
    r"(--offload|--quantization|--step-cache|--attention|--compile|--shift|--vae-precision|Offload(?= ')) '?([\w-]+)'?"
    r"|--backend (\w+)=(\w+)"
)
_GPUS = re.compile(r"--gpus (\d+)")
_OFFLOAD = re.compile(r"\b([Mm]odel|[Gg]roup|[Ss]equential) offload\b")


@dataclass
class Panel:
    """The parts of the panel that are no settings.

    Attributes:
        fold: the whole of it; its label tells the sum.
        rows: one per component.
        toggles: TensorRT on or off; each only mirrors the choice beside it.
        chips: what will happen, one per component.
        sum: memory, time, what is wrong, and the ways to hold the weights where memory is short.
        choose_way: what the script presses once one of those was pressed.
    """

    fold: gr.Accordion
    rows: dict[str, Any]
    toggles: dict[str, Any]
    chips: dict[str, Any]
    sum: gr.HTML
    choose_way: gr.Button

    @property
    def shown(self) -> list[Any]:
        """What an outlook is shown in, in the order of `show`."""
        return [self.fold, *self.chips.values(), self.sum]


def panel(spec: ModelSpec, machine: Machine, backends: Mapping[str, str]) -> tuple[Panel, dict[str, Any]]:
    """Make the panel; return it, and its settings by their names in the form.

    Args:
        backends: what is chosen at first, by component.
    """
    values = model_values(spec)
    absent = tensorrt_problem(machine)
    settings: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    toggles: dict[str, Any] = {}
    chips: dict[str, Any] = {}
    with gr.Accordion(LABEL, open=False, elem_id="acceleration", elem_classes="fold") as fold:
        for name in COMPONENTS:
            chosen = backends.get(name, AUTO)
            with gr.Row(elem_classes="part", elem_id=f"part-{name}", **values[f"row_{name}"]) as rows[name]:
                settings[f"backend_{name}"] = gr.Dropdown(
                    choices=[(title, value) for value, title in BACKENDS.items()],
                    value=chosen,
                    filterable=False,
                    elem_id=f"field-backend_{name}",
                    **values[f"backend_{name}"],
                )
                toggles[name] = gr.Checkbox(
                    label="TensorRT",
                    value=chosen == TENSORRT,
                    interactive=absent is None,
                    elem_id=f"tensorrt-{name}",
                    elem_classes="toggle",
                )
                chips[name] = gr.HTML(
                    chip_html(name, Chip("", "", "plain")), elem_classes="chip-line", apply_default_css=False
                )
        if absent is not None:
            gr.HTML(
                f'<p class="aside" id="no-tensorrt">TensorRT cannot be used here: {escape(absent)}.</p>',
                apply_default_css=False,
            )
        properties = {"gpus": _gpus(machine), "vae_precision": _vae_precision()}
        for name, declared in FIELDS.items():
            if declared.group == "acceleration" and name != "backends":
                settings[name] = fields.control(name, **properties.get(name, {}))
        total = gr.HTML(sum_html(Outlook("")), elem_id="outlook", apply_default_css=False)
        choose_way = gr.Button("Choose a way", visible="hidden", elem_id="choose-way")
    return Panel(fold, rows, toggles, chips, total, choose_way), settings


def _gpus(machine: Machine) -> dict[str, Any]:
    """Return the properties of the choice of GPUs."""
    count = len(usable_gpus(machine))
    titles = {"1": "One", AUTO: "All identical ones", **{str(n): str(n) for n in range(2, count + 1)}}
    return {"choices": [(title, value) for value, title in titles.items()], "value": "1", "visible": count > 1}


def _vae_precision() -> dict[str, Any]:
    """Return the help text with the measured difference of each precision."""
    measured = f"bfloat16 and float16 stay about {PSNR['bfloat16']} and {PSNR['float16']} dB from float32."
    return {"info": f"{FIELDS['vae_precision'].help} {measured}"}


def model_values(spec: ModelSpec) -> dict[str, dict[str, Any]]:
    """Return the properties of what follows the model: the rows, and what each part is called."""
    titles = TITLES | ({"transformer": "High-noise transformer"} if spec.experts > 1 else {})
    return {
        **{f"row_{name}": {"visible": name in spec.component_names} for name in COMPONENTS},
        **{f"backend_{name}": {"label": title} for name, title in titles.items()},
    }


def in_form_words(sentence: str) -> str:
    """Return a sentence with the panel's names where it has the command line's: flags, which a page has none of."""

    def told(flag: re.Match[str]) -> str:
        setting, value, component, backend = flag.groups()
        if setting:
            title = setting.strip("-").replace("-", " ").capitalize().replace("Vae", "VAE")
            titles = _TITLES[title]
            return f"{title} “{titles[value]}”" if value in titles else f"{title} {value}"
        chosen = BACKENDS.get(backend, backend)
        part = TITLES.get(component, component)
        return f"{chosen} for the {part if part.startswith('VAE') else part.lower()}"

    sentence = _GPUS.sub(r"“\1” for GPUs", sentence)
    return _OFFLOAD.sub(_offload_in_form_words, _FLAG.sub(told, sentence))


def _offload_in_form_words(found: re.Match[str]) -> str:
    offload = "Offload" if found[1][0].isupper() else "offload"
    return f"{offload} {OFFLOADS[found[1].lower()].lower()}"


def tensorrt_problem(machine: Machine) -> str | None:
    """Return why no TensorRT engine can be made or run here, `None` where one can."""
    problems = [builder.unavailable(machine) for builder in builders_of(TENSORRT)]
    return None if None in problems else next(problem[0] for problem in problems if problem is not None)


def show(outlook: Outlook) -> tuple[Any, ...]:
    """Return updates for `Panel.shown`."""
    none = Chip("", "", "plain")
    chips = (chip_html(name, outlook.chips.get(name, none)) for name in COMPONENTS)
    return (gr.update(label=f"{LABEL} · {outlook.line}"), *chips, sum_html(outlook))


def chip_html(component: str, badge: Chip) -> str:
    """Return a chip; its full reason is what describes the choice beside it to a screen reader."""
    reason = escape(in_form_words(badge.reason), quote=True)
    return (
        f'<p class="chip" data-kind="{badge.kind}" title="{reason}">{escape(in_form_words(badge.text)) or "&nbsp;"}</p>'
        f'<span class="unseen" id="why-{component}">{reason}</span>'
    )


def sum_html(outlook: Outlook) -> str:
    """Return memory, time, what is wrong, the one line that is read out when it changes, and what there is to add."""
    problem = in_form_words(f"{outlook.problem} {outlook.remedy}".strip())
    return (
        '<div class="outlook">'
        f'<p class="trouble"{"" if problem else " hidden"}>{escape(problem)}</p>'
        f"{_memory_html(outlook.memory)}"
        f'<p class="forecast"{" hidden" if problem else ""}><strong>Time for a video</strong> '
        f"<span>{escape(outlook.time)}</span></p>"
        f'<p class="unseen" role="status" aria-live="polite">{escape(problem or outlook.line)}</p>'
        f"{_ways_html(outlook.ways)}"
        f'<p class="aside"{"" if outlook.notes else " hidden"}>{escape(in_form_words(outlook.notes))}</p>'
        "</div>"
    )


def _ways_html(ways: Sequence[Step]) -> str:
    automatic = (
        f'<button type="button" class="button" data-offload="{AUTO}" data-quantization="{AUTO}">'
        "Choose automatically</button>"
    )
    some = any(way.offered for way in ways)
    title = "Memory is short for the fastest way. Choose another:" if some else "Memory is short for every way:"
    return (
        f'<div class="ways" role="group" aria-labelledby="ways-title"{"" if ways else " hidden"}>'
        f'<p id="ways-title"><strong>{title}</strong></p>'
        f"<ol>{''.join(map(_way_html, ways))}</ol>{automatic}</div>"
    )


def _way_html(way: Step) -> str:
    """Return a way as a button that sets offload and quantization; one that cannot be has its reason instead."""
    verdict = escape(in_form_words(way.verdict))
    return (
        f'<li><button type="button" class="way" aria-pressed="{"true" if way.taken else "false"}" '
        f'data-offload="{way.offload}" data-quantization="{way.quantization}"{"" if way.offered else " disabled"}>'
        f"<span>{escape(way.title)}</span> <small>{escape(way.takes)} · <b>{verdict}</b></small>"
        "</button></li>"
    )


def _memory_html(memory: Memory | None) -> str:
    where = memory.where if memory else "memory"
    sizes = (memory.weights, memory.working, max(memory.free - memory.weights - memory.working, 0)) if memory else ()
    whole = max(sum(sizes), 1)
    names = ("weights", "working", "free")
    titles = ("Weights", "Working set", "Left free")
    shares = [100 * size / whole for size in sizes] or [0.0, 0.0, 0.0]
    told = [memory_size(size) for size in sizes] or ["", "", ""]
    spoken = ", ".join(f"{title.lower()} {size}" for title, size in zip(titles, told, strict=True))
    bar = "".join(
        f'<span class="{name}" style="width:{share:.1f}%"></span>' for name, share in zip(names, shares, strict=True)
    )
    key = "".join(
        f'<li><i class="{name}"></i>{title} <b>{size}</b></li>'
        for name, title, size in zip(names, titles, told, strict=True)
    )
    return (
        f'<div class="memory"{"" if memory else " hidden"}><p><strong>{where[:1].upper()}{where[1:]}</strong></p>'
        f'<div class="meter" role="img" aria-label="{escape(f"{where}: {spoken}", quote=True)}">{bar}</div>'
        f"<ul>{key}</ul></div>"
    )
