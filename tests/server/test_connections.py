"""Deadlines for requests and limits on connections, with real sockets."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from runtime.server import connections
from runtime.server.connections import ConnectionLimits, PageServer, limits_for, listen, set_login
from tests.waiting import until

HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n"
LOGIN = b"Login: yes\r\n"
SECONDS = 0.5
# For connections that must stay open.
LONG = 600.0


async def answer(request: Request) -> Response:
    """Answer a request, with a stream that does not end for /stream, and with one that stays silent for /silent."""
    set_login(request.scope, "login" in request.headers)
    if request.url.path == "/stream":

        async def stream() -> AsyncIterator[bytes]:
            while not await request.is_disconnected():
                yield bytes(65_536)

        return StreamingResponse(stream())
    if request.url.path == "/silent":

        async def silent() -> AsyncIterator[bytes]:
            yield b"silent"
            await asyncio.Event().wait()

        return StreamingResponse(silent())
    return PlainTextResponse(f"{len(await request.body())} bytes")


@contextlib.contextmanager
def serving(limits: ConnectionLimits) -> Iterator[int]:
    sockets = listen("127.0.0.1", 0)
    server = PageServer(sockets, limits)
    port = sockets[0].getsockname()[1]
    server.start(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])]))
    try:
        yield port
    finally:
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 4, "the server closes slowly"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


def connect(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(sent)
    return connection


def received(connection: socket.socket) -> bytes:
    """Return what arrives first; empty if the connection is closed."""
    try:
        return connection.recv(65_536)
    except ConnectionResetError:
        return b""


def reply(connection: socket.socket) -> bytes:
    """Return a whole response; what there is of it if the connection is closed."""
    seen = b""
    while b" bytes" not in seen and (data := received(connection)):
        seen += data
    return seen


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return received(connection) != b""
    except TimeoutError:
        return True


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET", HEAD, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc"],
    ids=["nothing", "a word", "half a head", "half a body"],
)
def test_a_request_that_does_not_arrive_is_closed(sent: bytes) -> None:
    with serving(ConnectionLimits(9, 9, 9, SECONDS, SECONDS)) as port, connect(port, sent) as connection:
        assert received(connection) == b""


def test_small_parts_of_an_answer_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every accepted socket has TCP_NODELAY."""
    made: list[int] = []
    before = connections._Connection.connection_made

    def look(self: connections._Connection, transport: asyncio.Transport) -> None:
        before(self, transport)
        made.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(connections._Connection, "connection_made", look)
    with serving(ConnectionLimits(9, 9, 9)) as port, connect(port, HEAD + b"\r\n") as connection:
        assert b" bytes" in reply(connection)
    assert made and all(made)


def test_a_trickle_of_bytes_does_not_extend_the_deadline() -> None:
    with serving(ConnectionLimits(9, 9, 9, SECONDS, LONG)) as port, connect(port, HEAD) as connection:
        began = time.monotonic()
        connection.settimeout(0.01)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 20:
                connection.sendall(b"X-A: b\r\n")
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(1):
                        break
        assert time.monotonic() - began < 20


def test_the_second_request_of_a_connection_has_a_deadline() -> None:
    with serving(ConnectionLimits(9, 9, 9, SECONDS, SECONDS)) as port, connect(port, HEAD + b"\r\n") as connection:
        assert b"200 OK" in reply(connection)
        connection.sendall(HEAD)
        assert received(connection) == b""


def test_a_request_in_time_is_answered_and_a_stream_stays_open() -> None:
    with serving(ConnectionLimits(9, 9, 9, SECONDS, SECONDS)) as port, connect(port) as slow:
        slow.sendall(b"POST / HTTP/1.1\r\nHost: a\r\n")
        slow.sendall(b"Content-Length: 4\r\n\r\nab")
        slow.sendall(b"cd")
        assert b"4 bytes" in reply(slow)
        with connect(port, HEAD.replace(b"/", b"/stream", 1) + b"\r\n") as stream:
            end = time.monotonic() + 2 * SECONDS
            while time.monotonic() < end:
                assert received(stream)


def test_connections_without_a_login_make_room_for_each_other() -> None:
    with serving(ConnectionLimits(8, 4, 6, LONG, LONG)) as port, contextlib.ExitStack() as stack:
        users = [stack.enter_context(connect(port, HEAD + LOGIN + b"\r\n")) for _ in range(4)]
        for one in users:
            assert b"200 OK" in reply(one)
            one.sendall(HEAD)  # the next request has begun
        strangers = [stack.enter_context(connect(port, HEAD)) for _ in range(20)]
        until(lambda: [is_open(one) for one in strangers] == [False] * 16 + [True] * 4)
        assert all(is_open(one) for one in users)
        # The next connection is answered, with and without a login.
        for sent in (HEAD, HEAD + LOGIN):
            with connect(port, sent + b"\r\n") as connection:
                assert b"200 OK" in reply(connection)


def test_a_user_can_open_another_connection_however_many_are_open() -> None:
    silent = HEAD.replace(b"/", b"/silent", 1) + LOGIN + b"\r\n"
    with serving(ConnectionLimits(6, 3, 4, LONG, LONG)) as port, contextlib.ExitStack() as stack:
        users: list[socket.socket] = []

        def open_another() -> None:
            users.append(stack.enter_context(connect(port, silent)))
            seen = b""
            while b"silent" not in seen:
                seen += (data := received(users[-1]))
                assert data

        for _ in range(4):
            open_another()
        # Strangers close none of them.
        strangers = [stack.enter_context(connect(port, HEAD)) for _ in range(10)]
        until(lambda: [is_open(one) for one in strangers] == [False] * 8 + [True] * 2)
        assert all(is_open(one) for one in users)
        for _ in range(6):
            open_another()
        until(lambda: [is_open(one) for one in users] == [False] * 6 + [True] * 4)


def test_a_users_connection_that_waits_for_its_client_makes_room_first() -> None:
    silent = HEAD.replace(b"/", b"/silent", 1) + LOGIN + b"\r\n"
    with serving(ConnectionLimits(4, 2, 2, LONG, LONG)) as port, contextlib.ExitStack() as stack:
        busy = stack.enter_context(connect(port, silent))
        assert b"200 OK" in received(busy)
        idle = stack.enter_context(connect(port, HEAD + LOGIN + b"\r\n"))
        assert b"200 OK" in reply(idle)
        with connect(port, HEAD + LOGIN + b"\r\n") as connection:
            assert b"200 OK" in reply(connection)
        assert received(idle) == b""
        assert is_open(busy)


def test_a_client_that_reads_nothing_makes_room() -> None:
    with (
        serving(ConnectionLimits(8, 1, 6, LONG, LONG)) as port,
        connect(port, HEAD.replace(b"/", b"/stream", 1) + b"\r\n") as unread,
    ):
        assert b"200 OK" in received(unread)

        def answered() -> bool:
            with connect(port, HEAD + b"\r\n") as connection:
                return b"200 OK" in reply(connection)

        until(answered)  # once the buffers are full


def test_limits_leave_room_for_other_files() -> None:
    for files in (256, 1024):
        # A response may be a file.
        assert 2 * limits_for(files).connections < files - 90
    assert limits_for(None) == limits_for(1_000_000)
    assert limits_for(64).strangers >= 8


def test_a_taken_port_is_an_error_and_leaves_no_socket() -> None:
    with contextlib.closing(listen("127.0.0.1", 0)[0]) as taken, pytest.raises(OSError, match="in use"):
        listen("localhost", taken.getsockname()[1])


def test_freed_memory_is_returned_to_the_system_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[float] = []
    monkeypatch.setattr(connections, "_TRIM_SECONDS", 0)
    monkeypatch.setattr(connections, "trim_heaps", lambda: trims.append(time.monotonic()))
    with serving(limits_for(None)):
        until(lambda: len(trims) > 1)
