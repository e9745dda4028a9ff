"""Send random requests to the two pages of the app, which runs in a child process with a share link on loopback.

Checked for each response: a status below 500, no timeout, and no content of files outside the outputs or of another
visitor's video. Checked for the server: it runs and logs no traceback.
"""

import contextlib
import json
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from gradio_client import Client
from gradio_client.exceptions import AppError
from hypothesis import strategies as st

from runtime.core.request import FIELDS
from runtime.ui import form
from tests.app_server import ROOT, Server, make_cache, serving
from tests.fuzz import random_requests
from tests.fuzz.examples import try_many
from tests.fuzz.raw_http import Answer, send
from tests.fuzz.routes import Routes
from tests.sharing_app import link_of

FLAGS = ("--share", "--share-frames", "9", "--share-steps", "2", "--share-queue", "50", "--share-queue-all", "200",
         "--share-rate", "10000")  # fmt: skip
_JSON = {b"Content-Type": b"application/json"}
_FORM = {b"Content-Type": b"application/x-www-form-urlencoded"}
GENERATE = b"/gradio_api/call/generate"
# Accepted jobs are small: one that takes longer hangs.
JOB_SECONDS = 60.0


@dataclass
class Face:
    """One of the two pages, as a client reaches it."""

    name: str
    port: int
    fields: tuple[str, ...]
    forbidden: tuple[bytes, ...]
    headers: dict[bytes, bytes] = field(default_factory=dict)
    functions: dict[int, int] = field(default_factory=lambda: {0: 1})
    # The button that stops sharing would end the run.
    never: tuple[bytes, ...] = ()
    routes: Routes = field(default_factory=Routes)


@dataclass
class Attack:
    """The server and counts of its responses."""

    server: Server
    places: list[Path]
    faces: dict[str, Face]
    statuses: Counter[int] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    jobs: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    _written: Counter[Path] = field(default_factory=Counter)

    def ask(
        self,
        face: Face,
        kind: str,
        method: bytes,
        target: bytes,
        headers: dict[bytes, bytes] | None = None,
        body: bytes = b"",
    ) -> Answer:
        """Send one request and check the response."""
        answer = send(face.port, method, target, face.headers | (headers or {}), body)
        self.sent[kind] += 1
        self.statuses[answer.status] += 1
        self.slowest = max(self.slowest, answer.seconds)
        request = (face.name, method, target[:300], headers, body[:300])
        assert answer.status < 500, (request, answer)
        self._judge(face, answer.head + answer.body, request)
        return answer

    def _judge(self, face: Face, body: bytes, request: object) -> None:
        for marker in face.forbidden:
            assert marker not in body, (face.name, request, marker)
        self.check_server(request)

    def check_server(self, request: object = None) -> None:
        """Fail if the server has ended or logged a traceback."""
        assert self.server.process.poll() is None, request
        judged_logs(self.server, self._written, request)

    def watch(self, face: Face, target: bytes, ends: tuple[bytes, ...]) -> bytes:
        """Read a stream until one of `ends` arrives or the server closes it; return which one, or an empty string."""
        fields = {b"Host": b"127.0.0.1:%d" % face.port} | face.headers
        lines = b"".join(b"%s: %s\r\n" % one for one in fields.items())
        seen, stop = b"", time.monotonic() + JOB_SECONDS
        with socket.create_connection(("127.0.0.1", face.port), timeout=JOB_SECONDS) as connection:
            connection.sendall(b"GET %s HTTP/1.1\r\n%s\r\n" % (target, lines))
            while time.monotonic() < stop and (data := connection.recv(65_536)):
                seen += data
                found = next((end for end in ends if end in seen), None)
                if found is not None or seen.endswith(b"0\r\n\r\n"):
                    self._judge(face, seen, target)
                    return found or b""
        assert time.monotonic() < stop, f"{target!r} hangs: {seen[-300:]!r}"
        return b""

    # Requests by kind.

    def generate(self, face: Face, body: bytes) -> None:
        """Call `/generate`, and read its stream if it is accepted."""
        answer = self.ask(face, "generate", b"POST", GENERATE, _JSON, body)
        if answer.status == 200:
            event = json.loads(answer.body)["event_id"].encode()
            end = self.watch(face, GENERATE + b"/" + event, (b"event: complete", b"event: error"))
            self.jobs[f"generate: {end.decode().removeprefix('event: ') or 'closed'}"] += 1

    def join(self, face: Face, path: bytes, body: bytes) -> None:
        """Call one of the page's functions, and read its stream if it is accepted."""
        if any(call in body for call in face.never):
            return
        kind = path.rsplit(b"/", 2)[-2].decode()
        answer = self.ask(
            face,
            f"{kind}/{path.rsplit(b'/', 1)[-1].decode()}",
            b"POST",
            path,
            _JSON,
            body,
        )
        if answer.status == 200 and path.endswith(b"join"):
            session = json.loads(body)["session_hash"].encode()
            ends = (b'"process_completed"', b'"close_stream"', b'"unexpected_error"')
            end = self.watch(face, b"/gradio_api/queue/data?session_hash=" + session, ends)
            self.jobs[f"page: {end.decode().strip(chr(34)) or 'closed'}"] += 1

    def client(self, face: Face, client: Any, values: list[Any]) -> None:
        """Call `/generate` as API clients do."""
        try:
            json.dumps(values).encode()
            client.predict(*values, api_name="/generate")
            self.jobs["client: complete"] += 1
        except httpx.HTTPStatusError as error:
            assert error.response.status_code < 500, values
            self.jobs["client: refused"] += 1
        except (AppError, ValueError, TypeError, OSError) as error:  # by the server, or by the client itself
            assert "Traceback" not in str(error)
            self.jobs["client: refused"] += 1
        self.sent["gradio_client"] += 1
        self.check_server(values)


def judged_logs(server: Server, written: Counter[Path], request: object) -> None:
    """Fail if the server has logged a traceback.

    Args:
        written: how much of each log was read before; updated.
    """
    for log in (server.cache_dir / "server.txt", server.cache_dir / "logs" / "tandem.log"):
        size = log.stat().st_size
        if size != written[log]:
            with log.open("rb") as file:
                file.seek(written[log])
                logged = file.read().decode(errors="replace")
            written[log] = size
            assert "Traceback" not in logged, f"{request}\n{logged[-3000:]}"


def round_of(attack: Attack, clients: dict[str, Any], examples: int, seed: int) -> None:
    """Send requests of every kind to both pages."""
    for face in attack.faces.values():
        _round_of(attack, face, clients.get(face.name), examples, seed)
    attack.check_server()


def every_route(attack: Attack) -> None:
    """Send malformed requests to each route of both pages.

    Few without a login, which is refused first, and to those of the owner's page that the visitors' page has, too.
    """
    shared = attack.faces["visitor"].routes.methods.keys()
    for face in attack.faces.values():
        for path, request in face.routes.malformed(few=() if face.name == "visitor" else shared):
            attack.ask(face, f"route {path}", request.method, request.target, dict(request.headers), request.body)
    attack.check_server()


def _round_of(attack: Attack, face: Face, client: Any, examples: int, seed: int) -> None:
    body, readable = random_requests.bodies(face.fields), random_requests.calls(face.functions, face.fields)
    join = st.sampled_from([b"/gradio_api/queue/join", b"/gradio_api/queue/join", b"/gradio_api/run/predict"])
    try_many(random_requests.asked(face.fields), lambda one: attack.generate(face, one), examples, seed)
    try_many(body, lambda one: attack.generate(face, one), 3 * examples, seed)
    try_many(st.tuples(join, readable), lambda one: attack.join(face, *one), 2 * examples, seed)
    try_many(st.tuples(join, body), lambda one: attack.join(face, *one), 3 * examples, seed)
    if client is not None:
        wish = random_requests.field_values(face.fields)
        try_many(wish, lambda values: attack.client(face, client, values), examples // 8 + 1, seed)

    before = st.sampled_from([b"/gradio_api/file=", b"/gradio_api/file/", b"/video/", b"/gradio_api//file=", b"/file="])
    file = st.tuples(before, random_requests.paths(attack.places), random_requests.HEADERS)
    try_many(file, lambda one: attack.ask(face, "files", b"GET", one[0] + one[1], one[2]), 12 * examples, seed)
    other = st.tuples(
        random_requests.METHODS,
        random_requests.addresses(sorted(face.routes.methods)),
        random_requests.HEADERS,
        st.just(b"") | body,
    )
    try_many(other, lambda one: attack.ask(face, "other routes", *one), 12 * examples, seed)

    if face.routes.panels:
        calls = random_requests.panel_calls(face.routes.panels, len(form.NAMES))
        try_many(calls, lambda one: attack.ask(face, "panels", b"POST", one[0], _JSON, one[1]), 12 * examples, seed)

    small = st.tuples(st.sampled_from([b"/gradio_api/cancel", b"/gradio_api/reset", b"/login"]), body)
    kind = "cancel, reset, login"
    try_many(small, lambda one: attack.ask(face, kind, b"POST", one[0], _JSON, one[1]), 2 * examples, seed)
    try_many(
        random_requests.FORMS,
        lambda one: attack.ask(face, kind, b"POST", b"/login", _FORM, one),
        examples // 8 + 1,
        seed,
    )


@contextlib.contextmanager
def attacking(folder: Path) -> Iterator[tuple[Attack, dict[str, Any]]]:
    """Run the app, with canary files next to its outputs."""
    cache = make_cache(folder)
    marker, strange = secrets.token_hex(16), f"a red boat {secrets.token_hex(16)}"
    places = canaries(cache, marker)
    with serving(cache, *FLAGS, program=("-m", "tests.fuzz.app")) as server:
        port, user, password = link_of(cache)
        own = int(server.url.rstrip("/").rpartition(":")[2])
        first = Client(f"http://127.0.0.1:{port}/", auth=(user, password), verbose=False)
        video = first.predict(strange, seed=1, steps=1, frames=5, api_name="/generate")["video"]
        kept = next(path for path in (cache / "outputs").glob("*a-red-boat*.mp4"))
        assert strange.encode() in kept.read_bytes()
        places += [kept, Path("/video") / Path(video).name, Path(Path(video).name)]
        second = Client(f"http://127.0.0.1:{port}/", auth=(user, password), verbose=False)
        cookie = "; ".join(f"{name}={value}" for name, value in second.cookies.items()).encode()
        outside = (marker.encode(), b"root:x:0:0", b"Tandem's entry point. No sub")
        faces = [
            Face("own page", own, tuple(FIELDS), outside),
            Face("visitor", port, form.BASIC, (*outside, strange.encode()), {b"Cookie": cookie}),
            Face("stranger", port, form.BASIC, (*outside, strange.encode())),
        ]
        clients = {"own page": Client(server.url, verbose=False, download_files=False), "visitor": second}
        ports = [int(path.stem.partition("-")[2]) for path in cache.glob("routes-*.json")]
        visitors = next(one for one in ports if one != own)
        for face in faces:
            face.routes = Routes.read(cache, own if face.port == own else visitors)
        for face, client in ((faces[0], clients["own page"]), (faces[1], second)):
            face.functions = {one["id"]: len(one["inputs"]) for one in client.config["dependencies"]}
            button = [one["id"] for one in client.config["components"] if one["props"].get("elem_id") == "stop-sharing"]
            ends = [
                one["id"]
                for one in client.config["dependencies"]
                if any(target[0] in button for target in one["targets"])
            ]
            face.never = tuple(b'"fn_index": %d%c' % (one, end) for one in ends for end in b",}")
        attack = Attack(server, places, {face.name: face for face in faces})
        yield attack, clients
        attack.check_server()
        for client in (first, *clients.values()):
            client.close()
    log = cache / "logs" / "tandem.log"
    assert "Traceback" not in log.read_text(encoding="utf-8", errors="replace")


def canaries(cache: Path, marker: str) -> list[Path]:
    """Write files that must not be served; return their paths and those of other files of this machine."""
    outputs = cache / "outputs"
    secret = cache / "secret"
    for folder in (outputs, secret, cache / "gradio" / ("0" * 64), cache / "jobs"):
        folder.mkdir(parents=True, exist_ok=True)
    canaries = [
        cache / "canary.mp4",
        cache / "canary.txt",
        secret / "canary.mp4",
        outputs / "notes.txt",
        outputs / ".mp4",
    ]
    canaries += [
        cache / "gradio" / ("0" * 64) / "canary.mp4",
        cache / "jobs" / "canary.mp4",
        cache.parent / "canary.mp4",
    ]
    for path in canaries:
        path.write_text(marker)
    with contextlib.suppress(OSError):  # where links may not be made
        (outputs / "link.mp4").symlink_to(cache / "canary.mp4")
        (outputs / "linked").symlink_to(secret)
        (outputs / "round.mp4").symlink_to(outputs / "round.mp4")
        canaries += [outputs / "link.mp4", outputs / "linked" / "canary.mp4", outputs / "round.mp4"]
    return [
        *canaries,
        outputs,
        cache / "server.txt",
        ROOT / "app.py",
        Path("app.py"),
        Path("/etc/passwd"),
        Path("canary.mp4"),
    ]
