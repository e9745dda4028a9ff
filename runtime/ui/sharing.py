"""A share link: the visitors' page, the tunnel to it, and the way to end both.

Visitors reach a page and a port of their own, and the tunnel leads to nothing else: who comes by it is a visitor,
whatever a request says of itself.
"""

import asyncio
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Literal

import gradio as gr
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from runtime.core.errors import MachineError, ModelError
from runtime.core.settings import Settings
from runtime.models.catalogue import folders
from runtime.queue.service import JobQueue
from runtime.server import visitor_limits
from runtime.server.gradio_requests import VIDEO
from runtime.server.job_files import video_response
from runtime.server.model_choices import offered
from runtime.server.security import LOOPBACK
from runtime.server.tunnel import Tunnel, open_tunnel
from runtime.server.visitors import Visitors
from runtime.ui import server, visitor_page

State = Literal["opening", "open", "failed", "ended"]

_USER = "visitor"
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_GROUPS, _SYLLABLES = 4, 3
_LOGIN = "Somebody shares Tandem with you. Enter the user and password that came with the link."

logger = logging.getLogger(__name__)


class Sharing:
    """One share link. Any thread may ask.

    Attributes:
        state: what has become of it.
        url: the link, while it is open.
        problem: why there is none, and what to do about it.
        user, password: what visitors log in with.
        made_up: whether the password was made up here.
        visitors: their sessions and limits.

    Args:
        tell: is given what becomes of the link, line by line.

    Raises:
        ModelError: if there is no model that visitors may use, or the settings' own cannot be used.
    """

    def __init__(self, worker: JobQueue, settings: Settings, tell: Callable[[str], None]) -> None:
        self.state: State = "opening"
        self.url = ""
        self.problem = ""
        self.made_up = settings.auth is None
        self.user, self.password = settings.auth or (_USER, make_password())
        self._settings = settings
        self._tell = tell
        self._tunnel: Tunnel | None = None
        self._lock = threading.Lock()
        models = visitor_limits.visitors_models(offered(settings), folders(settings.weights_dir))
        if not models:
            raise ModelError("server.no_visitor_model")
        self.visitors = Visitors(worker, settings, models)
        self._page: gr.Blocks = visitor_page.build(worker, settings, models, self.visitors)

    def start(self) -> None:
        """Serve the visitors' page, and have the link made meanwhile.

        Raises:
            OSError: if there is no port left.
        """
        port = _free_port()
        server.start(
            self._page,
            "127.0.0.1",
            port,
            self._names,
            (self.user, self.password),
            _LOGIN,
            self.visitors,
            [Route(f"{VIDEO}{{name}}", self._video), Route("/robots.txt", _robots)],
        )
        threading.Thread(target=self._hold, args=(port,), name="sharing", daemon=True).start()

    def end(self) -> None:
        """Take the link back: nobody comes in any more, and what visitors asked for is cancelled."""
        self._shut("ended", "")

    def _hold(self, port: int) -> None:
        """Open the tunnel, say so, and wait until it ends."""
        try:
            tunnel = open_tunnel(port, self._settings.cache_dir / "gradio")
        except MachineError as error:
            self._fail(error)
            return
        except Exception as error:  # a defect: told in one line, kept in the log
            logger.exception("There is no share link")
            self._fail(MachineError("server.link_defect", error=repr(error)))
            return
        with self._lock:
            if self.state == "opening":
                self._tunnel, self.url, self.state = tunnel, tunnel.url, "open"
        if self.state != "open":
            tunnel.close()
            return
        password = f"password {self.password}" if self.made_up else "with the password of --auth"
        self._tell(f"Shared at {tunnel.url} - user {self.user}, {password}")
        logger.info("A share link is open")
        tunnel.wait()
        self._fail(MachineError("server.link_ended"))

    def _fail(self, error: MachineError) -> None:
        if self._shut("failed", f"{error.what} {error.remedy}"):
            self._tell(error.what)
            self._tell(error.remedy)

    def _shut(self, state: State, problem: str) -> bool:
        """End all of it; return whether it had not ended before."""
        with self._lock:
            if self.state in {"failed", "ended"}:
                return False
            self.state, self.problem, self.url = state, problem, ""
            tunnel, self._tunnel = self._tunnel, None
        self.visitors.close()
        if tunnel is not None:
            tunnel.close()
        server.stop(self._page)
        logger.info("Sharing has ended: %s", state)
        return True

    async def _video(self, request: Request) -> Response:
        """Send a visitor's own video."""
        name, visitor = request.path_params["name"], request.user.display_name
        return video_response(await asyncio.to_thread(self.visitors.video, name, visitor), cached=False)

    def _names(self) -> frozenset[str]:
        """Return the host names of the visitors' page: the link's, and this machine's own for what the tunnel says."""
        tunnel = self._tunnel
        return LOOPBACK if tunnel is None else LOOPBACK | {tunnel.host}


async def _robots(_request: Request) -> Response:
    return PlainTextResponse("User-agent: *\nDisallow: /\n")


def make_password() -> str:
    """Return a password of 12 random syllables, 73 bits: "tokaru-melisu-badofi-ganepo"."""
    return "-".join(
        "".join(secrets.choice(_CONSONANTS) + secrets.choice(_VOWELS) for _ in range(_SYLLABLES))
        for _ in range(_GROUPS)
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
