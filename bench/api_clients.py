"""Measure the HTTP API beside the web app under many clients that poll and stream at once.

    python -m bench.api_clients [--clients 200] [--seconds 60] [--keys 10] [--queued 3] [--waiting 0]

Each client is one program with one key and one connection for requests: it polls one of its key's videos each second,
and lists its key's videos every ten seconds. Every second client also follows that video's events on a second
connection. A worker makes videos of a tiny model all the time. Meanwhile the page of the web app is requested ten times
a second, and what an open page asks for once a second: the states of jobs, and changes of the panels Queue and Results.
Prints a JSON object: what was answered, times, and processor time of the clients, the web process and the worker. The
exit code is 1 if anything failed.

With `--waiting 5000`, so many more videos of the owner wait behind those of the keys.
"""

import argparse
import asyncio
import json
import os
import secrets
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil

from runtime.server.api_keys import ApiKeys, KeyLimits
from tests.app_server import Server, make_cache, serving

_POLL_SECONDS, _LIST_EVERY, _PAGE_SECONDS = 1.0, 10, 0.1
_PANELS = {"queue": "tandem/panels/queue", "results": "tandem/panels/results"}
_CALL: dict[str, Any] = {"action": "refresh", "target": "", "values": {}, "view": {}, "form": []}
_TIMEOUT_SECONDS = 30.0
_BODY = {"prompt": "a red boat", "steps": 900, "frames": 9, "size": "64x32"}


@dataclass
class Found:
    """What the clients saw."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    statuses: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)


class Connection:
    """One connection that is kept open."""

    def __init__(self, port: int, found: Found, key: str | None = None) -> None:
        self._port = port
        self._found = found
        self._key = "" if key is None else f"Authorization: Bearer {key}\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, kind: str, method: str, path: str, values: dict[str, Any] | None = None) -> bytes:
        """Send a request and return the body of the answer; a failure is counted, and empty."""
        began = time.monotonic()
        try:
            status, body = await asyncio.wait_for(self._ask(method, path, values), _TIMEOUT_SECONDS)
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, ValueError) as error:
            self._found.errors[f"{kind}: {type(error).__name__}"] += 1
            self.close()
            return b""
        self._found.seconds[kind].append(time.monotonic() - began)
        self._found.statuses[f"{kind} {status}"] += 1
        if status != HTTPStatus.OK:
            self._found.errors[f"{kind}: status {status}"] += 1
        return body

    async def follow(self, path: str, until: float) -> None:
        """Read events until a time, or until the stream ends."""
        began = time.monotonic()
        try:
            reader = await asyncio.wait_for(self._send("GET", path, None), _TIMEOUT_SECONDS)
            status, _ = await asyncio.wait_for(_head(reader), _TIMEOUT_SECONDS)
            if status != HTTPStatus.OK:
                self._found.errors[f"events: status {status}"] += 1
                return
            first = True
            while (left := until - time.monotonic()) > 0:
                line = await asyncio.wait_for(reader.readline(), left)
                if not line:
                    self._found.errors["events: ended"] += 1
                    return
                if line.startswith(b"event: "):
                    if first:
                        self._found.seconds["first event"].append(time.monotonic() - began)
                        first = False
                    name = line[7:].strip().decode()
                    self._found.events[name] += 1
                    if name in {"video.completed", "video.failed"}:
                        return
                    if name == "error":
                        self._found.errors["events: error"] += 1
                        return
        except asyncio.TimeoutError:
            if time.monotonic() < until:
                self._found.errors["events: timeout"] += 1
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            self._found.errors[f"events: {type(error).__name__}"] += 1
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _ask(self, method: str, path: str, values: dict[str, Any] | None) -> tuple[int, bytes]:
        reader = await self._send(method, path, values)
        status, headers = await _head(reader)
        if "chunked" in headers.get("transfer-encoding", ""):
            body = b""
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        else:
            body = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.close()
        return status, body

    async def _send(self, method: str, path: str, values: dict[str, Any] | None) -> asyncio.StreamReader:
        if self._streams is not None and self._streams[0].at_eof():  # closed by the server, which is idle for 5 s
            self.close()
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        body = b"" if values is None else json.dumps(values).encode()
        kind = "Content-Type: application/json\r\n" if body else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n{self._key}{kind}"
        self._streams[1].write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await self._streams[1].drain()
        return self._streams[0]


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Return the status and the headers of an answer."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value for name, value in headers.items()}


async def _client(number: int, port: int, key: str, video: str, end: float, found: Found) -> None:
    await asyncio.sleep(_POLL_SECONDS * (number % 50) / 50)
    requests, count = Connection(port, found, key), 0
    while time.monotonic() < end:
        began = time.monotonic()
        if count % _LIST_EVERY == 0:
            await requests.ask("list", "GET", "/v1/videos?limit=5")
        await requests.ask("poll", "GET", f"/v1/videos/{video}")
        count += 1
        await asyncio.sleep(max(0.0, began + _POLL_SECONDS - time.monotonic()))
    requests.close()


async def _follower(number: int, port: int, key: str, video: str, end: float, found: Found) -> None:
    await asyncio.sleep(_POLL_SECONDS * (number % 50) / 50)
    while time.monotonic() < end:
        await Connection(port, found, key).follow(f"/v1/videos/{video}/events", end)


async def _page(port: int, end: float, found: Found) -> None:
    while time.monotonic() < end:
        began = time.monotonic()
        connection = Connection(port, found)
        body = await connection.ask("page", "GET", "/")
        if b"</html>" not in body:
            found.errors["page: incomplete"] += 1
        connection.close()
        await asyncio.sleep(max(0.0, began + _PAGE_SECONDS - time.monotonic()))


async def _open_page(port: int, end: float, found: Found) -> None:
    """Ask for what an open page asks for."""
    connection = Connection(port, found)
    drawn: dict[str, dict[str, str]] = {panel: {} for panel in _PANELS}
    while time.monotonic() < end:
        began = time.monotonic()
        await connection.ask("states", "GET", "/tandem/now")
        for panel, path in _PANELS.items():
            body = await connection.ask(f"panel {panel}", "POST", f"/{path}", {**_CALL, "drawn": drawn[panel]})
            drawn[panel] |= json.loads(body)["digests"] if body else {}
        await asyncio.sleep(max(0.0, began + _POLL_SECONDS - time.monotonic()))
    connection.close()


def _add_waiting(path: Path, video: str, count: int) -> None:
    """Add copies of a video to the end of the queue."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.row_factory = sqlite3.Row
        row = dict(connection.execute("SELECT * FROM jobs WHERE id = ?", (video,)).fetchone())
        (last,) = connection.execute("SELECT max(position) FROM jobs").fetchone()
        del row["number"]
        row |= {"state": "queued", "owner": None, "instance": None, "started": None, "live": None, "begun": 0}
        row["lane"] = json.dumps([None, *json.loads(row["lane"])[1:]])
        for number in range(count):
            values = {**row, "id": secrets.token_hex(4), "position": last + 1 + number}
            connection.execute(
                f"INSERT INTO jobs ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", [*values.values()]
            )


async def _measure(
    server: Server, keys: list[str], clients: int, seconds: float, queued: int, waiting: int
) -> dict[str, Any]:
    port = int(server.url.rstrip("/").rpartition(":")[2])
    found, web = Found(), psutil.Process(server.process.pid)
    videos = []
    for key in keys:
        connection = Connection(port, found, key)
        made = [json.loads(await connection.ask("create", "POST", "/v1/videos", _BODY))["id"] for _ in range(queued)]
        videos.append(made)
        connection.close()
    if waiting:
        _add_waiting(server.cache_dir / "jobs.sqlite", videos[-1][-1], waiting)
    idle = Found()
    end = time.monotonic() + 5
    await asyncio.gather(_page(port, end, idle), _open_page(port, end, idle))
    before, own, began = _cpu(web), sum(os.times()[:2]), time.monotonic()
    end = began + seconds
    tasks = [_page(port, end, found), _open_page(port, end, found)]
    for number in range(clients):
        place = number % len(keys)
        key, video = keys[place], videos[place][number // len(keys) % queued]
        tasks.append(_client(number, port, key, video, end, found))
        if number // len(keys) % 2 == 0:
            tasks.append(_follower(number, port, key, video, end, found))
    watching = asyncio.create_task(_watch(web, end))
    await asyncio.gather(*tasks)
    after, took = _cpu(web), time.monotonic() - began
    return {
        "clients": clients,
        "streams": len(tasks) - 2 - clients,
        "seconds": round(took, 1),
        "answers": dict(sorted(found.statuses.items())),
        "events": dict(found.events),
        "errors": dict(found.errors),
        "times before, s": {kind: _described(times) for kind, times in idle.seconds.items()},
        "times, s": {kind: _described(times) for kind, times in found.seconds.items()},
        "processors": {
            "web process": round((after[0] - before[0]) / took, 2),
            "workers": round((after[1] - before[1]) / took, 2),
            "clients": round((sum(os.times()[:2]) - own) / took, 2),
        },
        "of the web process": await watching,
    }


async def _watch(web: psutil.Process, end: float) -> dict[str, Any]:
    most: dict[str, Any] = {"open files": 0, "threads": 0, "MB": 0}
    while time.monotonic() < end:
        now = {"open files": web.num_fds(), "threads": web.num_threads(), "MB": web.memory_info().rss // 1_000_000}
        most = {name: max(most[name], now[name]) for name in most}
        await asyncio.sleep(1)
    return {f"most {name}": value for name, value in most.items()}


def _cpu(web: psutil.Process) -> tuple[float, float]:
    """Return the processor time of the web process and of its children, in seconds."""
    own = web.cpu_times()
    children = [child.cpu_times() for child in web.children(recursive=True)]
    return own.user + own.system, sum(one.user + one.system for one in children)


def _described(times: list[float]) -> dict[str, Any]:
    ordered = sorted(times)
    return {
        "count": len(ordered),
        "median": round(statistics.median(ordered), 4),
        "95 %": round(ordered[int(0.95 * (len(ordered) - 1))], 4),
        "worst": round(ordered[-1], 4),
    }


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--keys", type=int, default=10)
    parser.add_argument("--queued", type=int, default=3, help="videos of each key")
    parser.add_argument("--waiting", type=int, default=0, help="further videos in the queue")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = make_cache(Path(folder))
        keys = [ApiKeys(cache).add(f"key{number}", KeyLimits()) for number in range(options.keys)]
        with serving(cache) as server:
            counts = options.clients, options.seconds, options.queued, options.waiting
            found = asyncio.run(_measure(server, keys, *counts))
        log = (cache / "logs" / "tandem.log").read_text(encoding="utf-8") + (cache / "server.txt").read_text("utf-8")
        if "Traceback" in log:
            found["errors"]["logged"] = log.count("Traceback")
            sys.stderr.write(log[-3000:])
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 1 if found["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
