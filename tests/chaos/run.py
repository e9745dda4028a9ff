"""Attacks and faults in random order against the whole app, on loopback, and what must hold during and after them.

The app runs in a child process with a share link, a tiny model, 512 file descriptors and, as root, a cache on a file
system of its own. Up to four actions at a time, chosen by a seed:

- half-sent and slow requests to both pages, from up to 250 connections
- up to 200 watchers of jobs, half of whom never read
- up to 60 videos at once, by visitors and the owner
- hostile files in the cache: named pipes, deeply nested JSON, noise in models, engines, prompts and outputs
- a full disk for some seconds
- SIGKILL and SIGSTOP for workers, SIGSTOP for the visitors' page
- the clock: hours and years ahead and back
"""

import contextlib
import http.cookiejar
import json
import os
import random
import re
import shutil
import signal
import socket
import sqlite3
import statistics
import struct
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil

from tests.app_server import Server, make_cache, serving
from tests.chaos import CLOCK
from tests.full_disk import mounted
from tests.fuzz.raw_http import TIMEOUT_SECONDS, Answer, send
from tests.server.test_flood import visitors_port
from tests.sharing_app import link_of
from tests.waiting import until

FLAGS = (
    *("--share", "--share-frames", "9", "--share-steps", "2"),
    *("--share-queue", "100", "--share-queue-all", "250", "--share-rate", "10000"),
)
GENERATE = "/gradio_api/call/generate"
# Visitors' videos need half a gigabyte of free space.
_DISK = "size=800m"
_ACTIONS_AT_ONCE = 4
_PROBE_PAUSE = 0.25
_OPEN = ("queued", "running")
_LEFTOVERS = re.compile(r"\.tmp$|\.part$|\.partial$|\.new$|^\.building-|\.writing")
# The last place of a traceback, and its error.
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ +|].*\n)*?(  File .*\n(?:    .*\n)*)(\S.*)")
_HOUR, _YEAR = 3600.0, 365 * 86_400.0


@dataclass
class Face:
    """One of the two pages."""

    port: int
    login: tuple[str, str] | None = None
    cookie: str = ""

    def log_in(self) -> None:
        """Log in, with the page's user and password; without success, the old login stays."""
        if self.login is None:
            return
        jar = http.cookiejar.CookieJar()
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
        form = urllib.parse.urlencode(dict(zip(("username", "password"), self.login, strict=True))).encode()
        with contextlib.suppress(OSError), opener.open(f"http://127.0.0.1:{self.port}/login", form, timeout=30):
            self.cookie = "; ".join(f"{cookie.name}={cookie.value}" for cookie in jar)

    def send(self, method: str, target: str, body: bytes = b"") -> Answer:
        """Send a request and return the answer, with status 0 if there is none.

        A connection may be closed before its request is read if hundreds are opened at once.
        """
        fields = {b"Cookie": self.cookie.encode()} if self.cookie else {}
        if body:
            fields[b"Content-Type"] = b"application/json"
        began = time.monotonic()
        with contextlib.suppress(OSError):
            answer = send(self.port, method.encode(), target.encode(), fields, body)
            return replace(answer, seconds=time.monotonic() - began)
        return Answer(0, b"", b"", TIMEOUT_SECONDS)

    def head(self, method: str, target: str, **fields: str) -> bytes:
        """Return the head of a request, without the blank line."""
        lines = {"Host": f"127.0.0.1:{self.port}", **fields}
        if self.cookie:
            lines["Cookie"] = self.cookie
        return "".join([f"{method} {target} HTTP/1.1\r\n", *(f"{n}: {v}\r\n" for n, v in lines.items())]).encode()

    def connect(self, timeout: float = 10.0) -> socket.socket:
        """Open a connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)


@dataclass
class Chaos:
    """The app under test, what was done to it, and what was seen.

    Attributes:
        most_open: videos that wait or run; actions submit no more.
    """

    server: Server
    owner: Face
    visitor: Face
    stranger: Face
    clock: Path
    full_disk: bool
    rng: random.Random
    most_open: int
    actions: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    accepted: dict[str, str] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    unanswered: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _number: int = 0

    # What a user does.

    def submit(self, face: Face, count: int) -> None:
        """Request videos; remember those that were accepted, with the events to watch them by."""
        for _ in range(count):
            with self._lock:
                self._number += 1
                prompt = f"chaos {self._number:05}"
            answer = face.send("POST", GENERATE, json.dumps({"data": [prompt]}).encode())
            self.answers[f"generate: {answer.status or 'closed'}"] += 1
            if answer.status == HTTPStatus.OK:
                with self._lock:
                    self.accepted[prompt] = json.loads(answer.body)["event_id"]
            elif answer.status == HTTPStatus.UNAUTHORIZED:  # the visitors' page was killed right after the login
                face.log_in()
            elif answer.status == HTTPStatus.TOO_MANY_REQUESTS:
                return

    def probe(self) -> None:
        """Load the owner's page again and again, and keep the seconds that it took; without an answer, the timeout."""
        while not self.ended.is_set():
            answer = self.owner.send("GET", "/")
            answered = answer.status == HTTPStatus.OK and b"</html>" in answer.body
            self.latencies.append(answer.seconds if answered else TIMEOUT_SECONDS)
            self.unanswered += not answered
            time.sleep(_PROBE_PAUSE)

    # Actions. Each ends within about ten seconds.

    def half_sent(self) -> None:
        """Keep connections open with unfinished heads."""
        face = self.rng.choice([self.owner, self.stranger, self.visitor])
        head = face.head("GET", "/")
        with self._connections(face, self.rng.choice([20, 100, 250])) as connections:
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.sendall(head[: self.rng.randrange(len(head))])
            self._wait(self.rng.uniform(1, 8))

    def slow(self) -> None:
        """Send heads and bodies byte by byte."""
        face = self.rng.choice([self.owner, self.stranger, self.visitor])
        request = face.head("POST", "/login", **{"Content-Length": "5000"}) + b"\r\n" + b"x" * 5000
        end = time.monotonic() + self.rng.uniform(1, 8)
        with self._connections(face, self.rng.choice([10, 60])) as connections:
            sent = 0
            while time.monotonic() < end and not self.ended.is_set():
                for connection in connections:
                    with contextlib.suppress(OSError):
                        connection.sendall(request[sent : sent + 7])
                sent += 7
                time.sleep(0.05)

    def watch(self) -> None:
        """JobHooks jobs; half of the watchers never read, the others leave without a word."""
        face = self.rng.choice([self.owner, self.visitor])
        with self._lock:
            events = self.rng.sample(sorted(self.accepted.values()), min(len(self.accepted), 40))
        if not events:
            return
        with self._connections(face, self.rng.choice([20, 80, 200])) as connections:
            for number, connection in enumerate(connections):
                with contextlib.suppress(OSError):
                    connection.sendall(face.head("GET", f"{GENERATE}/{events[number % len(events)]}") + b"\r\n")
            end = time.monotonic() + self.rng.uniform(1, 8)
            while time.monotonic() < end and not self.ended.is_set():
                for connection in connections[::2]:
                    with contextlib.suppress(OSError):
                        connection.setblocking(False)
                        connection.recv(65_536)
                time.sleep(0.1)

    def videos(self) -> None:
        """Request many videos at once."""
        face, count = self.rng.choice([self.owner, self.visitor]), self.rng.choice([1, 10, 60])
        self.submit(face, min(count, max(self.most_open - self.open_jobs(), 0)))

    def hostile_files(self) -> None:
        """Put files into the cache that others would not write, and take them away later."""
        cache, name = self.server.cache_dir, f"bad{self.rng.randrange(10**6)}"
        nested = "[" * 100_000
        made = [cache / "weights" / name, cache / "engines" / name]
        made += [cache / "outputs" / f"{name}.mp4", cache / "prompts" / f"{name}.safetensors"]
        with contextlib.suppress(OSError):  # the disk may be full
            for folder in made[:2]:
                folder.mkdir(parents=True)
            kind = self.rng.randrange(4)
            index = made[0] / "model_index.json"
            if kind == 0:
                os.mkfifo(index)
                os.mkfifo(made[1] / "engine.json")
            elif kind == 1:
                index.write_text(nested)
                (made[1] / "engine.json").write_text(nested)
            elif kind == 2:
                index.write_text(
                    '{"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}'
                )
                (made[0] / "transformer").mkdir()
                (made[0] / "transformer" / "config.json").write_text(
                    '{"num_layers": Infinity, "num_attention_heads": 1e999}'
                )
            else:
                index.symlink_to("/dev/zero")
                (made[1] / "engine.json").symlink_to("/dev/zero")
            for path in made[2:]:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(self.rng.randbytes(5000))
        self.owner.send("GET", "/config")
        self._wait(self.rng.uniform(2, 8))
        for path in made:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def fill_disk(self) -> None:
        """Leave no space on the cache's file system for some seconds."""
        if not self.full_disk:
            return
        path = self.server.cache_dir / f"ballast{threading.get_ident()}"
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
        self._wait(self.rng.uniform(1, 5))
        path.unlink()

    def kill_worker(self) -> None:
        """Kill a process of the app other than its first."""
        for process in self._some_child("spawn_main"):
            process.kill()

    def stop_worker(self) -> None:
        """Stop a process for some seconds."""
        for process in self._some_child("spawn_main"):
            process.suspend()
            self._wait(self.rng.uniform(1, 6))
            with contextlib.suppress(psutil.Error):
                process.resume()

    def move_clock(self) -> None:
        """Move the clock, and back after some seconds."""
        offset = self.rng.choice([-10 * _YEAR, -_HOUR, _HOUR, 24 * _HOUR, 70 * _YEAR])
        self.clock.write_text(str(offset), encoding="ascii")
        self._wait(self.rng.uniform(1, 8))
        self.clock.write_text("0", encoding="ascii")

    # Helpers.

    @contextlib.contextmanager
    def _connections(self, face: Face, count: int) -> Iterator[list[socket.socket]]:
        opened: list[socket.socket] = []
        try:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    opened.append(face.connect(2.0))
            yield opened
        finally:
            for connection in opened:
                if self.rng.random() < 0.5:
                    # Closed with a reset.
                    with contextlib.suppress(OSError):
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

    def _some_child(self, word: str) -> list[psutil.Process]:
        """Return one of the app's processes whose command line contains a word, or none."""
        found = [process for process in self.children() if word in " ".join(_command(process))]
        return [self.rng.choice(found)] if found else []

    def children(self) -> list[psutil.Process]:
        """Return all processes below the app's first."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.server.process.pid).children(recursive=True)
        return []

    def _wait(self, seconds: float) -> None:
        self.ended.wait(seconds)

    def jobs(self) -> list[tuple[str, str]]:
        """Return the prompt of each video in the job store, and its state with the code of its failure."""
        for _ in range(50):
            try:
                with contextlib.closing(sqlite3.connect(self.store, timeout=10)) as connection:
                    query = "SELECT request, state, failure FROM jobs WHERE kind = 'video'"
                    rows = connection.execute(query).fetchall()
            except sqlite3.Error:
                time.sleep(0.2)
                continue
            return [
                (json.loads(request)["prompt"], f"{state}: {json.loads(failure)['fact']['code']}" if failure else state)
                for request, state, failure in rows
            ]
        raise AssertionError("the job store cannot be read")

    @property
    def store(self) -> Path:
        """The job store."""
        return self.server.cache_dir / "jobs.sqlite"

    def open_jobs(self) -> int:
        """Return the number of videos that wait or run."""
        return sum(state in _OPEN for _, state in self.jobs())

    def used(self) -> dict[str, int]:
        """Return what the app's processes hold, and its log's size."""
        first = psutil.Process(self.server.process.pid)
        logs = [self.server.cache_dir / "server.txt", *(self.server.cache_dir / "logs").glob("*")]
        return {
            "descriptors": first.num_fds(),
            "threads": first.num_threads(),
            "processes": 1 + len(self.children()),
            "memory_mb": first.memory_info().rss >> 20,
            "visitors_memory_mb": self._visitors_memory() >> 20,
            "log_kb": sum(path.stat().st_size for path in logs if path.is_file()) >> 10,
        }

    def _visitors_memory(self) -> int:
        """Return the memory of the process of the visitors' page; 0 while it is started again."""
        port = visitors_port(self.server)
        for child in self.children():
            with contextlib.suppress(psutil.Error):
                listens = {one.laddr.port for one in child.net_connections() if one.status == psutil.CONN_LISTEN}
                if port in listens:
                    return int(child.memory_info().rss)
        return 0


ACTIONS: tuple[Callable[[Chaos], None], ...] = (
    Chaos.half_sent,
    Chaos.slow,
    Chaos.watch,
    Chaos.videos,
    Chaos.videos,
    Chaos.hostile_files,
    Chaos.fill_disk,
    Chaos.kill_worker,
    Chaos.stop_worker,
    Chaos.move_clock,
)


@contextlib.contextmanager
def _started(folder: Path, seed: int, most_open: int) -> Iterator[Chaos]:
    cache, clock = folder / "cache", folder / "clock"
    cache.mkdir()
    clock.write_text("0", encoding="ascii")
    os.environ[CLOCK] = str(clock)
    with mounted(cache, _DISK) as full_disk:
        make_cache(cache)
        with serving(cache, *FLAGS, program=("-m", "tests.chaos.app")) as server:
            port, user, password = link_of(cache)
            own = Face(int(server.url.rstrip("/").rpartition(":")[2]))
            stranger = Face(port)
            visitor = Face(port, (user, password))
            visitor.log_in()
            yield Chaos(server, own, visitor, stranger, clock, full_disk, random.Random(seed), most_open)


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def run(folder: Path, minutes: float, seed: int, most_open: int = 300) -> dict[str, Any]:
    """Run actions for a time, let the app finish its work, and return what was found; see `problems`.

    Args:
        most_open: see `Chaos`.

    Raises:
        AssertionError: if the app ended, or videos do not end.
    """
    with _started(folder, seed, most_open) as chaos:
        # Threads, caches and buffers of ordinary use.
        for face in (chaos.owner, chaos.visitor):
            chaos.submit(face, min(10, most_open // 5))
        for _ in range(3):
            chaos.watch()
            chaos.hostile_files()
        until(lambda: not chaos.open_jobs(), pause=0.5)
        before = chaos.used()
        probing = threading.Thread(target=chaos.probe, daemon=True)
        probing.start()
        _act(chaos, minutes)
        until(lambda: not chaos.open_jobs(), pause=0.5, seconds=600)
        latencies = chaos.latencies[:]
        # Connections that were left open are closed by their deadlines, and memory of the last requests is returned.
        time.sleep(min(180.0, 20 * minutes))
        after = chaos.used()
        chaos.ended.set()
        probing.join()
        jobs = chaos.jobs()
        prompts = Counter(prompt for prompt, _ in jobs)
        lost = sum(prompts[prompt] != 1 for prompt in chaos.accepted)
        cache = chaos.server.cache_dir
        left = [str(path.relative_to(cache)) for path in cache.rglob("*") if _LEFTOVERS.search(path.name)]
        logs = [cache / "server.txt", *(cache / "logs").glob("*")]
        text = "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs if log.is_file())
        tracebacks = Counter(" ".join("".join(found).split())[-500:] for found in _TRACEBACK.findall(text))
        processes = [psutil.Process(chaos.server.process.pid), *chaos.children()]
        began = time.monotonic()
        chaos.server.process.send_signal(signal.SIGTERM)
        code = chaos.server.process.wait(timeout=60)
        stopped = time.monotonic() - began
        _, alive = psutil.wait_procs(processes, timeout=10)
    quantiles = statistics.quantiles(latencies, n=100)
    return {
        "seed": seed,
        "minutes": minutes,
        "disk of its own": chaos.full_disk,
        "actions": dict(sorted(chaos.actions.items())),
        "answers": dict(sorted(chaos.answers.items())),
        "accepted": len(chaos.accepted),
        "accepted, not in the store once": lost,
        "videos by state": dict(Counter(state for _, state in jobs)),
        "page": {
            "loads": len(latencies),
            "median_s": round(statistics.median(latencies), 3),
            "p95_s": round(quantiles[94], 3),
            "slowest_s": round(max(latencies), 3),
            "unanswered": chaos.unanswered,
        },
        "before": before,
        "after": after,
        "leftovers": left,
        "tracebacks": tracebacks,
        "exit code": code,
        "stopped_s": round(stopped, 1),
        "processes left": len(alive),
    }


def problems(found: dict[str, Any], page_seconds: float = 1.0) -> list[str]:
    """Return what should not be in the result of a run.

    Args:
        page_seconds: in which the owner's page must answer, 95th percentile.
    """
    page, before, after = found["page"], found["before"], found["after"]
    # A connection of the last probe may still be open, and thread pools grow up to their limits.
    limits = {
        "descriptors": before["descriptors"] + 8,
        "threads": before["threads"] + 64,
        "processes": before["processes"],
        "memory_mb": before["memory_mb"] + 20,
        "visitors_memory_mb": before["visitors_memory_mb"] + 20,
        "log_kb": 5000,
    }
    wrong = [f"{name}: {before[name]}, then {after[name]}" for name, most in limits.items() if after[name] > most]
    if page["p95_s"] > page_seconds:
        wrong.append(f"page: {page}")
    refused = {answer: count for answer, count in found["answers"].items() if answer.startswith("generate: 5")}
    if refused:
        wrong.append(f"answers: {refused}; tracebacks: {found['tracebacks']}")
    for name in ("accepted, not in the store once", "leftovers", "exit code", "processes left"):
        if found[name]:
            wrong.append(f"{name}: {found[name]}")
    return wrong


def _act(chaos: Chaos, minutes: float) -> None:
    """Start an action every second or two, few at a time, until the time is over; wait for the last ones."""
    end = time.monotonic() + 60 * minutes
    running: list[threading.Thread] = []
    while time.monotonic() < end:
        assert chaos.server.process.poll() is None, "the app ended"
        running = [thread for thread in running if thread.is_alive()]
        if len(running) < _ACTIONS_AT_ONCE:
            action = chaos.rng.choice(ACTIONS)
            chaos.actions[action.__name__] += 1
            running.append(threading.Thread(target=action, args=(chaos,), daemon=True))
            running[-1].start()
        time.sleep(chaos.rng.uniform(0.5, 2.0))
    for thread in running:
        thread.join(timeout=60)
