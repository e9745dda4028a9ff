"""The process of the visitors' page: whatever visitors do to it, the owner's page and the jobs continue.

The owner's process listens on the port, passes the socket on, and starts the process again if it ends. The process ends
with the owner's, even if that is killed. Both use the same job store; a pipe carries the link's address to the process,
and the number of visitors and their logins back: these stay valid when the process is started again.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from runtime.core import log
from runtime.core.errors import MachineError
from runtime.core.processes import be_killed_first, describe_exit, use_no_semaphores
from runtime.core.settings import LOOPBACK, Settings
from runtime.models.spec import ModelSpec
from runtime.queue.job_queue import JobQueue
from runtime.queue.store import open_when_usable
from runtime.queue.worker import WorkerConfig
from runtime.server import image_uploads
from runtime.server.connections import listen
from runtime.server.gradio_requests import VIDEO
from runtime.server.job_files import video_response
from runtime.server.visitors import Visitors
from runtime.ui import exports, server, visitor_page
from runtime.upstream import gradio as private

_HOST = "127.0.0.1"
_LOGIN_MESSAGE = "Someone shares Tandem with you. Enter the username and password that came with the link."
_REPORT_SECONDS = 0.5
_CLOSE_SECONDS = 5.0
# The newest ones are kept: each is sent to the owner's process.
_MOST_LOGINS = 2_000
# The delay before a restart doubles each time that the process ends sooner after its start than this.
_SHORT_LIFE_SECONDS = 10.0
_MOST_DELAY_SECONDS = 30.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VisitorsConfig:
    """Configuration of the visitors' page, sent to its process by pickle.

    Attributes:
        app: a configuration of the app's workers: the job store and what plans need.
        models: the models that visitors may use, by name.
        auth: user and password.
    """

    app: WorkerConfig
    settings: Settings
    models: Mapping[str, ModelSpec]
    auth: tuple[str, str]


class VisitorProcess:
    """The process, from `start` to `close`. Thread-safe.

    Attributes:
        port: of this machine's loopback address.
        visitors: the number of visitors who have a page open.
    """

    def __init__(self, config: VisitorsConfig) -> None:
        self.port = 0
        self.visitors = 0
        self._config = config
        self._sockets: list[socket.socket] = []
        self._link = ""
        self._logins: private.Logins | None = None
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._served = False
        self._settled = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="visitors", daemon=True)

    def start(self) -> None:
        """Listen, and start the process; returns at once.

        Raises:
            OSError: if no port is free.
        """
        self._sockets = listen(_HOST, 0)
        self.port = int(self._sockets[0].getsockname()[1])
        self._thread.start()

    def wait(self) -> None:
        """Wait until the page is served.

        Raises:
            MachineError: if the process ends before.
        """
        self._settled.wait()
        if not self._served:
            raise MachineError("server.link_internal_error", error="the visitors' page does not start")

    def answer_to(self, link: str) -> None:
        """Have the page answer to the address of the link too."""
        with self._lock:
            self._link = link
            self._send(link)

    def close(self) -> None:
        """End the process."""
        self._closing.set()
        with self._lock:
            process = self._process
            self._send(None)
        if process is not None:
            process.join(_CLOSE_SECONDS)
            if process.exitcode is None:
                process.kill()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)
        for listener in self._sockets:
            listener.close()

    def _send(self, message: str | None) -> None:
        if self._connection is not None:
            with suppress(OSError):  # it has ended; the next process gets the link at its start
                self._connection.send(message)

    def _supervise(self) -> None:
        delay = 0.0
        while not self._closing.is_set():
            started = time.monotonic()
            how = self._run()
            self.visitors = 0
            self._settled.set()
            if self._closing.is_set():
                return
            logger.error("The visitors' page ended: %s", how)
            short = time.monotonic() - started < _SHORT_LIFE_SECONDS
            delay = min(max(2 * delay, 0.5), _MOST_DELAY_SECONDS) if short else 0.0
            self._closing.wait(delay)

    def _run(self) -> str:
        """Run the process until it ends; return how it ended."""
        context: Any = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=main, args=(self._config, self._sockets, theirs, self._logins), name="visitors", daemon=False
        )
        with ours:
            with self._lock:
                if self._closing.is_set():
                    theirs.close()
                    return ""
                try:
                    process.start()
                except OSError as error:
                    return str(error.strerror or error)
                finally:
                    theirs.close()
                self._process, self._connection = process, ours
                if self._link:
                    self._send(self._link)
            try:
                while True:
                    self.visitors, self._logins = ours.recv()
                    self._served = True
                    self._settled.set()
            except (EOFError, OSError):
                process.join()
            with self._lock:
                self._process = self._connection = None
        return describe_exit(process.exitcode or 0)


def main(
    config: VisitorsConfig, sockets: list[socket.socket], owner: Connection, logins: private.Logins | None
) -> None:
    """Serve the visitors' page in this process until the owner's process sends `None` or ends.

    Args:
        logins: of an earlier process.
    """
    # Ctrl-C reaches all processes of a terminal; the owner's decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    be_killed_first()
    use_no_semaphores()
    app = config.app
    if app.log_file is not None:
        log.start(app.log_file)
    store = open_when_usable(app.store_path, app.store_problem)
    worker = JobQueue(app.weights_dir, config.settings.outputs_dir, app.engines, app.history, store, app=app.app)
    visitors = Visitors(worker, config.settings, config.models)
    closing = threading.Event()
    threading.Thread(target=_obey, args=(owner, visitors, closing), name="owner", daemon=True).start()
    site = _site(config, worker, visitors)
    server.start(site, _HOST, int(sockets[0].getsockname()[1]), sockets, logins)
    logger.info("The visitors' page is served by process %d", os.getpid())
    reported = None
    while not closing.wait(_REPORT_SECONDS if reported is not None else 0):
        report = (visitors.present(), private.logins(site.page.app, _MOST_LOGINS))
        if report != reported:
            reported = report
            with suppress(OSError):  # the owner's process ends
                owner.send(report)
    server.stop(site.page)
    worker.close()
    logging.shutdown()
    # Handlers of requests may still run on threads.
    os._exit(0)


def _obey(owner: Connection, visitors: Visitors, closing: threading.Event) -> None:
    """Take the link's addresses from the owner's process until it sends `None`; end this process if it was killed."""
    with suppress(EOFError, OSError):
        while (link := owner.recv()) is not None:
            visitors.link = link
        closing.set()
        return
    os._exit(1)


def _site(config: VisitorsConfig, worker: JobQueue, visitors: Visitors) -> server.Site:
    """Return the visitors' page with what is served with it."""
    page, submissions, redact = visitor_page.build(worker, config.settings, dict(config.models), visitors)

    def names() -> frozenset[str]:
        """Return the host names of the page: this machine's, which the tunnel may send, and the link's."""
        host = urlsplit(visitors.link).hostname
        return LOOPBACK if host is None else LOOPBACK | {host}

    async def video(request: Request) -> Response:
        name, visitor = request.path_params["name"], request.user.display_name
        return video_response(await asyncio.to_thread(visitors.video, name, visitor), worker.sending, cached=False)

    uploads = image_uploads.routes(visitors.keep_image, redact)
    exported = exports.routes(lambda job_id, visitor: visitors.video(f"{job_id}.mp4", visitor), redact)
    return server.Site(
        page=page,
        names=names,
        submissions=submissions,
        auth=config.auth,
        auth_message=_LOGIN_MESSAGE,
        visitors=visitors,
        routes=[Route(f"{VIDEO}{{name}}", video), *uploads, *exported, Route("/robots.txt", _robots)],
    )


async def _robots(_request: Request) -> Response:
    return PlainTextResponse("User-agent: *\nDisallow: /\n")
