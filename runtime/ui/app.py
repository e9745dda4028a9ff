"""Starts and stops the web app: the worker, the server, the browser."""

import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Iterator
from types import FrameType

import gradio as gr
from starlette.middleware import Middleware

from runtime.core.errors import MachineError
from runtime.core.settings import Settings
from runtime.engines.service import EngineService
from runtime.jobs.history import HistoryFile
from runtime.jobs.worker import Worker
from runtime.manager.machine import probe
from runtime.ui import theme
from runtime.ui.document import Document
from runtime.ui.gate import Gate
from runtime.ui.page import build

__all__ = ["build", "launch", "serve"]

# Nobody uploads; the gate shuts the way in, and this holds should it ever open.
_MAX_UPLOAD_BYTES = 1024
_GOODBYE_SECONDS = 1

logger = logging.getLogger(__name__)


def launch(settings: Settings) -> None:
    """Serve the web app until Ctrl-C or a request to end.

    Raises:
        MachineError: for a host or port that cannot be listened on.
        ModelError: if the settings' model cannot be used.
    """
    stop = threading.Event()

    def ask_to_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with serve(settings) as url:
            sys.stderr.write(f"Tandem is at {url} - Ctrl-C stops it.\n")
            sys.stderr.flush()
            if settings.browser and _has_screen():
                webbrowser.open(url)
            # In slices, because on Windows a wait without end cannot be interrupted.
            while not stop.wait(0.5):
                pass
            # From here on another Ctrl-C ends at once, whatever still runs.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            sys.stderr.write("Stopping.\n")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def serve(settings: Settings) -> Iterator[str]:
    """Serve while entered; yields the address.

    Raises:
        MachineError: for a host or port that cannot be listened on.
        ModelError: if the settings' model cannot be used.
    """
    _check_address(settings.host, settings.port)
    _prepare_environment(settings)
    engines = EngineService.from_settings(settings, probe())
    worker = Worker(
        settings.weights_dir, settings.outputs_dir, engines, HistoryFile(settings.cache_dir, engines.machine)
    )
    page: gr.Blocks | None = None
    try:
        page = build(worker, engines, settings)
        settings.outputs_dir.mkdir(parents=True, exist_ok=True)
        try:
            _, url, _ = page.launch(
                server_name=f"[{settings.host}]" if ":" in settings.host else settings.host,
                server_port=settings.port,
                auth=settings.auth,
                auth_message="Tandem asks for the user and password it was started with." if settings.auth else None,
                prevent_thread_lock=True,
                inbrowser=False,
                share=False,
                quiet=True,
                footer_links=[],
                run_history=False,
                enable_monitoring=False,
                ssr_mode=False,
                pwa=False,
                mcp_server=False,
                num_workers=0,
                allowed_paths=[str(settings.outputs_dir)],
                max_file_size=_MAX_UPLOAD_BYTES,
                favicon_path=theme.ICON,
                theme=theme.theme(),
                app_kwargs={
                    "middleware": [Middleware(Gate, host=settings.host), Middleware(Document, head=theme.head())]
                },
            )
        except OSError as error:
            raise _port_taken(settings.port) from error
        yield url
    finally:
        # The worker first: pages still see that their job was cancelled.
        worker.close()
        if page is not None:
            _close(page)


def _close(page: gr.Blocks) -> None:
    """Stop the server without waiting for pages, which keep a connection open for as long as they are shown."""
    if page.is_running:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        page.server.config.timeout_graceful_shutdown = _GOODBYE_SECONDS
        page.close(verbose=False)


def _prepare_environment(settings: Settings) -> None:
    """Keep gradio's files in the cache folder, and talk to this machine directly even behind a proxy."""
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
        raise MachineError(
            f"There is no host {host!r}.", "Listen on 127.0.0.1, or on an address of this machine."
        ) from error
    with socket.socket(family, kind, protocol) as probe:
        # Elsewhere this would take a port that another program listens on; on Unix it only skips its last wait.
        if os.name == "posix":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise MachineError(
                    f"{host} is not an address of this machine.", "Listen on 127.0.0.1, or on one that is."
                ) from error
            if error.errno == errno.EACCES:
                raise MachineError(
                    f"Port {port} may not be listened on here.", "Choose one above 1023: --port 7861."
                ) from error
            raise _port_taken(port) from error


def _port_taken(port: int) -> MachineError:
    other = port + 1 if port < 65_535 else port - 1  # noqa: PLR2004 - the last port
    return MachineError(
        f"Port {port} is in use by another program.", f"Stop the other program, or choose another port: --port {other}."
    )


def _has_screen() -> bool:
    """Whether a browser would open in a window; without one, webbrowser may start a browser inside the terminal."""
    return sys.platform in {"win32", "darwin"} or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
