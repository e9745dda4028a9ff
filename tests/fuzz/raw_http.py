"""An HTTP client for malformed requests, with timeouts."""

import contextlib
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

# A server that does not respond for this time hangs.
TIMEOUT_SECONDS = 15.0
# Streams do not end; their start is enough.
STREAM_SECONDS = 0.15
_MOST_BYTES = 2_000_000


@dataclass(frozen=True)
class Request:
    """A request."""

    method: bytes
    target: bytes
    headers: Mapping[bytes, bytes]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """A response; status 0 if the server closed the connection without one."""

    status: int
    head: bytes
    body: bytes
    seconds: float


def send(
    port: int, method: bytes, target: bytes, headers: Mapping[bytes, bytes] | None = None, body: bytes = b""
) -> Answer:
    """Send one request and read the response.

    Raises:
        TimeoutError: if no response arrives.
    """
    fields = {b"Host": b"127.0.0.1:%d" % port, b"Connection": b"close"} | dict(headers or {})
    if body or method == b"POST":
        fields.setdefault(b"Content-Length", b"%d" % len(body))
    lines = b"".join(b"%s: %s\r\n" % field for field in fields.items())
    return exchange(port, b"%s %s HTTP/1.1\r\n%s\r\n%s" % (method, target, lines, body))


def exchange(port: int, data: bytes, patience: float = TIMEOUT_SECONDS) -> Answer:
    """Send bytes and read the response.

    Args:
        patience: seconds after which nothing more is sent: the server may wait for the rest of a body.

    Raises:
        TimeoutError: if no response arrives.
    """
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECONDS) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before the whole request was sent
            connection.sendall(data)
        if not select.select([connection], [], [], patience)[0]:
            connection.shutdown(socket.SHUT_WR)
        head, rest = _until_blank_line(connection)
        seconds = time.monotonic() - began
        stream = b"text/event-stream" in head.lower()
        connection.settimeout(STREAM_SECONDS if stream else TIMEOUT_SECONDS)
        chunks = [rest]
        try:
            while (data := connection.recv(65_536)) and sum(map(len, chunks)) < _MOST_BYTES:
                chunks.append(data)
        except ConnectionResetError:
            pass
        except TimeoutError:
            if not stream:
                raise
    words = head.split(b" ", 2)
    return Answer(int(words[1]) if len(words) > 1 and words[1].isdigit() else 0, head, b"".join(chunks), seconds)


def _until_blank_line(connection: socket.socket) -> tuple[bytes, bytes]:
    seen = b""
    with contextlib.suppress(ConnectionResetError):
        while b"\r\n\r\n" not in seen and (data := connection.recv(65_536)):
            seen += data
    head, _, rest = seen.partition(b"\r\n\r\n")
    return head, rest
