"""The HTTP server of a page: uvicorn with deadlines for requests and limits on open connections.

Uvicorn waits without end for a request that was begun, and accepts connections until the process has no file
descriptors left. Here a request must arrive within seconds. When too many connections are open, one is closed: the one
that has waited longest for its client. Connections with a login are closed only for others with a login; if none waits
for its client, the one with the oldest request is closed.
"""

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, cast

import h11
import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from runtime.core.processes import trim_heaps

_MOST_CONNECTIONS = 1024
_LEAST_CONNECTIONS = 32
_MOST_AT_ONCE = 16
# Open files of a process that are not connections to a page.
_OTHER_FILES = 96
# Some connections are not counted yet, and some responses are files.
_FILES_PER_CONNECTION = 3
# Size of the kernel's queue of new connections.
_QUEUE = 512
_SHUTDOWN_SECONDS = 1
_CLOSE_SECONDS = 5.0
_TRIM_SECONDS = 60
_STATE_KEY = "connection"


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one page.

    Attributes:
        connections: the maximum number of open connections.
        strangers: the maximum number of those whose latest request had no login.
        users: the maximum number of those whose latest request had a login. It is smaller than `connections`, so that a
            user can always open another one.
        head_seconds: the time in which a request's head must arrive, from its first byte or the connection's start.
        body_seconds: the time in which its body must arrive after the head.
        at_once: the number of connections that are accepted at once. With few, the request of each is read before many
            newer connections need its place.
    """

    connections: int
    strangers: int
    users: int
    head_seconds: float = 10.0
    body_seconds: float = 20.0
    at_once: int = 2


def limits_for(open_files: int | None) -> ConnectionLimits:
    """Return the limits of a page in a process that may open so many files; `None` for any number."""
    most = _MOST_CONNECTIONS
    if open_files is not None:
        most = max(_LEAST_CONNECTIONS, min(most, (open_files - _OTHER_FILES) // _FILES_PER_CONNECTION))
    return ConnectionLimits(
        connections=most, strangers=most // 2, users=most * 3 // 4, at_once=min(most // 16, _MOST_AT_ONCE)
    )


def set_login(scope: Scope, logged_in: bool) -> None:
    """Record whether a connection's latest request has a login."""
    connection = scope.get("state", {}).get(_STATE_KEY)
    if isinstance(connection, _Connection):
        connection.set_login(logged_in)


class PageServer:
    """Serves an ASGI app on a thread, from `start` to `close`.

    Args:
        sockets: of `listen`; closed by `close`.
    """

    def __init__(self, sockets: list[socket.socket], limits: ConnectionLimits) -> None:
        self._sockets = sockets
        self._limits = limits
        self._protocol = functools.partial(_Connection, limits, [])
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, app: Any) -> None:
        """Start serving; return once requests are answered."""
        config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], self._protocol),
            ws="none",
            log_level="warning",
            backlog=self._limits.at_once,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            callback_notify=_trim_heaps,
            timeout_notify=_TRIM_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=(self._sockets,), name="page", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.001)
        for listener in self._sockets:
            listener.listen(_QUEUE)  # asyncio has set it to the number of connections that it accepts at once

    def close(self) -> None:
        """Stop serving. Requests that run have a second to end; other connections are closed at once."""
        if self._server is None or self._thread is None:
            for listener in self._sockets:
                listener.close()
            return
        self._server.should_exit = True
        errors = logging.getLogger("uvicorn.error")
        before = errors.level
        errors.setLevel(logging.CRITICAL)  # streams are cancelled, which uvicorn logs as errors
        self._thread.join(_CLOSE_SECONDS)
        errors.setLevel(before)


async def _trim_heaps() -> None:
    """Return the memory of answered requests to the system."""
    trim_heaps()


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen at each address of a host.

    Raises:
        OSError: if the host is unknown or the port is taken.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = dict.fromkeys((family, address) for family, _, _, _, address in infos)
    with contextlib.ExitStack() as opened:
        sockets = []
        for family, address in addresses:
            try:
                listener = socket.create_server(cast(Any, address), family=family)
            except OSError as error:
                # "localhost" may have an IPv6 address although the machine has no IPv6.
                if error.errno == errno.EADDRNOTAVAIL and len(addresses) > 1:
                    continue
                raise
            sockets.append(opened.enter_context(listener))
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, f"no address of {host} is available")
        opened.pop_all()
    return sockets


class _Connection(H11Protocol):
    """One connection. Closed if a request does not arrive in time, or if its place is needed.

    Args:
        others: the open connections of the page; this one is added while it is open.
    """

    def __init__(self, limits: ConnectionLimits, connections: "list[_Connection]", *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.logged_in = False
        self.app_state = {**self.app_state, _STATE_KEY: self}
        self._limits = limits
        self._all_connections = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited: object = None
        self._since = 0.0

    @property
    def waits(self) -> bool:
        """Whether this connection waits for its client: for a request, or until it has read what was sent."""
        return self.flow.write_paused or self.conn.their_state in {h11.IDLE, h11.SEND_BODY}

    def set_login(self, logged_in: bool) -> None:
        """Record whether the latest request has a login, and make room for it among those that have one."""
        self.logged_in = logged_in
        users = [connection for connection in self._all_connections if connection.logged_in]
        if len(users) > self._limits.users:
            _longest([connection for connection in users if connection is not self])._abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Make room for a new connection."""
        super().connection_made(transport)
        # asyncio does it only for sockets with a protocol number, which those of `socket.create_server` lack. Without
        # it, the second part of each answer of a kept connection waits for the client's delayed acknowledgment.
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._all_connections.append(self)
        self._await_request()
        strangers = [connection for connection in self._all_connections if not connection.logged_in]
        if len(strangers) > self._limits.strangers or len(self._all_connections) > self._limits.connections:
            _longest(strangers)._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the list of open connections."""
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        super().data_received(data)
        self._await_request()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._await_request()

    def pause_writing(self) -> None:
        """Wait until the client has read what was sent."""
        self._since = self.loop.time()
        super().pause_writing()

    def shutdown(self) -> None:
        """Close, but let a response end."""
        if self.waits:
            self.transport.abort()
        else:
            super().shutdown()

    def _await_request(self) -> None:
        """Start the deadline of a head or body that is now awaited; one that was begun keeps its deadline."""
        state = self.conn.their_state
        awaited = (state, self.cycle)
        if awaited == self._awaited:
            return
        self._awaited = awaited
        self._since = self.loop.time()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if state in {h11.IDLE, h11.SEND_BODY} and not self.transport.is_closing():
            seconds = self._limits.head_seconds if state is h11.IDLE else self._limits.body_seconds
            self._deadline = self.loop.call_later(seconds, self._abort)

    def _abort(self) -> None:
        self._leave()
        self.transport.abort()

    def _leave(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self in self._all_connections:
            self._all_connections.remove(self)


def _longest(connections: list[_Connection]) -> _Connection:
    """Return the one that has waited longest for its client; if none waits, the one with the oldest request."""
    return min(connections, key=lambda connection: (not connection.waits, connection._since))
