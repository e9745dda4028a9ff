"""A hub on loopback that serves real folders over HTTP, with faults.

Each `Fault` applies to one path and a number of answers; the bytes that are sent are counted by path.
"""

import hashlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_CUT = frozenset({"break", "stall", "whole-break"})
REPOSITORY = "Wan-AI/Tiny-Diffusers"


@dataclass
class Fault:
    """A fault of a path, for the next `times` requests.

    Attributes:
        after: bytes that are sent before the fault.
        how: "break" (the connection ends), "stall" (no more bytes), "wrong" (other bytes), "longer" (more bytes),
            "short" (a byte less), "whole" (ranges are ignored), "whole-break" (both), "elsewhere" (another range than
            requested), "slow" (a piece at a time), or a status such as "500"; "302 URL" redirects.
        headers: with a status.
    """

    how: str
    after: int = 0
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Repository:
    """A repository: content by path (weights are in Git LFS), and the API's other fields."""

    files: dict[str, bytes]
    commit: str = COMMIT
    card: dict[str, Any] = field(default_factory=lambda: {"license": "apache-2.0"})
    extra: list[dict[str, Any]] = field(default_factory=list)

    def info(self) -> dict[str, Any]:
        """Return what `/api/models/…?blobs=true` answers."""
        siblings = [self._sibling(path, content) for path, content in self.files.items()]
        return {"id": REPOSITORY, "sha": self.commit, "cardData": self.card, "siblings": siblings + self.extra}

    def _sibling(self, path: str, content: bytes) -> dict[str, Any]:
        blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": blob}
        if path.endswith((".safetensors", ".bin")):
            digest = hashlib.sha256(content).hexdigest()
            entry |= {"blobId": "0" * 40, "lfs": {"size": len(content), "sha256": digest, "pointerSize": 130}}
        return entry


def of_folder(folder: Path) -> Repository:
    """Return a folder's files as a repository."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return Repository({path.relative_to(folder).as_posix(): path.read_bytes() for path in paths})


class LoopbackHub:
    """The hub while it is served.

    Attributes:
        repositories: by "owner/name".
        faults: by path, or "api".
        sent: bytes of content by path; `requests`: every request as (path, range, authorization).
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: dict[str, Fault] = {}
        self.sent: Counter[str] = Counter()
        self.requests: list[tuple[str, str, str]] = []
        self.gone = threading.Event()
        self.address = ""

    def ranges_of(self, path: str) -> list[str]:
        """Return the ranges that were requested of a path."""
        return [ranged for requested, ranged, _ in self.requests if requested == path]

    def fault(self, path: str) -> Fault | None:
        """Return the fault of a path and count it as used."""
        found = self.faults.get(path)
        if found is not None:
            found.times -= 1
            if found.times == 0:
                del self.faults[path]
        return found


@contextmanager
def served(**repositories: Repository) -> Iterator[LoopbackHub]:
    """Serve a hub with `REPOSITORY`, or those given by the name after the owner's."""
    hub = LoopbackHub()
    hub.repositories = {f"Wan-AI/{name}": one for name, one in repositories.items()}

    class Handler(_Handler):
        at = hub

    server = _Server(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.gone.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect, as the tests do."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    at: LoopbackHub

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Answer."""
        path = unquote(urlsplit(self.path).path).lstrip("/")
        if path.startswith("api/models/"):
            self._api(path.removeprefix("api/models/"))
        else:
            self._file(path)

    def _api(self, path: str) -> None:
        name, _, revision = path.partition("/revision/")
        self._note("api")
        fault = self.at.fault("api")
        repository = self.at.repositories.get(name)
        if fault is not None and fault.how[:3].isdecimal():
            self._status(fault)
        elif repository is None:
            self._plain(401, {"x-error-code": "RepoNotFound"})
        elif revision not in {"main", "v1", repository.commit}:
            self._plain(404, {"x-error-code": "RevisionNotFound"})
        elif fault is not None and fault.how == "garbage":
            self._body(200, b"<html>", {"content-type": "text/html"})
        elif fault is not None and fault.how == "stall":
            self.at.gone.wait(20)
        else:
            self._body(200, json.dumps(repository.info()).encode(), {"content-type": "application/json"})

    def _file(self, path: str) -> None:
        owner, name, resolve, commit, file = ([*path.split("/", 4), "", "", "", ""])[:5]
        repository = self.at.repositories.get(f"{owner}/{name}")
        self._note(file)
        if repository is None or resolve != "resolve" or commit != repository.commit or file not in repository.files:
            self._plain(404, {"x-error-code": "EntryNotFound"})
            return
        self._content(file, repository.files[file], self.at.fault(file))

    def _content(self, file: str, content: bytes, fault: Fault | None) -> None:
        how = "" if fault is None else fault.how
        if how[:3].isdecimal():
            assert fault is not None
            self._status(fault)
            return
        if how == "short":
            content = content[:-1]
        elif how == "wrong":
            content = bytes(byte ^ 1 for byte in content)
        elif how == "longer":
            content += content
        start = int(self.headers.get("range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        start = 0 if how.startswith("whole") else start
        if start >= len(content) > 0:
            self._plain(416, {"content-range": f"bytes */{len(content)}"})
            return
        stated = start + 1 if how == "elsewhere" else start
        headers = {"content-range": f"bytes {stated}-{len(content) - 1}/{len(content)}"} if start else {}
        self.send_response(206 if start else 200)
        for key, value in {**headers, "content-length": str(len(content) - start)}.items():
            self.send_header(key, value)
        self.end_headers()
        going = content[start:]
        if fault is not None and how in _CUT:
            going = going[: fault.after]
        if how == "slow":
            self._slowly(file, going)
        else:
            self.wfile.write(going)
            self.at.sent[file] += len(going)
        if how in _CUT:
            self.wfile.flush()
            if how == "stall":
                self.at.gone.wait(20)
            self.close_connection = True

    def _slowly(self, file: str, content: bytes) -> None:
        """Send a kilobyte at a time, so that the client can be stopped in between."""
        for place in range(0, len(content), 1024):
            if self.at.gone.is_set():
                return
            piece = content[place : place + 1024]
            self.wfile.write(piece)
            self.at.sent[file] += len(piece)
            time.sleep(0.02)

    def _status(self, fault: Fault) -> None:
        status, _, target = fault.how.partition(" ")
        self._plain(int(status), fault.headers | ({"location": target} if target else {}))

    def _plain(self, status: int, headers: dict[str, str]) -> None:
        self._body(status, b"{}", headers)

    def _body(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def _note(self, path: str) -> None:
        self.at.requests.append((path, self.headers.get("range", ""), self.headers.get("authorization", "")))
