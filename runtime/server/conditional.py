"""Conditional requests and ranges as in RFC 9110 (sections 13 and 14), for every route that sends files.

Starlette's `FileResponse` sends ETag, Last-Modified and ranges and reads If-Range, but always sends the file.
"""

import re
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from http import HTTPStatus

import anyio
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server.job_files import is_single_range

_TAG = re.compile(r'(?:W/)?("[\x21\x23-\x7e\x80-\xff]*")')
_SENT = frozenset({HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT})
# Of a response with status 304; RFC 9110, 15.4.5.
_KEPT = frozenset({b"cache-control", b"content-location", b"date", b"etag", b"expires", b"last-modified", b"vary"})


class ConditionalMiddleware:
    """Answers with status 304 if the client has the file, and ignores ranges that RFC 9110 ignores.

    Args:
        unsatisfiable: returns the response for a range beyond the end of a file; by default, it is Starlette's.
    """

    def __init__(self, app: ASGIApp, unsatisfiable: Callable[[], Response] | None = None) -> None:
        self._app = app
        self._unsatisfiable = unsatisfiable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or scope["method"] not in {"GET", "HEAD"}:
            await self._app(scope, receive, send)
            return
        ranged = scope["method"] == "GET"
        headers = [
            (name, value) for name, value in scope["headers"] if name != b"range" or (ranged and is_single_range(value))
        ]
        scope = {**scope, "headers": headers}
        replaced = False

        async def conditional(message: Message) -> None:
            nonlocal replaced
            if replaced:
                return
            status = message.get("status")
            if status in _SENT and is_unchanged(Headers(scope=scope), Headers(raw=message["headers"])):
                replaced = True
                fields = [(name, value) for name, value in message["headers"] if name.lower() in _KEPT]
                await send({**message, "status": HTTPStatus.NOT_MODIFIED.value, "headers": fields})
                await send({"type": "http.response.body", "body": b""})
            elif status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and self._unsatisfiable is not None:
                replaced = True
                response = self._unsatisfiable()
                response.headers["Content-Range"] = Headers(raw=message["headers"]).get("content-range", "bytes */*")
                await response(scope, receive, send)
            else:
                await send(message)
            if replaced:
                rest.cancel()  # the file is not read

        with anyio.CancelScope() as rest:
            await self._app(scope, receive, conditional)


def is_unchanged(request: Headers, sent: Headers) -> bool:
    """Return whether the headers of a request say that the client has what is sent; see RFC 9110, 13.2.2."""
    if tags := request.getlist("if-none-match"):
        tag = _TAG.fullmatch(sent.get("etag", ""))
        text = ",".join(tags)
        return text.strip() == "*" or (tag is not None and tag[1] in _TAG.findall(text))
    try:
        since = parsedate_to_datetime(request["if-modified-since"])
        return parsedate_to_datetime(sent["last-modified"]) <= since
    except (KeyError, ValueError, TypeError):  # none, not a date, or without a time zone
        return False
