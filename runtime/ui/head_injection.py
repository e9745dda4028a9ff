"""Puts title, style and script into gradio's page before it leaves the server.

gradio adds them only once its own script has started and somebody has logged in: until then the page would flash
unstyled, and the login would stay so.
"""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_END_OF_HEAD = b"</head>"


class Document:
    """ASGI middleware: adds `head` to every HTML page.

    Args:
        app: what makes the pages.
        head: HTML for the end of their head.
    """

    def __init__(self, app: ASGIApp, head: str) -> None:
        self._app = app
        self._head = head.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and change what comes back if it is a page."""
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        body = b""

        async def collect(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start" and _is_page(message):
                start = message
            elif start is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    page = body.replace(_END_OF_HEAD, self._head + _END_OF_HEAD, 1)
                    MutableHeaders(scope=start)["content-length"] = str(len(page))
                    await send(start)
                    await send({"type": "http.response.body", "body": page})

        await self._app(scope, receive, collect)


def _is_page(message: Message) -> bool:
    return MutableHeaders(scope=message).get("content-type", "").startswith("text/html")
