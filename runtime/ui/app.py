"""Starts and stops the web app: workers, downloads, pages, the share link, the browser."""

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator
from types import FrameType

import gradio as gr

from runtime.core.errors import MachineError
from runtime.core.facts import render
from runtime.core.settings import Settings
from runtime.engines.service import EngineService
from runtime.machine.probe import has_screen, probe
from runtime.pipeline.files import make_folder
from runtime.pipeline.history_file import HistoryFile
from runtime.queue.job_queue import JobQueue
from runtime.queue.model_tasks import ModelTasks
from runtime.queue.store import open_store
from runtime.server import job_files
from runtime.server.security import LOOPBACK
from runtime.server.visitors import cancel_orphaned
from runtime.ui import server
from runtime.ui.page import build
from runtime.ui.sharing import Sharing

__all__ = ["build", "launch", "serve"]

_LOGIN_MESSAGE = "Enter the user and password that Tandem was started with (--auth)."

logger = logging.getLogger(__name__)


def launch(settings: Settings) -> None:
    """Serve the web app until Ctrl-C or a request to end.

    Raises:
        MachineError: for a host or port that cannot be listened on.
        ModelError: if the settings' model cannot be used.
        OutputError: if nothing can be written to the folder for videos.
    """
    stop = threading.Event()

    def request_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with serve(settings, _print) as url:
            _print(f"Tandem is at {url} - Ctrl-C stops it.")
            if settings.browser and has_screen():
                webbrowser.open(url)
            # On Windows a wait without a timeout cannot be interrupted.
            while not stop.wait(0.5):
                pass
            # A second Ctrl-C ends the process at once.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _print("Stopping.")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def serve(settings: Settings, notify: Callable[[str], None] = logger.info) -> Iterator[str]:
    """Serve the web app within a `with` block; yields its address.

    Args:
        notify: called with each line on the state of the share link.

    Raises:
        MachineError: for a host or port that cannot be listened on.
        ModelError: if the settings' model cannot be used.
        OutputError: if nothing can be written to the folder for videos.
    """
    _check_address(settings.host, settings.port)
    make_folder(settings.outputs_dir)
    _prepare_environment(settings)
    engines = EngineService.from_settings(settings, probe())
    store = open_store(settings.cache_dir)
    if store.notice is not None:
        sys.stderr.write(f"Note: {store.notice}\n")
    if store.problem is not None:
        sys.stderr.write(f"Note: Jobs are not stored. {' '.join(render(store.problem))}\n")
    cancel_orphaned(store)
    history = HistoryFile(settings.cache_dir, engines.machine)
    worker = JobQueue(settings.weights_dir, settings.outputs_dir, engines, history, store)
    waiting = sum(not one.held for one in store.queue())
    if waiting:
        sys.stderr.write(f"Queued jobs of an earlier start: {waiting}. They run now.\n")
    model_tasks = ModelTasks(settings)
    sharing: Sharing | None = None
    page: gr.Blocks | None = None
    try:
        # Without this, Gradio copies each video whose path it sends to a program.
        gr.set_static_paths([settings.outputs_dir])
        sharing = Sharing(worker, settings, notify) if settings.share else None
        page, submissions, panel_routes = build(worker, engines, settings, sharing, model_tasks)
        names = LOOPBACK if settings.host in LOOPBACK else None
        try:
            url = server.start(
                page,
                settings.host,
                settings.port,
                lambda: names,
                submissions,
                settings.auth,
                _LOGIN_MESSAGE,
                routes=[*job_files.routes(worker, settings), *panel_routes],
            )
        except OSError as error:
            raise _port_taken(settings.port) from error
        if sharing is not None:
            sharing.start()
        worker.start_workers(settings.log_file)
        yield url
    finally:
        with contextlib.ExitStack() as closing:
            closing.callback(store.close)
            if page is not None:
                closing.callback(server.stop, page)
            # Before the page, so that the page still shows that its job was cancelled.
            closing.callback(worker.close)
            closing.callback(model_tasks.close)
            if sharing is not None:
                closing.callback(sharing.end)


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _prepare_environment(settings: Settings) -> None:
    """Set environment variables: Gradio's folders in the cache, no proxy for this machine, offline mode."""
    if settings.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    scratch = settings.cache_dir / "gradio"
    os.environ["GRADIO_TEMP_DIR"] = str(scratch)
    os.environ["GRADIO_EXAMPLES_CACHE"] = str(scratch / "examples")
    for name in ("NO_PROXY", "no_proxy"):
        known = os.environ.get(name, "")
        os.environ[name] = ",".join(filter(None, (known, "localhost,127.0.0.1,::1")))


def _check_address(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise MachineError("ui.host_unknown", host=host) from error
    with socket.socket(family, kind, protocol) as probe:
        # On Windows this option would take a port that another program listens on; on Unix it only skips TIME_WAIT.
        if os.name == "posix":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise MachineError("ui.host_not_local", host=host) from error
            if error.errno == errno.EACCES:
                raise MachineError("ui.port_forbidden", port=port) from error
            raise _port_taken(port) from error


def _port_taken(port: int) -> MachineError:
    other = port + 1 if port < 65_535 else port - 1  # noqa: PLR2004 - the last port
    return MachineError("ui.port_taken", port=port, other=other)
