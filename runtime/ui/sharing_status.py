"""What the person who shares sees of it, on top of their page: the link, who is there, and how to stop."""

from html import escape
from typing import Any

import gradio as gr

from runtime.ui.make_tab import SERVED
from runtime.ui.sharing import Sharing

_LOOK_SECONDS = 3.0

Updates = tuple[Any, ...]


def make(page: gr.Blocks, sharing: Sharing) -> None:
    """Make the bar, and connect it."""
    with gr.Row(elem_id="sharing"):
        line = gr.HTML(told(sharing), elem_id="sharing-told", apply_default_css=False)
        stop_videos = gr.Button("Stop visitors' videos", elem_id="stop-visitors", min_width=160)
        end = gr.Button("Stop sharing", elem_id="stop-sharing", min_width=140)
    shown = gr.State("")
    outputs = [line, stop_videos, end, shown]

    def look(before: Any) -> Updates:
        """Show what has changed."""
        now = told(sharing)
        if now == before:
            return (gr.skip(),) * 4
        open_ = sharing.state in {"opening", "open"}
        return now, gr.update(visible=open_), gr.update(visible=open_), now

    def stop_all(before: Any) -> Updates:
        """Cancel every video of a visitor."""
        sharing.visitors.stop_videos()
        return look(before)

    def end_all(before: Any) -> Updates:
        """Take the link back."""
        sharing.end()
        return look(before)

    gr.Timer(_LOOK_SECONDS).tick(look, shown, outputs, trigger_mode="once", **SERVED)
    page.load(look, shown, outputs, **SERVED)
    stop_videos.click(stop_all, shown, outputs, **SERVED)
    end.click(end_all, shown, outputs, **SERVED)


def told(sharing: Sharing) -> str:
    """Return how the sharing is, as HTML."""
    match sharing.state:
        case "open":
            url = escape(sharing.url, quote=True)
            password = (
                f"password <code>{escape(sharing.password)}</code>" if sharing.made_up else "the password of --auth"
            )
            said = (
                f'Shared at <a href="{url}" target="_blank" rel="noopener noreferrer">{url}</a>, '
                f"user <code>{escape(sharing.user)}</code>, {password}. "
                f"<span>{_who(sharing.visitors.present(), sharing.visitors.open_jobs())}</span>"
            )
        case "opening":
            said = "The share link is being made."
        case "failed":
            said = escape(sharing.problem)
        case _:
            said = "Sharing has ended. Start Tandem again with --share for a new link."
    return f'<p data-state="{sharing.state}" role="status">{said}</p>'


def _who(visitors: int, videos: int) -> str:
    here = {0: "Nobody is here", 1: "One visitor is here"}.get(visitors, f"{visitors} visitors are here")
    waiting = {0: "", 1: "; one of their videos waits or runs"}.get(videos, f"; {videos} of their videos wait or run")
    return f"{here}{waiting}."
