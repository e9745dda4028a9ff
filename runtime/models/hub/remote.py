"""A hub: asked what a repository holds, and for files from any point on.

Files come by plain HTTP with ranges, not by `hf_hub_download`: that keeps nothing of a file that did not come whole
(huggingface_hub 1.33 and 2.4), so gigabytes would be fetched anew after every break.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from runtime import __version__
from runtime.core.cancel import Cancel
from runtime.core.errors import DownloadError, InvalidRequestError
from runtime.core.settings import HUB
from runtime.models.hub.http_stream import Answer, BrokenError
from runtime.models.hub.listing import Listing, RemoteFile, read_listing

Result = TypeVar("Result")

_MOST_LISTING_BYTES = 1 << 25
_LOOK_SECONDS = 0.1
_LONGEST_NAME = 96
_WORD = "[A-Za-z0-9_][A-Za-z0-9_.-]*[A-Za-z0-9_]|[A-Za-z0-9_]"
_REPOSITORY = re.compile(f"(?:{_WORD})/(?:{_WORD})")
PARTIAL = 206
# Where nothing has come yet, the cable is likelier out than the hub in trouble.
_FIRST_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a hub is waited for.

    Attributes:
        seconds: of silence that a connection is given.
        tries: how often in a row without a byte.
        wait, longest_wait: seconds before the second try, twice as long before each further one.
        longest_asked: as long as a hub may ask to wait.
    """

    seconds: float = 30.0
    tries: int = 7
    wait: float = 1.0
    longest_wait: float = 60.0
    longest_asked: float = 600.0

    def before(self, again: int) -> float:
        """Return how long to wait before the `again`-th try after the first."""
        return min(self.wait * 2.0 ** (again - 1), self.longest_wait)


@dataclass(frozen=True)
class Hub:
    """A hub at an address that `settings.check_hub` has passed.

    The account's token goes to the hub that it is for, huggingface.co or the one of HF_ENDPOINT; not to a mirror.
    """

    address: str = HUB
    patience: Patience = Patience()

    def listing(
        self, repository: str, revision: str, license_name: str, cancel: Cancel, tell: Callable[[str], None]
    ) -> Listing:
        """Ask what a repository holds.

        Args:
            revision: a branch, tag or commit.
            tell: is given what is waited for.

        Raises:
            DownloadError: if there is none, it is not for this user, or no model; or the hub cannot be reached.
            CancelledError: when asked to cancel.
        """
        url = f"{self.address}/api/models/{repository}/revision/{quote(revision, safe='')}?blobs=true"
        again = 0
        while True:
            try:
                with self._ask(url, cancel) as answer:
                    answer.head()
                    content = _whole(answer)
                break
            except BrokenError as error:
                again += 1
                self.rest(error, again, cancel, tell, most=_FIRST_TRIES)
        try:
            value: Any = json.loads(content)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise DownloadError("The hub does not answer as one does.", "Check its address.")
        return read_listing(repository, value, license_name)

    @contextmanager
    def file(
        self, listing: Listing, file: RemoteFile, start: int, cancel: Cancel
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Ask for a file from `start` on; lends where the answer begins, 0 if it does not go on, and its pieces.

        Raises:
            BrokenError: if the hub cannot be reached, falls silent or breaks off.
            DownloadError: if it refuses.
            CancelledError: when asked to cancel.
        """
        url = f"{self.address}/{listing.repository}/resolve/{listing.commit}/{quote(file.path)}"
        # Packed, a part of a file could not be told from another.
        extra = {"accept-encoding": "identity"} | ({"range": f"bytes={start}-"} if start else {})
        with self._ask(url, cancel, extra) as answer:
            head = answer.head()
            goes_on = head.headers.get("content-range", "").startswith(f"bytes {start}-")
            if head.status == PARTIAL and not goes_on:
                raise BrokenError("the hub gave another part of the file than was asked for")
            yield (start if head.status == PARTIAL else 0), answer.pieces()

    def rest(
        self, error: BrokenError, again: int, cancel: Cancel, tell: Callable[[str], None], most: int | None = None
    ) -> None:
        """Wait before the `again`-th try after the first.

        Args:
            most: tries, where that is less than patience allows.

        Raises:
            DownloadError: if that were too many, or the hub wants to be left alone for long.
            CancelledError: when asked to cancel.
        """
        wait = max(self.patience.before(again), error.wait or 0.0)
        what = f"{error.what[0].upper()}{error.what[1:]}"
        if again >= min(self.patience.tries, most or self.patience.tries) or wait > self.patience.longest_asked:
            later = f" It asks to wait {error.wait:g} s." if error.wait else ""
            raise DownloadError(
                f"{what}, {again} time{'' if again == 1 else 's'} in a row.{later}",
                "Check the connection and try again later: what came is kept, and it goes on from there.",
            )
        tell(f"{what}; trying again in {wait:.0f} s" if wait >= 1 else f"{what}; trying again")
        end = time.monotonic() + wait
        while (left := end - time.monotonic()) > 0:
            cancel.check()
            time.sleep(min(left, _LOOK_SECONDS))
        cancel.check()

    def _ask(self, url: str, cancel: Cancel, extra: dict[str, str] | None = None) -> Answer:
        headers = {"user-agent": f"tandem/{__version__}", **self._who_asks(), **(extra or {})}
        return Answer(url, headers, self.patience.seconds, cancel)

    def _who_asks(self) -> dict[str, str]:
        from huggingface_hub import constants, get_token

        if self.address not in {HUB, constants.ENDPOINT} or constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
            return {}
        token = get_token()
        return {"authorization": f"Bearer {token}"} if token else {}


def check_repository(name: str) -> str:
    """Return the name of a repository, "owner/name".

    Raises:
        InvalidRequestError: if it is none.
    """
    if not _REPOSITORY.fullmatch(name) or ".." in name or len(name) > _LONGEST_NAME:
        raise InvalidRequestError(
            "name", f"{name[:60]!r} is not a model's name.", "Give one of `models list`, or OWNER/REPOSITORY."
        )
    return name


def _whole(answer: Answer) -> bytes:
    content = bytearray()
    for piece in answer.pieces():
        content += piece
        if len(content) > _MOST_LISTING_BYTES:
            raise DownloadError("The hub's answer does not end.", "Check its address.")
    return bytes(content)
