"""The gate before gradio's server: what of it this app does not use is shut.

Uploads, the proxy and files of other servers answer 403: nobody puts files here, and this server fetches nothing. On
loopback, a page of another site is turned away: by the host it asks for where it points its own name at this machine,
by its origin where it sends a request across. Anywhere, what a browser sends for a page of another origin is turned
away unless it only reads: the engine library's buttons delete. The content policy makes the browser itself refuse
whatever is not served from here.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SHUT = (
    "/gradio_api/upload",
    "/gradio_api/proxy=",
    "/gradio_api/file=http:",
    "/gradio_api/file=https:",
    "/gradio_api/file/http",
    "/gradio_api/vibe-",
    "/gradio_api/undo-vibe-",
    "/gradio_api/process_recording",
    "/gradio_api/deep_link",
    "/gradio_api/custom_component",
    "/monitoring",
)
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
# What a browser says of requests of this page, and of its user's own; other programs say nothing.
_OWN = frozenset({"same-origin", "none"})
# gradio's page compiles templates and styles in the browser, hence the two "unsafe".
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)
_HEADERS = (
    ("Content-Security-Policy", _POLICY),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
)


class Gate:
    """ASGI middleware.

    Args:
        app: what lies behind.
        host: where the server listens; on loopback only loopback names may be asked for.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._names = _LOOPBACK if host in _LOOPBACK else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        foreign = Headers(scope=scope).get("sec-fetch-site", "none") not in _OWN
        if foreign and scope["method"] not in _READING:
            await PlainTextResponse("This server answers to its own pages only.", 403)(scope, receive, send)
            return
        if self._names is not None and not _is_local(Headers(scope=scope), self._names):
            await PlainTextResponse("This server answers to this machine only.", 403)(scope, receive, send)
            return
        if scope["path"].replace("//", "/").startswith(_SHUT):
            await PlainTextResponse("Not offered here.", 403)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS:
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, with_headers)


def _is_local(headers: Headers, names: frozenset[str]) -> bool:
    origin = headers.get("origin")
    return _host_name(headers.get("host", "")) in names and (
        origin is None or _host_name(urlsplit(origin).netloc) in names
    )


def _host_name(host: str) -> str:
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).strip("[]").lower()
