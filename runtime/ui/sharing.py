"""A share link: the visitors' page, the tunnel to it, and the way to end both.

Visitors reach a page and a port of their own, and the tunnel leads to nothing else: who comes by it is a visitor,
whatever a request says of itself.
"""

import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Literal

import gradio as gr

from runtime.core.errors import MachineError, ModelError
from runtime.core.settings import Settings
from runtime.models.catalogue import folders
from runtime.queue.service import JobQueue
from runtime.ui import server, visitor_limits, visitor_page
from runtime.ui.model_choices import offered
from runtime.ui.security_middleware import LOOPBACK
from runtime.ui.tunnel import Tunnel, open_tunnel
from runtime.ui.visitor_sessions import Lobby

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
        lobby: where the visitors are.

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
            raise ModelError("There is no model that visitors may use.", "Put one into the weights folder.")
        self.lobby = Lobby(worker, settings, models)
        self._page: gr.Blocks = visitor_page.build(worker, settings, models, self.lobby)

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
            self._settings.outputs_dir,
            (self.user, self.password),
            _LOGIN,
            self.lobby,
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
            self._fail(MachineError(f"There is no share link: {error!r}.", "The log has the details."))
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
        self._fail(MachineError("The share link has ended.", "Start Tandem again with --share for a new one."))

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
        self.lobby.close()
        if tunnel is not None:
            tunnel.close()
        server.stop(self._page)
        logger.info("Sharing has ended: %s", state)
        return True

    def _names(self) -> frozenset[str]:
        """Return the host names of the visitors' page: the link's, and this machine's own for what the tunnel says."""
        tunnel = self._tunnel
        return LOOPBACK if tunnel is None else LOOPBACK | {tunnel.host}


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
