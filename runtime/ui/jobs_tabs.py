"""The tabs Queue and History: their parts, and how they are connected. What they do is in `desk`."""

from collections.abc import Sequence
from typing import Any

import gradio as gr

from runtime.ui import history_view, queue_view
from runtime.ui.jobs_controller import PARTS, JobsController


def make() -> list[gr.HTML]:
    """Make both tabs; return what a view goes to, in the order of `PARTS`."""
    parts: dict[str, gr.HTML] = {}

    def part(name: str) -> None:
        parts[name] = gr.HTML("", elem_id=f"jobs-{name}", apply_default_css=False)

    with gr.Tab("Queue", id="queue", elem_id="tab-queue"):
        part("line")
        gr.HTML(queue_view.add_form(), elem_id="jobs-several", apply_default_css=False)
        part("ended")
    with gr.Tab("History", id="history", elem_id="tab-history"):
        gr.HTML(history_view.controls(), elem_id="jobs-finder", apply_default_css=False)
        for name in ("compare", "numbers", "settings", "detail", "gallery", "room"):
            part(name)
    return [parts[name] for name in PARTS]


def connect(desk: JobsController, parts: Sequence[gr.HTML], controls: Sequence[Any], served: dict[str, Any]) -> None:
    """Let the script's questions reach the desk, and its answers the page.

    Args:
        controls: of the form.
        served: how the page's events are served.
    """
    asked = gr.Textbox("", visible="hidden", elem_id="jobs-asked", label="What a button of the queue says")
    says = gr.Textbox("", visible="hidden", elem_id="jobs-says", label="What came of it")
    gr.Button("Act", visible="hidden", elem_id="jobs-act").click(
        desk.act,
        [asked, *controls],
        [*parts, says],
        js="(_, ...values) => [window.tandem.jobs.message(), ...values]",
        preprocess=False,
        trigger_mode="multiple",
        **served,
    )
    says.change(
        None,
        says,
        js="(answer) => window.tandem.jobs.hear(answer)",
        show_progress="hidden",
        api_visibility="private",
        queue=False,
    )
