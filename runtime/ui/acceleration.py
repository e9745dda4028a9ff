"""The acceleration panel: its controls."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

from runtime.core.facts import Fact
from runtime.core.request import BACKENDS, COMPONENTS, FIELDS
from runtime.core.request_fields import AUTO
from runtime.engines.builders import builders_of
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.parallelism import usable_gpus
from runtime.planner.placement import VAE_PSNR as PSNR
from runtime.ui import fields
from runtime.ui.templating import render
from runtime.ui.words import COMPONENT_TITLES, page_text

TENSORRT = "tensorrt"
LABEL = "Acceleration"


@dataclass
class Panel:
    """The controls of the panel that are not settings.

    Attributes:
        rows: one per component.
        toggles: TensorRT on or off, one per component; each mirrors the choice of the backend.
        choose_strategy: pressed by the script when a strategy is chosen.
    """

    rows: dict[str, Any]
    toggles: dict[str, Any]
    choose_strategy: gr.Button


def panel(spec: ModelSpec, machine: Machine, backends: Mapping[str, str]) -> tuple[Panel, dict[str, Any]]:
    """Create the panel; return it and its settings by field.

    Args:
        backends: initial backends by component.
    """
    values = model_values(spec)
    absent = tensorrt_problem(machine)
    settings: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    toggles: dict[str, Any] = {}
    with gr.Accordion(LABEL, open=False, elem_id="acceleration", elem_classes="fold"):
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
                gr.HTML(render("plan_badge.html", component=name), elem_classes="badge-line", apply_default_css=False)
        if absent is not None:
            gr.HTML(
                f'<p class="aside" id="no-tensorrt">TensorRT is not available. {escape(page_text(absent).what)}</p>',
                apply_default_css=False,
            )
        properties = {"gpus": _gpus(machine), "vae_precision": _vae_precision()}
        for name, declared in FIELDS.items():
            if declared.group == "acceleration" and name != "backends":
                settings[name] = fields.control(name, **properties.get(name, {}))
        gr.HTML('<div data-panel="preview" data-part="summary"></div>', elem_id="plan-summary", apply_default_css=False)
        choose_strategy = gr.Button("Choose a strategy", visible="hidden", elem_id="choose-strategy")
    return Panel(rows, toggles, choose_strategy), settings


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
    """Return the properties that depend on the model: visible rows, and the components' titles."""
    titles = COMPONENT_TITLES | ({"transformer": "High-noise transformer"} if spec.experts > 1 else {})
    return {
        **{f"row_{name}": {"visible": name in spec.component_names} for name in COMPONENTS},
        **{f"backend_{name}": {"label": title} for name, title in titles.items()},
    }


def tensorrt_problem(machine: Machine) -> Fact | None:
    """Return why TensorRT engines cannot be built or run on this machine, `None` if they can."""
    problems = [builder.unavailable(machine) for builder in builders_of(TENSORRT)]
    return None if None in problems else problems[0]
