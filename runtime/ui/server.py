"""Serves a page, behind the security middleware."""

import socket
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import gradio as gr
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.core.environment import collect_garbage_as_usual
from runtime.core.processes import raise_open_files, return_freed_memory
from runtime.server import security
from runtime.server.connections import PageServer, limits_for, listen
from runtime.server.logins import login_check
from runtime.server.serve import address_of
from runtime.server.video_api import ApiMiddleware
from runtime.server.visitors import Visitors
from runtime.ui import theme
from runtime.ui.form import SERVED, STREAMED, WATCHING
from runtime.upstream import gradio as private

# The middleware closes uploads; this is a second barrier.
_MAX_UPLOAD_BYTES = 1024
# Of Gradio's queue. Handlers of `SERVED` events use a thread each.
SLOTS = sum(group["concurrency_limit"] for group in (SERVED, WATCHING, STREAMED))
# Gradio keeps a copy of the page's state for each session.
_MAX_SESSIONS = 300


# What Gradio does of itself and Tandem does otherwise or not; for `share` see `tunnel`.
_OFF = dict.fromkeys(("inbrowser", "share", "run_history", "enable_monitoring", "ssr_mode", "pwa", "mcp_server"), False)


@dataclass(frozen=True, kw_only=True)
class Site:
    """A page with everything that is served with it.

    Attributes:
        names: returns the host names that the page answers to; `None` stands for any.
        submissions: what queues the job of a call before the call is answered, by `api_name`.
        auth: user and password.
        auth_message: what the login page asks for.
        visitors: of a visitors' page.
        routes: matched before gradio's own.
        api: the HTTP API, which is served beside the page.
    """

    page: gr.Blocks
    names: Callable[[], frozenset[str] | None]
    submissions: Mapping[str, security.Submit]
    auth: tuple[str, str] | None
    auth_message: str
    visitors: Visitors | None = None
    routes: Sequence[BaseRoute] = ()
    api: ASGIApp | None = None

    def middleware(self) -> list[Middleware]:
        """Return what stands before Gradio's app."""
        stack = [*security.middleware(self.names, self.visitors, self.submissions)]
        stack.append(Middleware(PageMiddleware, head=theme.head()))
        return stack if self.api is None else [Middleware(ApiMiddleware, api=self.api), *stack]


def start(
    site: Site,
    host: str,
    port: int,
    sockets: list[socket.socket] | None = None,
    logins: private.Logins | None = None,
) -> str:
    """Serve a page until `stop`; return its address.

    Args:
        sockets: that listen there already.
        logins: of an earlier process with the same page.

    Raises:
        OSError: if the port is taken.
    """
    return_freed_memory()
    collect_garbage_as_usual()
    server = PageServer(listen(host, port) if sockets is None else sockets, limits_for(raise_open_files()))
    url = address_of(host, port)
    routes = [*theme.files(), theme.manifest(), *site.routes]
    private.poll_less(site.page)
    try:
        with private.served_by(server, url, logins):
            site.page.launch(
                server_name=f"[{host}]" if ":" in host else host,
                server_port=port,
                auth=None if site.auth is None else login_check(site.auth),
                auth_message=site.auth_message if site.auth else None,
                prevent_thread_lock=True,
                quiet=True,
                footer_links=[],
                num_workers=0,
                max_file_size=_MAX_UPLOAD_BYTES,
                max_threads=SLOTS,
                state_session_capacity=_MAX_SESSIONS,
                favicon_path=theme.ICON,
                theme=theme.theme(),
                app_kwargs={"middleware": site.middleware(), "routes": routes},
                **_OFF,
            )
    except BaseException:
        server.close()
        raise
    return url


def stop(page: gr.Blocks) -> None:
    """Stop serving without waiting for pages, which keep a connection open while they are shown."""
    page.close(verbose=False)


_END_OF_HEAD = b"</head>"
# Copies of the page, of 0.3 MB: one for each address and user.
_MOST_PAGES = 16


class PageMiddleware:
    """ASGI middleware that adds title, style and script to every HTML page before it leaves the server, and keeps it.

    Gradio adds them only once its own script has started and the user has logged in; until then the page would be
    unstyled. It renders its page for each request, which takes most of the time of an answer; the page is the same for
    all requests with the same `upstream.gradio.page_key`.

    Args:
        head: HTML for the end of each page's head.
    """

    def __init__(self, app: ASGIApp, head: str) -> None:
        self._app = app
        self._head = head.encode()
        self._pages: OrderedDict[Hashable, tuple[Message, bytes]] = OrderedDict()
        self._config: object = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        config, key = private.page_key(scope)
        if config is not self._config:
            self._config, self._pages = config, OrderedDict()
        pages = self._pages
        if key is not None and key in pages:
            pages.move_to_end(key)
            start, page = pages[key]
            await send({**start, "headers": list(start["headers"])})
            await send({"type": "http.response.body", "body": page})
            return
        begun: Message | None = None
        body = b""

        async def collect(message: Message) -> None:
            nonlocal begun, body
            if message["type"] == "http.response.start" and _is_page(message):
                begun = message
            elif begun is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    page = body.replace(_END_OF_HEAD, self._head + _END_OF_HEAD, 1)
                    headers = MutableHeaders(scope=begun)
                    headers["content-length"] = str(len(page))
                    if key is not None and begun["status"] == HTTPStatus.OK and "set-cookie" not in headers:
                        pages[key] = {**begun, "headers": list(begun["headers"])}, page
                        if len(pages) > _MOST_PAGES:
                            pages.popitem(last=False)
                    await send(begun)
                    await send({"type": "http.response.body", "body": page})

        await self._app(scope, receive, collect)


def _is_page(message: Message) -> bool:
    return MutableHeaders(scope=message).get("content-type", "").startswith("text/html")
