"""The web app, or `serve`, as a child process or in this one, with a tiny model in a cache folder of its own."""

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtime.core import settings
from runtime.core.settings import Settings
from tests import tiny_models
from tests.thread_queue import RunningQueue
from tests.waiting import until

ROOT = Path(__file__).parents[1]
MODEL = "tiny"
# Small and fast; tests that need a longer job request a larger one.
DEFAULTS = {
    "width": 64,
    "height": 32,
    "frames": 9,
    "fps": 8,
    "steps": 4,
    "guidance_scale": 3.0,
    "guidance_scale_2": 2.0,
}


@dataclass(frozen=True)
class App:
    """A running web app, or `serve`."""

    url: str
    cache_dir: Path

    @property
    def port(self) -> int:
        """The port of the page and the HTTP API."""
        return int(self.url.rstrip("/").rpartition(":")[2])

    def printed(self) -> str:
        """Return what it has printed; of an app in this process, the tracebacks."""
        return (self.cache_dir / "server.txt").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Server(App):
    """An app that is a child process."""

    process: subprocess.Popen[str]


@functools.cache
def _tiny_model() -> "tempfile.TemporaryDirectory[str]":
    folder = tempfile.TemporaryDirectory()
    tiny_models.build("wan2.2-a14b", Path(folder.name, MODEL))
    return folder


def make_cache(folder: Path) -> Path:
    """Create a cache folder with a tiny model with two experts, and return it."""
    model = folder / "weights" / MODEL
    shutil.copytree(Path(_tiny_model().name, MODEL), model)
    sidecar = {
        "title": "Tiny",
        "license": "none",
        "defaults": DEFAULTS | {"negative_prompt": ""},
        "sizes": [[64, 32], [32, 64]],
        "frame_counts": [9],
        "latent_rgb_factors": [[0.1, -0.1, 0.05]] * 16,
        "latent_rgb_bias": [0.0, 0.0, 0.0],
    }
    (model / "tandem.json").write_text(json.dumps(sidecar), encoding="utf-8")
    return folder


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(cache_dir: Path, *flags: str, program: Sequence[str] = ("app.py",)) -> Iterator[Server]:
    """Run `python app.py`, or another program that wraps it, with `flags` on a free port.

    The last word of the program may be `serve`: then there is no page.
    """
    port = free_port()
    page = program[-1] != "serve"
    log = cache_dir / "server.txt"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *program, "--port", str(port), "--model", MODEL, *["--no-browser"] * page, *flags],
            cwd=ROOT,
            env=environment() | {"TANDEM_CACHE_DIR": str(cache_dir)},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            url = f"http://127.0.0.1:{port}/"
            _wait_until_up(url if page else f"{url}healthz", process, log)
            yield Server(url, cache_dir, process)
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _ThreadQueue(RunningQueue):
    """A `RunningQueue` that starts when an app starts its worker processes."""

    def __init__(self, *values: Any) -> None:
        super().__init__(*values, start=False)

    def start_workers(self, *_: object, **__: object) -> None:
        """Start the threads."""
        self.start()

    def worker_pids(self) -> dict[int, int]:
        """Return this process."""
        return {0: os.getpid()}


@contextlib.contextmanager
def serving_here(
    cache_dir: Path,
    *,
    page: bool = True,
    mcp: bool = False,
    notify: Callable[[str], None] = lambda _: None,
    **values: Any,
) -> Iterator[App]:
    """Run the web app in this process, with its workers as threads.

    Args:
        page: otherwise it is the HTTP API alone, as of `serve`.
        mcp: whether that has an MCP server, too.
        notify: called with each line on the state of the share link.
        values: more settings.
    """
    from gradio.data_classes import _StaticFiles

    from runtime.server import serve
    from runtime.ui import app as web_app

    fixed: dict[str, Any] = {"port": free_port(), "model": MODEL, "browser": False, "idle_builds": False}
    chosen = Settings(**{"cache_dir": cache_dir, **fixed, **values})
    log = cache_dir / "server.txt"
    log.touch()

    def record(self: traceback.TracebackException, *args: Any, **more: Any) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.writelines(self.format())
        show(self, *args, **more)

    show = traceback.TracebackException.print
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "JobQueue", _ThreadQueue)
        patch.setattr(traceback.TracebackException, "print", record)
        # What the web app changes in its process.
        patch.setattr(_StaticFiles, "all_paths", [])
        for name in ("GRADIO_TEMP_DIR", "GRADIO_EXAMPLES_CACHE", "NO_PROXY", "no_proxy"):
            patch.setenv(name, os.environ.get(name, ""))
        with web_app.serve(chosen, notify) if page else serve.serve(chosen, mcp=mcp) as url:
            yield App(url, cache_dir)


def environment() -> dict[str, str]:
    """Return the environment without Tandem's settings; apps build no engines that a test does not ask for."""
    ours = {*settings.VARIABLES.values(), settings.CACHE_VARIABLE}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"TANDEM_IDLE_BUILDS": "0"}


def _wait_until_up(url: str, process: subprocess.Popen[str], log: Path) -> None:
    def up() -> bool:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return True
        return False

    until(up, pause=0.2)
