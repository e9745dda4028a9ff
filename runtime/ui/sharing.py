"""The share link: the visitors' page, the tunnel to it, and the bar that shows and ends both on the owner's page."""

import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any, Literal

import gradio as gr

from runtime.core.errors import MachineError, ModelError
from runtime.core.settings import Settings
from runtime.models.catalogue import folders, offered, transformer_files
from runtime.queue.job_queue import JobQueue
from runtime.server.tunnel import Tunnel, open_tunnel
from runtime.server.visitors import stop_videos, visitor_jobs, visitors_models
from runtime.ui.form import SERVED
from runtime.ui.formatting import render
from runtime.ui.visitor_process import VisitorProcess, VisitorsConfig

State = Literal["opening", "open", "failed", "ended"]

_USER = "visitor"
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_GROUPS, _SYLLABLES = 4, 3
_REFRESH_SECONDS = 3.0

logger = logging.getLogger(__name__)


class Sharing:
    """One share link. Thread-safe.

    Attributes:
        url: the link; empty unless it is open.
        problem: why the link failed, and the remedy.
        user, password: the visitors' login.
        generated: whether the password was generated here.

    Args:
        notify: called with each line on the state of the link.

    Raises:
        ModelError: if there is no model that visitors may use, or the model of the settings cannot be used.
    """

    def __init__(self, worker: JobQueue, settings: Settings, notify: Callable[[str], None]) -> None:
        self.state: State = "opening"
        self.url = ""
        self.problem = ""
        self.generated = settings.auth is None
        self.user, self.password = settings.auth or (_USER, make_password())
        self._worker = worker
        self._settings = settings
        self._notify = notify
        self._tunnel: Tunnel | None = None
        self._lock = threading.Lock()
        places = folders(settings.weights_dir) | transformer_files(settings.weights_dir)
        models = visitors_models(offered(settings.model, settings.weights_dir), places)
        if not models:
            raise ModelError("server.no_visitor_model")
        config = VisitorsConfig(
            app=worker.worker_configs(settings.log_file)[0],
            settings=settings,
            models=models,
            auth=(self.user, self.password),
        )
        self._page = VisitorProcess(config)

    def start(self) -> None:
        """Serve the visitors' page in a process of its own, and open the link in a thread.

        Raises:
            OSError: if no port is free.
        """
        self._page.start()
        threading.Thread(target=self._run_tunnel, name="sharing", daemon=True).start()

    def login_link(self) -> str:
        """Return the link with the generated login, which the visitors' page fills in; browsers do not send it."""
        return f"{self.url}#login={self.user}:{self.password}"

    def visitors(self) -> int:
        """Return the number of visitors who have a page open."""
        return self._page.visitors

    def videos(self) -> int:
        """Return the number of visitors' videos that are queued or running."""
        return len(visitor_jobs(self._worker))

    def stop_videos(self) -> None:
        """Cancel all queued and running videos of visitors."""
        stop_videos(self._worker)

    def end(self) -> None:
        """Close the link and cancel the visitors' jobs."""
        self._close("ended", "")

    def _run_tunnel(self) -> None:
        try:
            self._page.wait()
            tunnel = open_tunnel(self._page.port, self._settings.cache_dir / "gradio")
        except MachineError as error:
            self._fail(error)
            return
        except Exception as error:  # an internal error: one line, the traceback in the log
            logger.exception("The share link failed")
            self._fail(MachineError("server.link_internal_error", error=repr(error)))
            return
        with self._lock:
            if self.state == "opening":
                self._tunnel, self.url, self.state = tunnel, tunnel.url, "open"
        if self.state != "open":
            tunnel.close()
            return
        self._page.answer_to(tunnel.url)
        password = f"password {self.password}" if self.generated else "with the password of --auth"
        self._notify(f"Shared at {tunnel.url} - user {self.user}, {password}")
        logger.info("A share link is open")
        tunnel.wait()
        self._fail(MachineError("server.link_ended"))

    def _fail(self, error: MachineError) -> None:
        if self._close("failed", f"{error.what} {error.remedy}"):
            self._notify(error.what)
            self._notify(error.remedy)

    def _close(self, state: State, problem: str) -> bool:
        """Close tunnel, page and visitors' jobs; return `False` if they were closed before."""
        with self._lock:
            if self.state in {"failed", "ended"}:
                return False
            self.state, self.problem, self.url = state, problem, ""
            tunnel, self._tunnel = self._tunnel, None
        if tunnel is not None:
            tunnel.close()
        # First, so that no further video is submitted.
        self._page.close()
        self.stop_videos()
        logger.info("Sharing has ended: %s", state)
        return True


def make_password() -> str:
    """Return a password of 12 random syllables, 73 bits, such as "tokaru-melisu-badofi-ganepo"."""
    return "-".join(
        "".join(secrets.choice(_CONSONANTS) + secrets.choice(_VOWELS) for _ in range(_SYLLABLES))
        for _ in range(_GROUPS)
    )


def add_sharing_bar(page: gr.Blocks, sharing: Sharing) -> None:
    """Add the bar at the top of the owner's page: the link, its visitors, and buttons to stop both."""
    with gr.Row(elem_id="sharing"):
        line = gr.HTML(status_html(sharing), elem_id="sharing-status", apply_default_css=False)
        stop_videos = gr.Button("Stop visitors' videos", elem_id="stop-visitors", min_width=160)
        end = gr.Button("Stop sharing", elem_id="stop-sharing", min_width=140)
    outputs = [line, stop_videos, end]

    def refresh(before: Any) -> tuple[Any, ...]:
        now = status_html(sharing)
        if now == before:
            return (gr.skip(),) * 3
        open_ = sharing.state in {"opening", "open"}
        return now, gr.update(visible=open_), gr.update(visible=open_)

    def stop_all(before: Any) -> tuple[Any, ...]:
        sharing.stop_videos()
        return refresh(before)

    def end_all(before: Any) -> tuple[Any, ...]:
        sharing.end()
        return refresh(before)

    gr.Timer(_REFRESH_SECONDS).tick(refresh, line, outputs, trigger_mode="once", **SERVED)
    page.load(refresh, line, outputs, **SERVED)
    stop_videos.click(stop_all, line, outputs, **SERVED)
    end.click(end_all, line, outputs, **SERVED)


def status_html(sharing: Sharing) -> str:
    """Return the state of the link and the number of its visitors."""
    return render("sharing_status.html", sharing=sharing, visitors=sharing.visitors(), videos=sharing.videos())
