"""The web app as a child process, with a tiny model in a cache folder of its own."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.core import settings
from tests import tiny_models
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
class Server:
    """A running web app."""

    url: str
    cache_dir: Path
    process: subprocess.Popen[str]


def make_cache(folder: Path) -> Path:
    """Create a cache folder with a tiny model with two experts, and return it."""
    model = tiny_models.build("wan2.2-a14b", folder / "weights" / MODEL)
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


def environment() -> dict[str, str]:
    """Return the environment without Tandem's settings."""
    ours = {*settings.VARIABLES.values(), settings.CACHE_VARIABLE}
    return {name: value for name, value in os.environ.items() if name not in ours}


def _wait_until_up(url: str, process: subprocess.Popen[str], log: Path) -> None:
    def up() -> bool:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return True
        return False

    until(up, pause=0.2)
