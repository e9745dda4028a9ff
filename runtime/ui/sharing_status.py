"""The bar at the top of the owner's page: the share link, its visitors, and buttons to stop it."""

from typing import Any

import gradio as gr

from runtime.ui.make_tab import SERVED
from runtime.ui.sharing import Sharing
from runtime.ui.templating import render

_LOOK_SECONDS = 3.0

Updates = tuple[Any, ...]


def make(page: gr.Blocks, sharing: Sharing) -> None:
    """Add the bar and connect it."""
    with gr.Row(elem_id="sharing"):
        line = gr.HTML(status_html(sharing), elem_id="sharing-told", apply_default_css=False)
        stop_videos = gr.Button("Stop visitors' videos", elem_id="stop-visitors", min_width=160)
        end = gr.Button("Stop sharing", elem_id="stop-sharing", min_width=140)
    shown = gr.State("")
    outputs = [line, stop_videos, end, shown]

    def look(before: Any) -> Updates:
        """Show changes."""
        now = status_html(sharing)
        if now == before:
            return (gr.skip(),) * 4
        open_ = sharing.state in {"opening", "open"}
        return now, gr.update(visible=open_), gr.update(visible=open_), now

    def stop_all(before: Any) -> Updates:
        """Cancel all videos of visitors."""
        sharing.visitors.stop_videos()
        return look(before)

    def end_all(before: Any) -> Updates:
        """Close the link."""
        sharing.end()
        return look(before)

    gr.Timer(_LOOK_SECONDS).tick(look, shown, outputs, trigger_mode="once", **SERVED)
    page.load(look, shown, outputs, **SERVED)
    stop_videos.click(stop_all, shown, outputs, **SERVED)
    end.click(end_all, shown, outputs, **SERVED)


def status_html(sharing: Sharing) -> str:
    """Return the state of the link, and who uses it."""
    return render(
        "sharing_status.html", sharing=sharing, visitors=sharing.visitors.present(), videos=sharing.visitors.open_jobs()
    )
