"""The gate before gradio's server: what comes in is judged here, and what of gradio this app does not use is shut.

- Only the routes of `routes` are open, and what is sent to them is judged by `intake` before gradio reads it.
- On loopback, a page of another site is turned away: by the host it asks for where it points its own name at this
  machine, by its origin where it sends a request across. Anywhere, a browser's request for a page of another site is
  turned away unless it opens this page. Programs send neither header, and are let through.
- Files go out through `files`, and through nothing else.
- Passwords are not tried out: so many log-ins a minute, and no more.
- On a visitors' page all but the log-in needs one, and each session belongs to the visitor who began it.
- The content policy makes the browser itself refuse whatever is not served from here.
"""

import json
import re
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.ui import gradio_routes, request_validation
from runtime.ui.files import readable_range, send_file
from runtime.ui.request_validation import RefusedError
from runtime.ui.visitor_sessions import Lobby

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_READING = frozenset({"GET", "HEAD"})
# What a browser says of requests of this page, and of its user's own; other programs say nothing.
_OWN = frozenset({"same-origin", "none"})
_LOGINS_A_MINUTE = 20
_MINUTE = 60.0
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](?::[0-9]{1,5})?")
# gradio builds addresses from these.
_FORWARDED = {
    b"x-forwarded-host": re.compile(rb"[A-Za-z0-9._-]{1,253}(?::[0-9]{1,5})?"),
    b"x-forwarded-proto": re.compile(rb"https?"),
    b"x-gradio-server": None,
}
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
        names: returns the host names that are answered to; `None` stands for any.
        find: returns the file that a path names, if it may be served.
        lobby: of a visitors' page; `None` on the page of the person whose Tandem this is.
    """

    def __init__(
        self,
        app: ASGIApp,
        names: Callable[[], frozenset[str] | None],
        find: Callable[[str], Any],
        lobby: Lobby | None = None,
    ) -> None:
        self._app = app
        self._names = names
        self._find = find
        self._lobby = lobby
        self._logins: deque[float] = deque(maxlen=_LOGINS_A_MINUTE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS:
                    headers.setdefault(name, value)
            await send(message)

        visitor = None
        try:
            self._check_sender(scope)
            visitor = self._enter(scope)
            await self._pass_on(scope, receive, with_headers, visitor)
        except RefusedError as refused:
            await PlainTextResponse(refused.said, refused.status)(scope, receive, with_headers)
        finally:
            if visitor is not None and self._lobby is not None:
                self._lobby.leave(visitor)

    def _check_sender(self, scope: Scope) -> None:
        """Refuse what another site's page sends, and what asks for another host."""
        headers = Headers(scope=scope)
        site, origin, host = headers.get("sec-fetch-site"), headers.get("origin"), headers.get("host", "")
        # A link on another page opens this one; its scripts do not read it.
        opens = (
            scope["method"] in _READING
            and gradio_routes.needs(scope["method"], scope["path"]) == "nothing"
            and headers.get("sec-fetch-mode", "navigate") == "navigate"
        )
        foreign = site not in _OWN if site is not None else False
        if foreign and not opens:
            raise RefusedError("This server answers to its own pages only.", 403)
        if _HOST.fullmatch(host) is None:
            raise RefusedError("This is no host's name.", 400)
        names = self._names()
        if names is not None and (_host_name(host) not in names or not _is_of(origin, names)):
            raise RefusedError("This server answers to this machine only.", 403)
        if names is None and site is None and not _is_of(origin, _addressed(headers)) and not opens:
            raise RefusedError("This server answers to its own pages only.", 403)

    def _enter(self, scope: Scope) -> str | None:
        """Refuse what needs a log-in without one; return the visitor, who is inside from here on.

        A visitor is whoever has logged in: a session of their browser, or of their program.
        """
        path = scope["path"]
        token = _token(scope)
        logged_in = scope["app"].auth is None or token is not None
        if self._lobby is not None and self._lobby.closed:
            raise RefusedError("This is no longer shared.", 403)
        if scope["method"] == "POST" and path.rstrip("/") == gradio_routes.LOGIN:
            now = time.monotonic()
            if len(self._logins) == _LOGINS_A_MINUTE and now - self._logins[0] < _MINUTE:
                raise RefusedError("Too many tries to log in. Wait a minute.", 429)
            self._logins.append(now)
        is_file = _file_asked(scope, self._lobby) is not None
        needed = "login" if is_file else gradio_routes.needs(scope["method"], path)
        owners = path == gradio_routes.RUN or path.startswith(gradio_routes.PARCELS)
        if needed is None or (self._lobby is not None and owners):
            raise RefusedError("Not offered here.", 403)
        if needed == "login" and not logged_in:
            raise RefusedError("Log in first.", 401)
        # A page loads its parts many at once; they are everybody's.
        if self._lobby is None or token is None or needed == "nothing":
            return None
        visitor = self._lobby.name_of(token)
        if not self._lobby.enter(visitor):
            raise RefusedError("Too many requests at once. Close a tab, and try again.", 429)
        scope["tandem.visitor"] = visitor
        return visitor

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, visitor: str | None) -> None:
        path = scope["path"]
        query = scope["query_string"]
        scope = {**scope, "headers": _readable(scope["headers"]), "query_string": b""}
        asked = _file_asked(scope, self._lobby)
        if asked is not None:
            found = self._find(asked) if self._lobby is None else self._lobby.video(asked, visitor)
            if found is None:
                raise RefusedError("There is no such video here.", 404)
            await send_file(found, scope, receive, send)
            return
        if self._lobby is not None and path == "/robots.txt":
            await PlainTextResponse("User-agent: *\nDisallow: /\n")(scope, receive, send)
            return
        if scope["method"] == "POST" and path.rstrip("/") != gradio_routes.LOGIN:
            body = self._checked(scope, await _body(receive), visitor)
            # Its length may be another one now.
            scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
            receive = _again(body, receive)
        elif scope["method"] == "POST":
            receive = _again(await _body(receive), receive)
        else:
            self._check_stream(scope, query, visitor)
        await self._app(scope, receive, send)

    def _checked(self, scope: Scope, body: bytes, visitor: str | None) -> bytes:
        """Refuse what gradio could not read, and calls in the session of another visitor; return it made whole."""
        functions = scope["app"].get_blocks().fns
        path = scope["path"].rstrip("/")
        if path == gradio_routes.RESET:
            request_validation.read_reset(body)
            return body
        if path == gradio_routes.CANCEL:
            call = request_validation.read_cancel(body)
        else:
            # Those without a function are the browser's alone; around the queue, gradio answers an error with 500.
            inputs = {
                number: len(one.inputs)
                for number, one in functions.items()
                if one.fn is not None and bool(one.queue) == (path != gradio_routes.RUN)
            }
            api = next(number for number, function in functions.items() if function.api_name == "generate")
            if path == gradio_routes.GENERATE:
                call = request_validation.read_call(body, inputs, api, [one.value for one in functions[api].inputs])
                body = json.dumps(call).encode()
            else:
                call = request_validation.read_call(body, inputs)
        session = call.get("session_hash")
        if self._lobby is not None and session is not None and not self._lobby.owns(session, visitor):
            raise RefusedError("This session is another visitor's.", 403)
        return body

    def _check_stream(self, scope: Scope, query: bytes, visitor: str | None) -> None:
        """Refuse streams of sessions and events that are not there, which gradio would begin, and of other visitors."""
        path, line = scope["path"], scope["app"].get_blocks()._queue
        session = None
        if path == gradio_routes.STREAM:
            given = parse_qs(query.decode("latin-1")).get("session_hash", [""])
            session = request_validation.session_of(given[0])
            if session not in line.pending_messages_per_session:
                raise RefusedError("There is no such session.", 404)
            scope["query_string"] = f"session_hash={session}".encode()
        elif path.startswith(gradio_routes.HEARTBEAT):
            session = path.removeprefix(gradio_routes.HEARTBEAT)
        elif path.startswith(f"{gradio_routes.GENERATE}/"):
            event = path.removeprefix(f"{gradio_routes.GENERATE}/")
            known = event in line.event_ids_to_events
            if not known and not any(event in events for events in line.pending_event_ids_session.values()):
                raise RefusedError("There is no such event.", 404)
        if self._lobby is not None and session is not None and not self._lobby.owns(session, visitor):
            raise RefusedError("This session is another visitor's.", 403)


def _file_asked(scope: Scope, lobby: Lobby | None) -> str | None:
    """Return the file that a request asks for: a path, or the name of a visitor's video."""
    before = gradio_routes.FILE if lobby is None else gradio_routes.VIDEO
    is_one = scope["method"] in _READING and scope["path"].startswith(before)
    return str(scope["path"]).removeprefix(before) if is_one else None


def _token(scope: Scope) -> str | None:
    """Return the token of the log-in that a request comes with, if gradio knows it."""
    app = scope["app"]
    cookies = cookie_parser(Headers(scope=scope).get("cookie", ""))
    names = (f"access-token-{app.cookie_id}", f"access-token-unsecure-{app.cookie_id}")
    return next((cookies[name] for name in names if cookies.get(name) in app.tokens), None)


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedError("The request broke off.", 400)
        body += message.get("body", b"")
        if len(body) > request_validation.MAX_BODY_BYTES:
            raise RefusedError(f"A request has at most {request_validation.MAX_BODY_BYTES:,} bytes.", 413)
        if not message.get("more_body", False):
            return body


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read already, then what still comes."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _readable(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Leave out the headers that gradio stumbles over."""
    kept = []
    for name, value in headers:
        if name in _FORWARDED:
            form = _FORWARDED[name]
            if form is None or form.fullmatch(value) is None:
                continue
        if name == b"range" and not readable_range(value):
            continue
        kept.append((name, value))
    return kept


def _is_of(origin: str | None, names: frozenset[str]) -> bool:
    return origin is None or _host_name(_netloc(origin)) in names


def _addressed(headers: Headers) -> frozenset[str]:
    """Return the names by which a request addresses this server."""
    return frozenset(_host_name(headers[name]) for name in ("host", "x-forwarded-host") if name in headers)


def _netloc(address: str) -> str:
    try:
        return urlsplit(address).netloc
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).strip("[]").lower()
