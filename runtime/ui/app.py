"""Starts and stops the web app: workers, downloads, pages, the share link, the browser."""

import contextlib
import logging
import os
import webbrowser
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import gradio as gr

from runtime.core.foreign_variables import use_no_proxy_for_this_machine
from runtime.core.settings import LOOPBACK, Settings
from runtime.machine.probe import has_screen
from runtime.queue.model_tasks import ModelTasks
from runtime.server import job_files
from runtime.server.api_keys import ApiKeys
from runtime.server.serve import (
    check_address,
    check_ray,
    makes_videos,
    open_queue,
    port_taken,
    print_line,
    start_head,
    until_stopped,
)
from runtime.server.video_api import VideoApi
from runtime.ui import server
from runtime.ui.page import build
from runtime.ui.sharing import Sharing

if TYPE_CHECKING:  # imports ray
    from runtime.server.cluster.head import ClusterHead

__all__ = ["build", "launch", "serve"]

_LOGIN_MESSAGE = "Enter the username and password that Tandem was started with (--auth)."

logger = logging.getLogger(__name__)


def launch(settings: Settings, *, cluster: bool = False) -> None:
    """Serve the web app until Ctrl-C or a request to end.

    Args:
        cluster: whether other machines may join and make its videos.

    Raises:
        MachineError: for a host or port that cannot be listened on, or if Ray is missing or does not start.
        ModelError: if the settings' model cannot be used.
        OutputError: if nothing can be written to the folder for videos.
        SettingsError: if the file of the API keys cannot be read.
    """

    def started(url: str) -> None:
        print_line(f"Tandem is at {url} - Ctrl-C stops it.")
        if settings.browser and has_screen():
            # BROWSER may name one that does not start.
            with contextlib.suppress(OSError, ValueError, webbrowser.Error):
                webbrowser.open(url)

    until_stopped(serve(settings, print_line, cluster=cluster), started)


@contextlib.contextmanager
def serve(settings: Settings, notify: Callable[[str], None] = logger.info, *, cluster: bool = False) -> Iterator[str]:
    """Serve the web app within a `with` block; yields its address. Raises as `launch`.

    Args:
        notify: called with each line on the state of the share link.
        cluster: see `launch`.
    """
    if cluster:
        check_ray()
    check_address(settings.host, settings.port)
    _prepare_environment(settings)
    worker, engines = open_queue(settings, cluster=cluster)
    keys = ApiKeys(settings.cache_dir)
    model_tasks = ModelTasks(settings)
    sharing: Sharing | None = None
    page: gr.Blocks | None = None
    head: ClusterHead | None = None
    try:
        if cluster:
            head = start_head(worker, settings, engines)
        # Without this, Gradio copies each video whose path it sends to a program.
        gr.set_static_paths([settings.outputs_dir])
        sharing = Sharing(worker, settings, notify) if settings.share else None
        page, submissions, panel_routes = build(worker, engines, settings, sharing, model_tasks, head)
        names = LOOPBACK if settings.host in LOOPBACK else None
        keys.keys()  # raises if they cannot be read
        try:
            site = server.Site(
                page=page,
                names=lambda: names,
                submissions=submissions,
                auth=settings.auth,
                auth_message=_LOGIN_MESSAGE,
                routes=[*job_files.routes(worker, settings), *panel_routes],
                api=VideoApi(worker, settings, keys, head).app(),
            )
            url = server.start(site, settings.host, settings.port)
        except OSError as error:
            raise port_taken(settings.port) from error
        if sharing is not None:
            sharing.start()
        worker.start_workers(settings.log_file, videos=makes_videos(head, engines))
        yield url
    finally:
        with contextlib.ExitStack() as closing:
            closing.callback(worker.store.close)
            if page is not None:
                closing.callback(server.stop, page)
            # Before the page, so that the page still shows that its job was cancelled.
            closing.callback(worker.close)
            closing.callback(model_tasks.close)
            if head is not None:
                closing.callback(head.close)
            if sharing is not None:
                closing.callback(sharing.end)


def _prepare_environment(settings: Settings) -> None:
    """Set environment variables: Gradio's folders in the cache, no proxy for this machine."""
    scratch = settings.cache_dir / "gradio"
    os.environ["GRADIO_TEMP_DIR"] = str(scratch)
    os.environ["GRADIO_EXAMPLES_CACHE"] = str(scratch / "examples")
    use_no_proxy_for_this_machine()
