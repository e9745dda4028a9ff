"""Send random requests to the HTTP API of `serve`, with a key, with another one, and without one.

Checked for each response: see `tests.fuzz.attack`; and that each error is OpenAI's object.
"""

import contextlib
import json
import secrets
import socket
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from hypothesis import strategies as st

from runtime.core.request import FIELDS
from runtime.server.api_keys import ApiKeys, KeyLimits
from tests.app_server import Server, make_cache, serving
from tests.fuzz import random_requests
from tests.fuzz.attack import canaries, judged_logs
from tests.fuzz.examples import try_many
from tests.fuzz.raw_http import TIMEOUT_SECONDS, Answer, exchange, send
from tests.fuzz.routes import Routes
from tests.waiting import until

_JSON = {b"Content-Type": b"application/json"}
_SIZES = st.sampled_from(["32x32", "64x32", "0x0", "x", "99999x1", "32×32"]) | random_requests.JSON
_SECONDS = st.sampled_from(["0.5", "1", "NaN", "-1", "1e999", "inf"]) | random_requests.SCALAR
_REFERENCES = st.sampled_from(
    [
        {"image_url": "data:image/png;base64,AAAA"},
        {"image_url": "http://127.0.0.1:1/"},
        {"image_url": "file:///etc/passwd"},
        {"file_id": "x"},
        "/etc/passwd",
    ]
)
_BOUNDARY = b"fuzz"
_NAMES = st.sampled_from([*FIELDS, "size", "input_reference", "backends[vae]", "loras[]", "steps[x]", "[", "x" * 300])
_TYPES = (
    b"application/json",
    b"application/json; charset=x",
    b"multipart/form-data; boundary=fuzz",
    b"multipart/form-data",
    b"multipart/form-data; boundary=" + b"y" * 300,
    b"text/plain",
    b"\xff",
)
_CHUNK_SIZES = (b"5", b"0", b"-1", b"ffffffffffffffff", b"5;x=y", b"0x5", b"", b" 5", b"\xff", b"5" * 40, b"3c")
_CHUNKED = b"Transfer-Encoding: chunked"
_FRAMINGS: tuple[list[bytes], ...] = (
    [_CHUNKED],
    [_CHUNKED, b"Content-Length: 5"],
    [_CHUNKED, _CHUNKED],
    [b"Transfer-Encoding: gzip, chunked"],
    [b"Transfer-Encoding: chunked, identity"],
    [b"Transfer-Encoding: xchunked"],
    [b"Content-Length: -1"],
    [b"Content-Length: 1e3"],
    [b"Content-Length: 5", b"Content-Length: 6"],
    [b"Content-Length: " + b"9" * 30],
    [b"Content-Length: 0"],
    [],
)
# Appended to a video, as a part that players skip, so that no buffer holds all of it.
_LARGE = 16 << 20
_ODD_HEADERS: Mapping[bytes, st.SearchStrategy[bytes]] = {
    b"Idempotency-Key": st.sampled_from([b"a", b"b", b"", b"x" * 300, b"\xff", b"a b"]),
    b"Range": st.sampled_from([b"bytes=0-0", b"bytes=-1", b"bytes=9-1", b"bytes=0-1,2-3", b"bytes=" + b"9" * 30]),
    b"Content-Type": st.sampled_from(_TYPES),
    b"Authorization": st.sampled_from([b"Bearer x", b"Bearer \xff", b"Basic eA==", b""]),
    b"Origin": st.sampled_from([b"null", b"http://evil.example"]),
}  # fmt: skip


@dataclass
class ApiAttack:
    """The server and counts of its responses.

    Attributes:
        callers: the headers of each kind of caller.
        forbidden: content that no response may have.
        foreign: the video of another key.
        video: its file.
        owner: the headers of its owner.
    """

    server: Server
    routes: Routes
    places: list[Path]
    callers: dict[str, dict[bytes, bytes]]
    forbidden: tuple[bytes, ...]
    foreign: str
    video: Path
    owner: dict[bytes, bytes]
    statuses: Counter[int] = field(default_factory=Counter)
    slowest: float = 0.0
    _written: Counter[Path] = field(default_factory=Counter)

    @property
    def port(self) -> int:
        """The server's port."""
        return int(self.server.url.rstrip("/").rpartition(":")[2])

    def ask(
        self, caller: str, method: bytes, target: bytes, headers: Mapping[bytes, bytes] | None = None, body: bytes = b""
    ) -> Answer:
        """Send one request and check the response."""
        answer = send(self.port, method, target, self.callers[caller] | dict(headers or {}), body)
        return self.judged(answer, (caller, method, target[:300], headers, body[:300]), method)

    def judged(self, answer: Answer, request: object, method: bytes = b"") -> Answer:
        """Check a response and the server."""
        self.statuses[answer.status] += 1
        self.slowest = max(self.slowest, answer.seconds)
        assert answer.status < 500, (request, answer)
        for marker in self.forbidden:
            assert marker not in answer.head + answer.body, (request, marker)
        if answer.status >= 400 and method != b"HEAD" and b"application/json" in answer.head:
            error = json.loads(answer.body)["error"]
            assert set(error) == {"message", "type", "param", "code"}, request
        assert self.server.process.poll() is None, request
        judged_logs(self.server, self._written, request)
        return answer


def every_route(attack: ApiAttack) -> None:
    """Send malformed requests to each route."""
    for caller in attack.callers:
        for _, request in attack.routes.malformed(few=() if caller == "anna" else attack.routes.methods):
            attack.ask(caller, request.method, request.target, dict(request.headers), request.body)


def round_of(attack: ApiAttack, examples: int, seed: int) -> None:
    """Send requests of every kind."""
    wishes = st.fixed_dictionaries(
        {"prompt": random_requests.FIELD_VALUES["prompt"][1]},
        optional={
            **{name: values for name, (_, values) in random_requests.FIELD_VALUES.items() if name != "prompt"},
            "size": _SIZES,
            "seconds": _SECONDS,
            "input_reference": _REFERENCES,
            "unknown": random_requests.JSON,
        },
    )
    valid = {"prompt": "a red boat", "model": "tiny", "frames": 5, "steps": 1, "size": "32x32"}
    one_wrong = st.tuples(st.sampled_from([*FIELDS, "size", "input_reference"]), random_requests.JSON).map(
        lambda pair: {**valid, pair[0]: pair[1]}
    )
    few_steps = {"steps": 1, "frames": 5}
    small = (wishes.map(lambda wish: {**wish, **few_steps}) | one_wrong | st.just(valid)).map(_kept_small)
    bodies = small.map(lambda wish: json.dumps(wish).encode())
    headers = st.fixed_dictionaries({}, optional=dict(_ODD_HEADERS))
    for caller in attack.callers:

        def post(body: bytes, caller: str = caller) -> None:
            attack.ask(caller, b"POST", b"/v1/videos", _JSON, body)

        def odd(one: tuple[bytes, dict[bytes, bytes]], caller: str = caller) -> None:
            attack.ask(caller, b"POST", b"/v1/videos", _JSON | one[1], one[0])

        def form(parts: list[tuple[str, bytes, bool]], caller: str = caller) -> None:
            kind = {b"Content-Type": b"multipart/form-data; boundary=" + _BOUNDARY}
            attack.ask(caller, b"POST", b"/v1/videos", kind, _form(parts))

        def other(one: tuple[bytes, bytes, dict[bytes, bytes]], caller: str = caller) -> None:
            attack.ask(caller, one[0], one[1], one[2])

        try_many(bodies, post, 6 * examples, seed)
        try_many(st.tuples(bodies | st.binary(max_size=80), headers), odd, 3 * examples, seed)
        part = st.tuples(_NAMES, st.binary(max_size=40) | st.sampled_from([b"1", b"32x32", b"auto"]), st.booleans())
        try_many(st.lists(part, max_size=5), form, 6 * examples, seed)
        names = random_requests.paths(attack.places) | st.sampled_from([attack.foreign.encode(), b"0" * 8, b"%00"])
        targets = st.tuples(
            st.sampled_from([b"/v1/videos/", b"/v1/models/", b"/v1//videos/", b"/v1/", b"/v1/cluster/"]),
            names,
            st.sampled_from([b"", b"/content", b"/content?variant=thumbnail", b"/events", b"?limit=0", b"/../x"]),
        ).map(b"".join)
        try_many(st.tuples(random_requests.METHODS, targets, headers), other, 6 * examples, seed)
        lists = st.tuples(
            st.just(b"GET"),
            st.sampled_from(
                [
                    b"?limit=1",
                    b"?limit=-1",
                    b"?limit=NaN",
                    b"?after=" + attack.foreign.encode(),
                    b"?order=x",
                    b"?after=%00",
                ]
            ).map(lambda query: b"/v1/videos" + query),
            headers,
        )
        try_many(lists, other, examples, seed)


def odd_framing(attack: ApiAttack, examples: int, seed: int) -> None:
    """Send bodies in chunks that are none, lengths that are wrong, and heads that are too large."""
    chunk = st.tuples(st.sampled_from(_CHUNK_SIZES), st.binary(max_size=60)).map(lambda one: b"%s\r\n%s\r\n" % one)
    body = st.lists(chunk | st.binary(max_size=40), max_size=6).map(b"".join)
    end = st.sampled_from([b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0;x=\xff\r\n\r\n", b"-1\r\n\r\n"])
    path = st.sampled_from([b"/v1/videos", b"/v1/cluster/join", b"/v1/models", b"/healthz"])

    for caller in attack.callers:
        own = [b"Host: 127.0.0.1:%d" % attack.port, b"Connection: close"]
        own += [b"%s: %s" % field for field in attack.callers[caller].items()]

        def ask(one: tuple[bytes, bytes, list[bytes], bytes], own: list[bytes] = own) -> None:
            method, target, more, rest = one
            data = b"\r\n".join([b"%s %s HTTP/1.1" % (method, target), *own, *more, b"", rest])
            answer = exchange(attack.port, data, patience=1.0)
            attack.judged(answer, (target, [field[:80] for field in more], rest[:300]), method)

        kinds = st.sampled_from([[], [b"Content-Type: application/json"]])
        framing = kinds.flatmap(lambda kind: st.sampled_from([[*kind, *one] for one in _FRAMINGS]))
        try_many(st.tuples(st.just(b"POST"), path, framing, st.tuples(body, end).map(b"".join)), ask, examples, seed)
        for size in (1_000, 8_000, 17_000, 70_000, 1_000_000):
            many = [b"X-%d: y" % number for number in range(size // 10)]
            for more in ([b"X-Long: " + b"y" * size], [b"Authorization: Bearer " + b"y" * size], many):
                ask((b"GET", b"/v1/models", more, b""))
            ask((b"GET", b"/v1/models?x=" + b"y" * size, [], b""))


def slow_readers(attack: ApiAttack, count: int = 20) -> float:
    """Have clients read a large video slowly, or stop; return the median seconds of another client's requests.

    One of them gets the whole file.
    """
    with attack.video.open("ab") as file:
        file.write(_LARGE.to_bytes(4, "big") + b"free" + bytes(_LARGE - 8))
    wanted = attack.video.read_bytes()
    request = b"GET /v1/videos/%s/content HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n" % (
        attack.foreign.encode(),
        attack.port,
    )
    request += b"".join(b"%s: %s\r\n" % field for field in attack.owner.items()) + b"\r\n"
    with contextlib.ExitStack() as stack:
        readers = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            one.settimeout(TIMEOUT_SECONDS)
            one.connect(("127.0.0.1", attack.port))
            one.sendall(request)
            readers.append(one)
        got = [bytearray() for _ in readers]
        seconds = []
        for _ in range(20):
            for number, one in enumerate(readers[: count // 2]):  # the others never read
                got[number] += one.recv(2048)
            seconds.append(attack.ask("anna", b"GET", b"/v1/models").seconds)
        while data := readers[0].recv(1 << 20):
            got[0] += data
    head, _, content = bytes(got[0]).partition(b"\r\n\r\n")
    assert b" 200 " in head and content == wanted
    return statistics.median(seconds)


def _kept_small(wish: dict[str, Any]) -> dict[str, Any]:
    """Return a request whose video is small if it is valid."""
    limits = {"steps": 2, "frames": 9}
    return {
        name: limits[name]
        if name in limits and isinstance(value, int | float) and limits[name] < value <= 4001
        else value
        for name, value in wish.items()
    }


def _form(parts: list[tuple[str, bytes, bool]]) -> bytes:
    lines = []
    for name, value, is_file in parts:
        file = b'; filename="../a.png"' if is_file else b""
        lines.append(
            b'--%s\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s' % (_BOUNDARY, name.encode(), file, value)
        )
    return b"\r\n".join([*lines, b"--%s--\r\n" % _BOUNDARY])


@contextlib.contextmanager
def attacking(folder: Path) -> Iterator[ApiAttack]:
    """Run `serve` with two keys, a video of each, and canary files next to the outputs."""
    cache = make_cache(folder)
    marker, strange = secrets.token_hex(16), f"a red boat {secrets.token_hex(16)}"
    places = canaries(cache, marker)
    keys = ApiKeys(cache)
    limits = KeyLimits(videos=200, per_hour=10_000, frames=9, steps=2, pixels=64 * 64)
    anna, ben = keys.add("anna", limits), keys.add("ben", limits)
    owner = {"Authorization": f"Bearer {ben}"}
    with (
        serving(cache, program=("-m", "tests.fuzz.app", "serve")) as server,
        httpx.Client(base_url=server.url, headers=owner, timeout=60) as http,
    ):
        wish = {"prompt": strange, "steps": 1, "frames": 5, "size": "32x32"}
        foreign = http.post("v1/videos", json=wish).json()["id"]
        until(lambda: http.get(f"v1/videos/{foreign}").json()["status"] == "completed", pause=0.1)
        port = int(server.url.rstrip("/").rpartition(":")[2])
        outside = (marker.encode(), b"root:x:0:0", b"Tandem's entry point. No sub", strange.encode())
        callers = {"anna": {b"Authorization": f"Bearer {anna}".encode()}, "nobody": {}}
        (video,) = (cache / "outputs").glob("*-a-red-boat-*.mp4")
        theirs = {b"Authorization": f"Bearer {ben}".encode()}
        attack = ApiAttack(server, Routes.read(cache, port), places, callers, outside, foreign, video, theirs)
        yield attack
        # It still answers, and makes videos.
        made = http.post("v1/videos", json=wish).json()["id"]
        until(lambda: http.get(f"v1/videos/{made}").json()["status"] == "completed", pause=0.1)
        assert http.get(f"v1/videos/{foreign}/content").status_code == 200
