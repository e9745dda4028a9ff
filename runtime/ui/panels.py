"""The HTTP route of the panels: JSON requests, and HTML parts as answers.

The page's script sends what a button does, or asks for changes while a panel is visible: when the jobs have changed,
and once a second while a video runs or if the panel shows more than jobs. An answer has the parts of the panel whose
HTML differs from what the page shows. Any program on this machine can send requests: every value is validated.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from runtime.core.errors import InvalidRequestError, TandemError
from runtime.server.gradio_requests import OWN, RefusedError, check_values, read_object
from runtime.ui.formatting import paragraph, render

# Takes milliseconds; higher levels take longer and save little.
_COMPRESSION = 3

Reply = dict[str, Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """One request of a panel.

    Attributes:
        action: the button's action; "refresh" only asks for changes.
        target: the job, engine, component or model of the action.
        values: of the HTML form around the button.
        view: what the panel shows, such as the page of the history.
        form: the values of the controls of Make, in the order of `form.NAMES`.
        drawn: digests of the parts that the page has, by name.
    """

    action: str = "refresh"
    target: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    view: Mapping[str, Any] = field(default_factory=dict)
    form: Sequence[Any] = ()
    drawn: Mapping[str, Any] = field(default_factory=dict)


class Panel(Protocol):
    """The content and the actions of a tab."""

    def act(self, call: Call) -> Reply:
        """Carry out an action; return what the script needs to know, such as a "message".

        Raises:
            TandemError: if it cannot be carried out.
        """

    def draw(self, call: Call, reply: Reply) -> dict[str, str]:
        """Return the HTML of the panel's parts after an action."""


def routes(panels: Mapping[str, Panel]) -> list[BaseRoute]:
    """Return the route of all panels, by name. The middleware has checked sender, login and size."""

    async def answer(request: Request) -> Response:
        panel = panels.get(request.path_params["name"])
        if panel is None:
            raise RefusedError("server.not_found", 404, kind="panel")
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise RefusedError("server.content_type", 415)
        call = read_call(await request.body())
        return JSONResponse(await run_in_threadpool(respond, panel, call), headers={"Cache-Control": "no-store"})

    # The rows of a long list are alike: they shrink to a few percent.
    small = [Middleware(GZipMiddleware, compresslevel=_COMPRESSION)]
    return [Route(f"{OWN}panels/{{name}}", answer, methods=["POST"], middleware=small)]


def read_call(body: bytes) -> Call:
    """Read a request.

    Raises:
        RefusedError: if it is not one that the page's script sends.
    """
    sent = read_object(body)
    check_values(sent)
    match sent:
        case {
            "action": str(action),
            "target": str(target),
            "values": dict(values),
            "view": dict(view),
            "form": [*form],
            "drawn": dict(drawn),
        }:
            return Call(action, target, values, view, form, drawn)
    raise RefusedError("server.panel_call_incomplete")


def respond(panel: Panel, call: Call) -> Reply:
    """Carry out a request; return the reply with the parts that changed."""
    reply: Reply
    try:
        reply = panel.act(call)
    except TandemError as error:
        reply = {"message": paragraph(error.fact), "error": True}
    except Exception as error:  # an internal error: one line on the page, the traceback in the log
        logger.exception("The action %r failed", call.action)
        reply = {"message": f"Internal error: {error!r} The log has the details.", "error": True}
    parts = panel.draw(call, reply)
    digests = {
        name: hashlib.sha256(html.encode("utf-8", "surrogatepass")).hexdigest()[:16] for name, html in parts.items()
    }
    changed = {name: html for name, html in parts.items() if call.drawn.get(name) != digests[name]}
    return reply | {"parts": changed, "digests": {name: digests[name] for name in changed}}


def drawn(parts: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    """Return the HTML of parts; one that fails does not affect the others."""
    html = {}
    for name, draw in parts.items():
        try:
            html[name] = draw()
        except TandemError as error:
            html[name] = render("problem.html", text=paragraph(error.fact))
        except Exception:  # an internal error
            logger.exception("The part %s could not be drawn", name)
            html[name] = render("problem.html", text="This part cannot be shown. The log has the details.")
    return html


def unknown_action() -> InvalidRequestError:
    """Return the error for an action or a target that the page does not offer."""
    return InvalidRequestError("action", "ui.unknown_action")
