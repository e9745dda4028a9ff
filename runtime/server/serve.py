"""Runs the queue, its workers and the HTTP API without the web app, and what both have in common."""

import contextlib
import errno
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.core.environment import collect_garbage_as_usual, program
from runtime.core.errors import MachineError, SettingsError
from runtime.core.facts import render
from runtime.core.processes import raise_open_files, return_freed_memory, stop_on_signals
from runtime.core.settings import LOOPBACK, Settings
from runtime.engines.service import EngineService
from runtime.machine.probe import probe
from runtime.pipeline.files import make_folder
from runtime.pipeline.history_file import HistoryFile
from runtime.queue.done_command import DoneCommand
from runtime.queue.job_queue import JobQueue
from runtime.queue.storage import Retention
from runtime.queue.store import JobStore, open_store
from runtime.server.api_keys import OWNER_PREFIX, ApiKeys
from runtime.server.connections import PageServer, limits_for, listen
from runtime.server.video_api import MCP, VideoApi
from runtime.server.visitors import cancel_orphaned

if TYPE_CHECKING:  # imports ray
    from runtime.server.cluster.head import ClusterHead
    from runtime.server.mcp.transports import HttpTransport  # imports mcp

# A video of the API whose process was killed this often may be the cause.
_MOST_INTERRUPTIONS = 3

logger = logging.getLogger(__name__)


def launch(settings: Settings, *, cluster: bool = False, mcp: bool = False) -> str:
    """Serve the HTTP API until Ctrl-C or a request to end; return its address.

    Args:
        cluster: whether other machines may join and run its videos.
        mcp: whether it has an MCP server, too.

    Raises:
        MachineError: for a host or port that cannot be listened on.
        ModelError: if the settings' model cannot be used.
        OutputError: if nothing can be written to the folder for videos.
        SettingsError: if the host can be reached from other machines and there is no key, or the keys cannot be read.
    """
    addresses: list[str] = []

    def started(url: str) -> None:
        addresses.append(url)
        print_line(f"Tandem's API is at {url}v1, its documentation at {url}v1/docs - Ctrl-C stops it.")
        if mcp:
            print_line(f"Its MCP server is at {url.rstrip('/')}{MCP}")

    until_stopped(serve(settings, cluster=cluster, mcp=mcp), started)
    return addresses[0]


@contextlib.contextmanager
def serve(settings: Settings, *, cluster: bool = False, mcp: bool = False) -> Iterator[str]:
    """Serve the HTTP API within a `with` block; yields its address. Raises as `launch`."""
    if cluster:
        check_ray()
    if mcp:
        check_mcp()
    keys = ApiKeys(settings.cache_dir)
    if not keys.keys() and settings.host not in LOOPBACK:
        raise SettingsError("server.api_host_without_key", host=settings.host)
    check_address(settings.host, settings.port)
    return_freed_memory()
    collect_garbage_as_usual()
    worker, engines = open_queue(settings, cluster=cluster)
    server: PageServer | None = None
    head: ClusterHead | None = None
    try:
        if cluster:
            head = start_head(worker, settings, engines)
        app = VideoApi(worker, settings, keys, head).app(_mcp_transport(settings) if mcp else None)
        try:
            sockets = listen(settings.host, settings.port)
        except OSError as error:
            raise port_taken(settings.port) from error
        server = PageServer(sockets, limits_for(raise_open_files()))
        server.start(app)
        worker.start_workers(settings.log_file, videos=makes_videos(head, engines))
        yield address_of(settings.host, settings.port)
    finally:
        with contextlib.ExitStack() as closing:
            closing.callback(worker.store.close)
            if server is not None:
                closing.callback(server.close)
            closing.callback(worker.close)
            if head is not None:
                closing.callback(head.close)


def check_ray() -> None:
    """Check that Ray is installed.

    Raises:
        MachineError: if not.
    """
    from runtime.server.cluster.ray_process import check_installed

    check_installed()


def check_mcp() -> None:
    """Check that version 2 of the package `mcp` is installed.

    Raises:
        MachineError: if not.
    """
    if importlib.util.find_spec("mcp_types") is None:
        raise MachineError("server.mcp_not_installed")


def _mcp_transport(settings: Settings) -> "HttpTransport":
    from runtime.server.mcp.transports import HttpTransport

    return HttpTransport(address_of(settings.host, settings.port))


def makes_videos(head: "ClusterHead | None", engines: EngineService) -> bool:
    """Return whether this machine makes videos itself: without a cluster, or with a GPU."""
    return head is None or bool(engines.machine.gpus)


def start_head(worker: JobQueue, settings: Settings, engines: EngineService) -> "ClusterHead":
    """Start the head of a cluster, and print how other machines join it.

    Raises:
        MachineError: if Ray does not start.
        SettingsError: if the cluster's key cannot be read or written.
    """
    from runtime.server.cluster.cluster_key import VARIABLE, make_key
    from runtime.server.cluster.head import ClusterHead

    key = make_key(settings.cache_dir)
    print_line("Starting Ray.")
    head = ClusterHead(worker, settings, key, engines.store)
    worker.plans_for, worker.workers_elsewhere = head.machine, head.size
    print_line(f"Other machines join with: {VARIABLE}={key} {join_command(settings)}")
    return head


def join_command(settings: Settings) -> str:
    """Return the command with which a machine that has the cluster's key joins."""
    host = settings.host
    if host in {"0.0.0.0", "::"}:
        host = _own_address()
    return f"{program()} worker --join {f'[{host}]' if ':' in host else host}:{settings.port}"


def _own_address() -> str:
    """Return the address of this machine in its network; its name if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            # Sends nothing; the address is reserved for documentation.
            sock.connect(("192.0.2.1", 9))
            return str(sock.getsockname()[0])
        except OSError:
            return socket.gethostname()


def open_queue(settings: Settings, *, cluster: bool = False) -> tuple[JobQueue, EngineService]:
    """Open the job store and the engine library; return the queue, whose workers do not run yet.

    Args:
        cluster: whether other machines make its videos, too: all interrupted videos are queued again, and not only
            those of API keys, and no engines are built here that no request asks for.

    Raises:
        OutputError: if nothing can be written to the folder for videos.
    """
    make_folder(settings.outputs_dir)
    if settings.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    engines = EngineService.from_settings(settings, probe())
    if cluster:
        engines = replace(engines, idle_builds=False)
    store = open_store(settings.cache_dir)
    if store.notice is not None:
        print_line(f"Note: {store.notice}")
    if store.problem is not None:
        print_line(f"Note: Jobs are not stored. {' '.join(render(store.problem))}")
    DoneCommand(store, settings.on_done)  # workers run it themselves, and this process for theirs that die
    cancel_orphaned(store)
    history = HistoryFile(settings.cache_dir, engines.machine)
    worker = JobQueue(settings.weights_dir, settings.outputs_dir, engines, history, store)
    worker.retention = Retention(days=settings.keep_days, videos=settings.keep_videos, bytes=settings.keep_bytes)
    worker.on_done = settings.on_done
    resume_interrupted(store, everyone=cluster)
    waiting = sum(count for (_, state), count in store.order.counts().items() if state != "paused")
    if waiting:
        print_line(f"Queued jobs of an earlier start: {waiting}. They run now.")
    return worker, engines


def resume_interrupted(store: JobStore, *, everyone: bool = False) -> None:
    """Queue the videos of API keys, or of everyone, again whose process was killed; programs cannot resume them."""
    for job in store.list(states=["interrupted"]):
        if everyone or (job.owner or "").startswith(OWNER_PREFIX):
            interruptions = sum(values["event"] == "Interrupted" for _, _, values in store.log.events(job.id))
            # In a cluster, the head's process does not run the videos.
            if everyone or interruptions < _MOST_INTERRUPTIONS:
                logger.info("job %s is queued again", job.id)
                store.resume(job.id)


def until_stopped(serving: AbstractContextManager[str], started: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        serving: serves while it is entered; yields the address.
        started: called with it.
    """
    with stop_on_signals() as stop, serving as url:
        started(url)
        # On Windows a wait without a timeout cannot be interrupted.
        while not stop.wait(0.5):
            pass
        # A second Ctrl-C ends the process at once.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print_line("Stopping.")


def print_line(line: str) -> None:
    """Print a line for people."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def address_of(host: str, port: int) -> str:
    """Return the address of a server, for this machine."""
    return f"http://{'localhost' if host == '0.0.0.0' else f'[{host}]' if ':' in host else host}:{port}/"


def check_address(host: str, port: int) -> None:
    """Check that a host and port can be listened on.

    Raises:
        MachineError: if not.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise MachineError("ui.host_unknown", host=host) from error
    with socket.socket(family, kind, protocol) as sock:
        # On Windows this option would take a port that another program listens on; on Unix it only skips TIME_WAIT.
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise MachineError("ui.host_not_local", host=host) from error
            if error.errno == errno.EACCES:
                raise MachineError("ui.port_forbidden", port=port) from error
            raise port_taken(port) from error


def port_taken(port: int) -> MachineError:
    """Return the error for a port that another program listens on."""
    alternative = port + 1 if port < 65_535 else port - 1  # noqa: PLR2004 - the last port
    return MachineError("ui.port_taken", port=port, other=alternative)
