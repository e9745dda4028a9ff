"""The middleware in front of Gradio's app, as ASGI classes in the style of Starlette's own.

- Requests from pages of other sites are refused: on loopback by the Host header (DNS rebinding) and the Origin header,
  elsewhere by fetch metadata (Sec-Fetch-Site) and the Origin header. Programs send no such headers and are accepted.
- Forwarding headers, from which Gradio builds the page's addresses, are only accepted if they name the share link.
- The login is checked here only. Wrong attempts are limited, see `logins`.
- Only the routes of `gradio_requests` are open. Bodies are validated before Gradio reads them.
- On the visitors' page, a session belongs to the visitor who started it.
- Jobs are queued before the calls that submit them are answered: Gradio accepts a call long before it runs it.
- The content security policy lets the page load resources from this server only.

References: OWASP CSRF cheat sheet (fetch metadata, origin check), Starlette `TrustedHostMiddleware`.
"""

import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server import gradio_requests
from runtime.server.conditional import ConditionalMiddleware
from runtime.server.connections import set_login
from runtime.server.gradio_requests import RefusedError, access
from runtime.server.logins import LoginLimits, forwarded_address, network_of
from runtime.server.visitor_limits import UploadLimit
from runtime.server.visitors import Visitors
from runtime.upstream import gradio as private

_SAFE_METHODS = frozenset({"GET", "HEAD"})
# Values of Sec-Fetch-Site for requests of the page itself and of the browser's address bar.
_OWN_SITE = frozenset({"same-origin", "none"})
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](?::[0-9]{1,5})?")
_PORTS = {"http": 80, "https": 443}
# Gradio builds URLs from these headers.
_FORWARDED = frozenset({b"x-forwarded-host", b"x-forwarded-proto", b"x-gradio-server"})
# Gradio's page compiles templates and styles in the browser, which needs 'unsafe-eval' and 'unsafe-inline'.
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

# Of one user of a page, and of all, at once.
_MOST_UPLOADS, _MOST_UPLOADS_ALL = 4, 8

# Queues the job of a call. It is given the call's values and the visitor's name, and returns the job, or an error.
Submit = Callable[[Sequence[Any], str], Awaitable[object]]


def middleware(
    host_names: Callable[[], frozenset[str] | None],
    visitors: Visitors | None = None,
    submissions: Mapping[str, Submit] | None = None,
) -> list[Middleware]:
    """Return the middleware of a page, outermost first.

    Args:
        host_names: returns the host names that the page answers to; `None` stands for any.
        visitors: of a share link; `None` on the owner's page.
        submissions: by the `api_name` of the page's function.
    """
    return [
        Middleware(SecurityHeadersMiddleware),
        Middleware(ExceptionMiddleware, handlers={RefusedError: _refusal}),
        Middleware(CrossSiteMiddleware, host_names=host_names, visitors=visitors),
        Middleware(AuthenticationMiddleware, backend=GradioLogin(visitors)),
        Middleware(AccessMiddleware, visitors=visitors),
        Middleware(ValidationMiddleware, visitors=visitors, submissions=submissions or {}),
        Middleware(ConditionalMiddleware),
        Middleware(EndedStreamMiddleware),
    ]


def _too_many_uploads() -> RefusedError:
    return RefusedError("server.uploads_busy", 429)


def _refusal(request: Request, error: Exception) -> Response:
    """Return the response for a refused request: text, or what Gradio's page shows of a refused call."""
    assert isinstance(error, RefusedError)
    if request.url.path in {gradio_requests.JOIN, gradio_requests.RUN, gradio_requests.CANCEL}:
        return JSONResponse({"detail": error.detail}, error.status_code)
    return PlainTextResponse(error.detail, error.status_code)


class SecurityHeadersMiddleware:
    """Adds security headers to every response, and closes websockets, which the page does not use."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS:
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._app(scope, receive, send_with_headers)


class EndedStreamMiddleware:
    """Completes event streams that Gradio breaks off with an error after they began.

    A stream that is opened again while the first one ends, as after a reset connection, loses its session. Gradio sends
    that as an event and then raises status 404, which Starlette cannot send any more. If the client is gone, Gradio
    raises a KeyError instead when it forgets the session, which the other stream has done.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        started = gone = False

        async def sent(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        async def received() -> Message:
            nonlocal gone
            message = await receive()
            gone = gone or message["type"] == "http.disconnect"
            return message

        try:
            await self._app(scope, received, sent)
        except KeyError:
            if not (started and gone):
                raise
        except RuntimeError as error:
            if not (started and isinstance(error.__cause__, HTTPException)):
                raise
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class CrossSiteMiddleware:
    """Refuses requests from pages of other sites, and requests with another host name."""

    def __init__(
        self, app: ASGIApp, host_names: Callable[[], frozenset[str] | None], visitors: Visitors | None
    ) -> None:
        self._app = app
        self._host_names = host_names
        self._visitors = visitors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "http":
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        site, origin, host = headers.get("sec-fetch-site"), headers.get("origin"), headers.get("host")
        # A link on another site may open this page; that site's scripts cannot read it.
        navigates = (
            scope["method"] in _SAFE_METHODS
            and access(scope["method"], scope["path"]) == "public"
            and headers.get("sec-fetch-mode", "navigate") == "navigate"
        )
        if site is not None and site not in _OWN_SITE and not navigates:
            raise RefusedError("server.other_site", 403)
        names = self._host_names()
        origins: set[tuple[str, str, int | None] | None] = set()
        # Programs may leave it out with HTTP/1.0, as health checks do; browsers send it.
        if host is not None or scope["http_version"] != "1.0":
            if _HOST.fullmatch(host or "") is None:
                raise RefusedError("server.host_invalid", 400)
            if names is not None and _host_name(host or "") not in names:
                raise RefusedError("server.host_other", 403)
            origins.add(_origin(f"{scope['scheme']}://{host}"))
        if self._visitors is not None:
            origins.add(_origin(self._visitors.link))
        if origin is None or _origin(origin) in origins - {None}:
            return
        # Elsewhere than on loopback, a proxy may end TLS or change the port; there browsers send Sec-Fetch-Site.
        if names is not None or (site is None and not navigates):
            raise RefusedError("server.other_site", 403)


class GradioLogin(AuthenticationBackend):
    """Authenticates a request by the cookie of Gradio's login.

    The credentials have the scope "login" if the request has a valid cookie or the page needs no login. The user's name
    is the visitor's name on the visitors' page, and empty on the owner's page.
    """

    def __init__(self, visitors: Visitors | None) -> None:
        self._visitors = visitors

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser] | None:
        """Return credentials and user; `None` if the request needs a login and has none."""
        app = conn.scope["app"]
        token = private.login_token(app, conn.cookies)
        if token is None and private.requires_login(app):
            return None
        name = "" if self._visitors is None or token is None else self._visitors.name_of(token)
        return AuthCredentials(["login"]), SimpleUser(name)


class AccessMiddleware:
    """Refuses closed routes, requests without a login, and too many login attempts or simultaneous requests."""

    def __init__(self, app: ASGIApp, visitors: Visitors | None) -> None:
        self._app = app
        self._visitors = visitors
        self._logins = LoginLimits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        set_login(scope, "login" in scope["auth"].scopes)
        needed = self._check(scope)
        visitors = self._visitors
        if scope["method"] == "POST" and scope["path"].rstrip("/") == gradio_requests.LOGIN:
            await self._log_in(scope, receive, send)
            return
        # A page loads many public assets at once; they are not counted.
        if visitors is None or needed == "public":
            await self._app(scope, receive, send)
            return
        name = scope["user"].display_name
        if not visitors.enter(name):
            raise RefusedError("server.requests_busy", 429)
        try:
            await self._app(scope, receive, send)
        finally:
            visitors.leave(name)

    def _check(self, scope: Scope) -> gradio_requests.Access:
        method, path = scope["method"], scope["path"]
        needed = access(method, path, visitors=self._visitors is not None)
        if needed is None:
            raise RefusedError("server.route_closed", 403)
        if needed == "login" and "login" not in scope["auth"].scopes:
            raise RefusedError("server.login_needed", 401)
        return needed

    async def _log_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        now, address = time.monotonic(), self._address(scope)
        if not self._logins.admits(address, now):
            raise RefusedError("server.logins_busy", 429)

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < HTTPStatus.BAD_REQUEST:
                self._logins.right(address, now)
            await send(message)

        await self._app(scope, receive, send_and_count)

    def _address(self, scope: Scope) -> str | None:
        """Return where a request comes from; all of the tunnel's come from this machine."""
        if self._visitors is not None:
            return forwarded_address(Headers(scope=scope).get("x-forwarded-for", ""))
        return network_of(scope["client"][0]) if scope.get("client") else None


class ValidationMiddleware:
    """Validates headers, bodies and streams of requests to Gradio, checks the owner of their session, and submits jobs.

    The job of a call, or why there is none, is `submitted` in the state of the request that the function is given.
    """

    def __init__(self, app: ASGIApp, visitors: Visitors | None, submissions: Mapping[str, Submit]) -> None:
        self._app = app
        self._visitors = visitors
        self._submissions = submissions
        self._uploads = UploadLimit(_MOST_UPLOADS, _MOST_UPLOADS_ALL, _too_many_uploads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = scope["query_string"]
        scope = {**scope, "headers": self._supported(scope["headers"]), "query_string": b""}
        if gradio_requests.charset_problem(Headers(scope=scope).get("content-type", "")) is not None:
            raise RefusedError("server.form_encoding", 415)
        if scope["method"] == "POST" and gradio_requests.is_upload(scope["path"]):
            with self._uploads.receiving(getattr(scope.get("user"), "display_name", "")):
                body = await _read_body(receive, gradio_requests.MAX_UPLOAD_BYTES)
                await self._app(scope, _replayed(body, receive), send)
            return
        if scope["method"] == "POST":
            body = await _read_body(receive, gradio_requests.MAX_BODY_BYTES)
            path = scope["path"].rstrip("/")
            if path != gradio_requests.LOGIN and not path.startswith(gradio_requests.OWN):
                body = await self._validated(scope, body)
                # The length may have changed.
                scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
            receive = _replayed(body, receive)
        else:
            self._check_stream(scope, query)
        await self._app(scope, receive, send)

    async def _validated(self, scope: Scope, body: bytes) -> bytes:
        """Validate the body of a call, submit its job, and return the body as Gradio should read it.

        It has defaults for missing values, and names uploaded images as requests do.
        """
        app, path = scope["app"], scope["path"].rstrip("/")
        if path == gradio_requests.RESET:
            gradio_requests.read_reset(body)
            return body
        if path == gradio_requests.CANCEL:
            call = gradio_requests.read_cancel(body)
        else:
            functions = private.functions(app)
            # Gradio fails with status 500 if a call to a queued function bypasses the queue.
            queued = path != gradio_requests.RUN
            inputs = {
                number: len(function.defaults) for number, function in functions.items() if function.queued == queued
            }
            if path == gradio_requests.GENERATE:
                api = private.function_number(app, "generate")
                call = gradio_requests.read_call(body, inputs, api, functions[api].defaults)
            else:
                call = gradio_requests.read_call(body, inputs)
                api = call["fn_index"]
            body = json.dumps(call).encode()
        self._check_session(scope, call.get("session_hash"))
        if path in {gradio_requests.JOIN, gradio_requests.GENERATE}:
            await self._submit(scope, functions[api].api_name, call["data"])
        return body

    async def _submit(self, scope: Scope, function: str, values: Sequence[Any]) -> None:
        """Queue the job of a call, if it has one.

        Raises:
            RefusedError: if the visitor has too many calls open, or a call to the path of `/generate` has no job. Calls
                by pages and gradio_client go through `JOIN`; their streams report errors.
        """
        name = scope["user"].display_name
        if self._visitors is not None and private.open_calls(scope["app"], name) >= self._visitors.most_calls:
            raise RefusedError("server.requests_busy", 429)
        submit = self._submissions.get(function)
        if submit is None:
            return
        submitted = await submit(values, name)
        if isinstance(submitted, RefusedError) and scope["path"].rstrip("/") == gradio_requests.GENERATE:
            raise submitted
        scope["state"] = {**scope.get("state", {}), "submitted": submitted}

    def _check_stream(self, scope: Scope, query: bytes) -> None:
        """Check that the session or event of a stream exists, and that the session is the visitor's own."""
        app, path = scope["app"], scope["path"]
        session = None
        if path == gradio_requests.STREAM:
            sessions = parse_qs(query.decode("latin-1")).get("session_hash", [""])
            session = gradio_requests.read_session(sessions[0])
            if not private.has_session(app, session):
                raise RefusedError("server.not_found", 404, kind="session")
            scope["query_string"] = f"session_hash={session}".encode()
        elif path.startswith(gradio_requests.HEARTBEAT):
            session = path.removeprefix(gradio_requests.HEARTBEAT)
        elif path.startswith(f"{gradio_requests.GENERATE}/"):
            event = path.removeprefix(f"{gradio_requests.GENERATE}/")
            if not private.has_event(app, event):
                raise RefusedError("server.not_found", 404, kind="event")
        self._check_session(scope, session)

    def _check_session(self, scope: Scope, session: Any) -> None:
        if self._visitors is None or session is None:
            return
        if not self._visitors.owns(session, scope["user"].display_name):
            raise RefusedError("server.session_of_another", 403)

    def _supported(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the headers without foreign forwarding headers."""
        link = urlsplit("" if self._visitors is None else self._visitors.link)
        accepted = {(b"x-forwarded-host", link.netloc.encode()), (b"x-forwarded-proto", link.scheme.encode())}
        return [
            (name, value) for name, value in headers if name not in _FORWARDED or (value and (name, value) in accepted)
        ]


async def _read_body(receive: Receive, most: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedError("server.request_incomplete", 400)
        body += message.get("body", b"")
        if len(body) > most:
            raise RefusedError("server.body_too_large", 413, maximum=most)
        if not message.get("more_body", False):
            return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns a body that was already read."""
    replayed = False

    async def replay() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _origin(address: str) -> tuple[str, str, int | None] | None:
    """Return scheme, host and port of an address; `None`, which equals no origin, if it has none."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname:
        return None
    return parts.scheme, parts.hostname.lower(), port or _PORTS.get(parts.scheme)


def _host_name(host: str) -> str:
    """Return a host without its port and brackets, in lower case."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).strip("[]").lower()
