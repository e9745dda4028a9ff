"""A cluster of several processes on this machine: a head and nodes, each with a cache folder of its own."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import psutil

from tests.app_server import ROOT, environment, free_port

JOB = {"prompt": "a red boat at sunset", "steps": 6, "frames": 9, "upscale": "off"}


class Machines:
    """The processes of a cluster; see `machines`."""

    def __init__(self, folder: Path, command: tuple[str, ...] = ("serve", "--cluster"), **head_variables: str) -> None:
        self.folder, self._command, self._head_variables = folder, command, head_variables
        self.port = free_port()
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.start_head()

    def start_head(self) -> None:
        """Start the head, also again."""
        self.head = self._start("head", [*self._command, "--port", str(self.port)], **self._head_variables)
        self.wait(self._answers, 180)

    def _answers(self) -> bool:
        output = self.folder / "head" / "output.txt"
        assert self.head.poll() is None, f"the head ended: {output.read_text(encoding='utf-8')[-2000:]}"
        return self.get("healthz") is not None

    def add_node(self, *flags: str, **variables: str) -> None:
        """Start a node."""
        key = (self.folder / "head" / "cluster.key").read_text(encoding="ascii")
        name = f"node{len(self.nodes)}"
        command = ["worker", "--join", f"127.0.0.1:{self.port}", *flags]
        self.nodes.append(self._start(name, command, TANDEM_CLUSTER_KEY=key, **variables))

    def _start(self, name: str, command: list[str], **variables: str) -> "subprocess.Popen[bytes]":
        cache = self.folder / name
        cache.mkdir(exist_ok=True)
        with (cache / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "app.py", *command],
                cwd=ROOT,
                env=environment() | {"TANDEM_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"} | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def get(self, path: str, body: object = None) -> Any:
        """Return the answer of a route; `None` if there is none."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}", data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.loads(answer.read())
        except OSError:
            return None

    def submit(self, seed: int, **fields: object) -> str:
        """Queue a video; return its id."""
        return str(self.get("v1/videos", {**JOB, "seed": seed, **fields})["id"])

    def workers(self) -> list[dict[str, Any]]:
        """Return the workers that the head has."""
        view = self.get("v1/cluster") or {"nodes": []}
        return [worker for node in view["nodes"] for worker in node["workers"]]

    def videos(self) -> dict[str, dict[str, Any]]:
        """Return all videos by id."""
        found = self.get("v1/videos?limit=100")
        return {} if found is None else {one["id"]: one for one in found["data"]}

    def finished(self) -> bool:
        """Return whether no video waits or runs."""
        found = self.videos()
        return bool(found) and all(one["status"] in {"completed", "failed"} for one in found.values())

    @staticmethod
    def wait(done: Any, seconds: float) -> None:
        """Wait until something holds."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "timeout"
            time.sleep(0.2)

    def kill_worker(self) -> bool:
        """Kill the process of a worker that runs a job; return whether there was one."""
        busy = [worker for worker in self.workers() if worker["job"]]
        if busy:
            with contextlib.suppress(ProcessLookupError):
                os.kill(busy[0]["pid"], signal.SIGKILL)
        return bool(busy)

    def kill_raylet(self, number: int = 0) -> bool:
        """Kill the raylet of a node; return whether there was one."""
        children = psutil.Process(self.nodes[number].pid).children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.Error):
                if child.name() == "raylet":
                    child.kill()
                    return True
        return False

    def kill_head(self) -> None:
        """Kill the head and start it again."""
        self.head.kill()
        self.head.wait()
        self.start_head()

    def times(self, job_id: str) -> tuple[float, float]:
        """Return when a job started and ended, in seconds."""
        with contextlib.closing(sqlite3.connect(self.folder / "head" / "jobs.sqlite")) as connection:
            query = "SELECT started, ended FROM jobs WHERE id = ?"
            started, ended = connection.execute(query, (job_id,)).fetchone()
        return float(started), float(ended)

    def frames(self, job_id: str) -> str:
        """Return a digest of the frames of a video."""
        found = [path for path in (self.folder / "head" / "outputs").glob("*.mp4") if job_in(path) == job_id]
        assert len(found) == 1, found
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(found[0]), "-f", "md5", "-"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def left(self) -> list[str]:
        """Return the processes that belong to this cluster."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TANDEM_CACHE_DIR", "").startswith(str(self.folder)):
                    found.append(" ".join(process.cmdline())[:100])
        return found

    def close(self) -> None:
        """Stop all."""
        for process in (*self.nodes, self.head):
            process.send_signal(signal.SIGINT)
        for process in (*self.nodes, self.head):
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def machines(folder: Path, nodes: int, *, page: bool = False) -> Iterator[Machines]:
    """Run a head with nodes; without nodes, a server that makes its videos itself.

    Args:
        page: whether it is the web app.
    """
    running = Machines(folder, (*(["--no-browser"] if page else ["serve"]), *["--cluster"] * bool(nodes)))
    try:
        for _ in range(nodes):
            running.add_node()
        running.wait(lambda: len(running.workers()) >= nodes, 240)
        yield running
    finally:
        running.close()


def job_in(path: Path) -> str:
    """Return the job that a video belongs to."""
    from runtime.video.mp4 import read_metadata

    return str(read_metadata(path).get("job"))
