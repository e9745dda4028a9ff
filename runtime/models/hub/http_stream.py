"""One answer of a hub, read by a thread of its own: whoever waits for its next piece hears a cancel at once.

Knows nothing about models. Rests on huggingface_hub's session: its proxies, certificates and offline switch.
"""

import queue
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

from runtime.core.cancel import Cancel
from runtime.core.errors import DownloadError, first_line

_LOOK_SECONDS = 0.1
# Pieces that may wait to be written, of at most 64 KiB each.
_PIECES = 64
_MOST_REDIRECTS = 8
_GOOD = frozenset({200, 206})
_UNAUTHORIZED, _FORBIDDEN, _REQUEST_TIMEOUT, _NOT_SATISFIABLE, _TOO_MANY, _SERVER_ERROR = 401, 403, 408, 416, 429, 500
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
# As huggingface.co says that nothing remains, and for how many seconds: `"api";r=0;t=55`.
_RATE_LIMIT = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*([0-9]{1,9})")
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class BrokenError(Exception):
    """The hub could not be reached, fell silent, broke off or is busy: it may go well another time.

    `wait` is how many seconds the hub asks to wait before that.
    """

    def __init__(self, what: str, wait: float | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.wait = wait


@dataclass(frozen=True)
class Head:
    """How an answer begins: its status, its headers by lower-case name."""

    status: int
    headers: Mapping[str, str]


class Answer:
    """A GET on its way, redirects followed. Use it as a context: leaving it lets go of the connection.

    A redirect may lead to any host by https, and within this machine by http where the hub itself is reached so.
    Another origin is not told who asks.

    Args:
        headers: what is asked with, `authorization` among them where there is one.
        seconds: how long the other side may be silent.
    """

    def __init__(self, url: str, headers: Mapping[str, str], seconds: float, cancel: Cancel) -> None:
        self._url = url
        self._headers = dict(headers)
        self._seconds = seconds
        self._cancel = cancel
        self._pieces: queue.Queue[Head | bytes | BaseException | None] = queue.Queue(_PIECES)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._read, name="hub", daemon=True)

    def __enter__(self) -> "Answer":
        """Ask."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let go; a thread that waits for a silent hub ends by itself."""
        self._left.set()

    def head(self) -> Head:
        """Wait for the answer to begin.

        Raises:
            BrokenError: if it does not.
            DownloadError: if the hub refuses, or a redirect may not be followed.
            CancelledError: when asked to cancel.
        """
        head = self._next()
        assert isinstance(head, Head), "an answer begins once"
        return head

    def pieces(self) -> Iterator[bytes]:
        """Yield the content as it comes; raises as `head` does."""
        while isinstance(piece := self._next(), bytes):
            yield piece

    def _next(self) -> Head | bytes | None:
        while True:
            self._cancel.check()
            try:
                piece = self._pieces.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(piece, BaseException):
                raise piece
            return piece

    def _read(self) -> None:
        try:
            self._follow()
        except (BrokenError, DownloadError) as error:
            self._put(error)
        except Exception as error:
            self._put(_understood(error, self._seconds))

    def _follow(self) -> None:
        from huggingface_hub import get_session

        url, headers = self._url, self._headers
        for _ in range(_MOST_REDIRECTS):
            stream = get_session().stream("GET", url, headers=headers, timeout=self._seconds, follow_redirects=False)
            with stream as response:
                if response.status_code in _REDIRECTS and "location" in response.headers:
                    target = urljoin(url, response.headers["location"])
                    _check_redirect(self._url, target)
                    if _origin(target) != _origin(url):
                        headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
                    url = target
                    continue
                self._tell(response)
                return
        raise DownloadError("The hub redirects in circles.", "Check its address.")

    def _tell(self, response: Any) -> None:
        headers = {name.lower(): value for name, value in response.headers.items()}
        if response.status_code not in _GOOD:
            # What an error says beside its headers is not read: it need not end.
            raise _refusal(response.status_code, headers)
        self._put(Head(response.status_code, headers))
        for piece in response.iter_bytes():
            if not self._put(piece):
                return
        self._put(None)

    def _put(self, piece: Head | bytes | BaseException | None) -> bool:
        """Hand a piece over; return whether anybody is still there to take it."""
        while not self._left.is_set():
            try:
                self._pieces.put(piece, timeout=_LOOK_SECONDS)
            except queue.Full:
                continue
            return True
        return False


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or _PORTS.get(parts.scheme, 0)


def _check_redirect(asked: str, target: str) -> None:
    try:
        scheme, host, _ = _origin(target)
    except ValueError:
        scheme, host = "", ""
    within = scheme == "http" and host in LOOPBACK and urlsplit(asked).scheme == "http"
    if scheme != "https" and not within:
        raise DownloadError(
            f"The hub leads to {target[:60]!r}, which is not safe to follow: it does not begin with https://.",
            "Fetch the model from another hub.",
        )


def _understood(error: Exception, seconds: float) -> Exception:
    """Return what an error of huggingface_hub or its HTTP library means here; others as they are."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return DownloadError("Nothing is fetched: HF_HUB_OFFLINE is set.", "Unset it, and try again.")
    # httpx, or httpx2 from huggingface_hub 2 on: the names of their errors are the same.
    names = {kind.__name__ for kind in type(error).__mro__}
    if "TimeoutException" in names:
        return BrokenError(f"the hub was silent for {seconds:g} s")
    if "ConnectError" in names:
        return BrokenError(f"the hub cannot be reached ({first_line(error)})")
    if "TransportError" in names or isinstance(error, OSError):
        return BrokenError("the connection broke")
    if {"InvalidURL", "DecodingError"} & names:
        return DownloadError("The hub answers with what cannot be read.", "Fetch the model from another hub.")
    return error


def _refusal(status: int, headers: Mapping[str, str]) -> Exception:
    """Return what a status means; the codes beside it are those that huggingface_hub reads."""
    code = headers.get("x-error-code", "")
    if code == "GatedRepo":
        return DownloadError(
            "The model is given only to those who accepted its licence on the hub.",
            "Accept it on the model's page, then set HF_TOKEN to a token of your account, or: hf auth login",
        )
    if code == "RevisionNotFound":
        return RevisionError("The repository has no such revision.", "Leave --revision out, or name a tag or commit.")
    if headers.get("x-error-message", "").startswith("Invalid credentials"):
        return DownloadError("The hub does not know the token that it is asked with.", "Renew HF_TOKEN, or unset it.")
    # A hub answers 401 for what is private and for what is not there alike.
    if code == "RepoNotFound" or status == _UNAUTHORIZED:
        return DownloadError(
            "The hub has no such repository, or does not show it to you.",
            "Check the name. For a private one, set HF_TOKEN to a token of your account, or: hf auth login",
        )
    if status == _FORBIDDEN:
        return DownloadError(
            f"The hub refuses: {status}, not allowed.",
            "Set HF_TOKEN to a token that may read the model, or: hf auth login",
        )
    if status == _NOT_SATISFIABLE:
        return RangeError("The hub's file ends before what is here already does.", "Try again.")
    if status in {_REQUEST_TIMEOUT, _TOO_MANY} or status >= _SERVER_ERROR:
        busy = "the hub has had too many requests" if status == _TOO_MANY else f"the hub failed with {status}"
        return BrokenError(busy, _wait(headers))
    return DownloadError(f"The hub answers {status}.", "Check the model's name, the revision and the hub's address.")


def _wait(headers: Mapping[str, str]) -> float | None:
    """Return how many seconds the hub asks to wait, by `Retry-After` or by its rate limit; dates are not read."""
    asked = str(headers.get("retry-after", "")).strip()
    limit = _RATE_LIMIT.search(str(headers.get("ratelimit", "")))
    if asked.isascii() and asked.isdecimal():
        return float(asked)
    return float(limit[1]) if limit else None


class RevisionError(DownloadError):
    """The repository has no such revision."""


class RangeError(DownloadError):
    """The hub's file ends before the point that it was asked to go on from."""
