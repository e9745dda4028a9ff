"""How clients reach the MCP server: Streamable HTTP at `/mcp`, and the standard streams of a program."""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import anyio
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.types import Receive, Scope, Send

from runtime.server.mcp.tools import McpTools
from runtime.server.video_requests import MAX_JSON_BYTES

_INPUT, _OUTPUT, _ERRORS = 0, 1, 2
_POLL_SECONDS = 0.1
_READ_BYTES = 1 << 16
# Lines that were read and not handled yet.
_MOST_LINES = 16


class HttpTransport:
    """The ASGI app of `/mcp`. Each request stands alone: there are no sessions that another key could use.

    Keys, Host and Origin are checked by the middleware of the API, in which it runs.

    Args:
        url: the address of the API, with a slash at the end.
    """

    def __init__(self, url: str) -> None:
        self._manager = StreamableHTTPSessionManager(
            McpTools(url).server(), stateless=True, max_request_body_size=MAX_JSON_BYTES
        )

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: Any) -> AsyncIterator[None]:
        """Serve while the app runs."""
        async with self._manager.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        await self._manager.handle_request(scope, receive, send)


@contextlib.contextmanager
def standard_streams() -> Iterator[tuple[int, int]]:
    """Yield descriptors of standard input and output for this process alone.

    Meanwhile what it and its child processes print goes to standard error, and their standard input is empty.
    Both would break the messages of a client.
    """
    sys.stdout.flush()
    incoming, outgoing = os.dup(_INPUT), os.dup(_OUTPUT)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, _INPUT)
    os.close(empty)
    os.dup2(_ERRORS, _OUTPUT)
    try:
        yield incoming, outgoing
    finally:
        sys.stdout.flush()
        os.dup2(outgoing, _OUTPUT)
        # A thread may still read the other one.
        os.close(outgoing)


async def serve_stdio(tools: McpTools, incoming: int, outgoing: int, stop: threading.Event) -> None:
    """Serve one client over descriptors, see `standard_streams`, until it closes its end or `stop` is set."""
    server = tools.server()
    # It iterates over its input, and needs nothing else of it.
    streams: Callable[..., Any] = stdio_server
    with os.fdopen(outgoing, "w", encoding="utf-8", newline="\n", closefd=False) as output:
        async with anyio.create_task_group() as group:

            async def end_on_stop() -> None:
                while not stop.is_set():
                    await asyncio.sleep(_POLL_SECONDS)
                group.cancel_scope.cancel()

            group.start_soon(end_on_stop)
            async with streams(stdin=_Lines(incoming), stdout=anyio.wrap_file(output)) as (received, sent):
                await server.run(received, sent, server.create_initialization_options())
            group.cancel_scope.cancel()


class _Lines:
    """The lines of a descriptor. The thread that reads them does not keep the process from ending."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def __aiter__(self) -> AsyncIterator[str]:
        loop, lines = asyncio.get_running_loop(), asyncio.Queue[str | None](_MOST_LINES)

        def put(line: str | None) -> None:
            asyncio.run_coroutine_threadsafe(lines.put(line), loop).result()

        def read() -> None:
            parts = []
            while data := os.read(self._descriptor, _READ_BYTES):
                first, *others = data.split(b"\n")
                parts.append(first)
                for part in others:
                    put(b"".join(parts).decode("utf-8", "replace"))
                    parts = [part]
            put(None)

        def read_until_closed() -> None:
            # The loop ends first if this process is asked to end.
            with contextlib.suppress(OSError, RuntimeError, CancelledError):
                read()

        threading.Thread(target=read_until_closed, name="mcp-input", daemon=True).start()
        while (line := await lines.get()) is not None:
            yield line
