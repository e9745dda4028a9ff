"""A hub over HTTP: huggingface_hub's API client, session and typed errors, and files that resume.

`hf_hub_download` is not used: it deletes its partial file when a transfer fails (huggingface_hub 1.33 and 2.4), so that
gigabytes would start over after every broken connection. Its `http_get` resumes only within one call, does not retry
server errors, waits without checking for cancel, and does not check which range the server sends.
"""

import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar
from urllib.parse import urljoin, urlsplit

from runtime import __version__
from runtime.core.cancel import Cancel
from runtime.core.errors import DownloadError, InvalidRequestError, first_line
from runtime.core.facts import Fact
from runtime.core.foreign_variables import problem_of_downloads
from runtime.core.settings import HUB, LOOPBACK, Settings, check_hub
from runtime.models.hub.files import Hasher, Listing, Origin, RemoteFile, chunks, hasher_of, matches, read_listing
from runtime.models.registry import Part

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Item = TypeVar("Item")

_MAX_NAME_LENGTH = 96
_WORD = "[A-Za-z0-9_][A-Za-z0-9_.-]*[A-Za-z0-9_]|[A-Za-z0-9_]"
_REPOSITORY = re.compile(f"(?:{_WORD})/(?:{_WORD})")
_POLL_SECONDS = 0.1
# Chunks of at most 64 KiB that may wait to be written.
_QUEUED_CHUNKS = 64
# Before the first data arrives, an unreachable network is likelier than a failing hub.
_LISTING_TRIES = 3
# Attempts for a file whose content does not match the hub's hash.
_CONTENT_TRIES = 2
_USER_AGENT = {"user-agent": f"tandem/{__version__}"}


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How long to wait for a hub.

    Attributes:
        timeout: seconds of silence before a connection is given up.
        tries: attempts in a row without a byte.
        wait, max_wait: seconds before the second attempt; they double before each further one.
        max_retry_after: the most seconds that a hub may ask to wait.
    """

    timeout: float = 30.0
    tries: int = 7
    wait: float = 1.0
    max_wait: float = 60.0
    max_retry_after: float = 600.0


class RevisionError(DownloadError):
    """The repository has no such revision."""


class UnavailableError(Exception):
    """The hub could not be reached, fell silent, disconnected or is busy; another attempt may succeed.

    Attributes:
        fact: what happened.
        retry_after: seconds to wait before the next attempt, if the hub asks for that.
    """

    def __init__(self, fact: Fact, retry_after: float | None = None) -> None:
        super().__init__(str(fact))
        self.fact = fact
        self.retry_after = retry_after


def check_online(settings: Settings) -> None:
    """Check that downloads are allowed.

    Raises:
        DownloadError: if not, with the setting that forbids them.
    """
    if settings.offline:
        by = {"TANDEM_OFFLINE": "--offline or TANDEM_OFFLINE"}.get(settings.offline, settings.offline)
        raise DownloadError("hub.offline", by=by)


def hub_of(settings: Settings, mirror: str | None = None) -> "Hub":
    """Return the hub to download from: `mirror` if given, else that of the settings.

    Raises:
        DownloadError: if downloads are not allowed, or need a variable of the environment that cannot be used.
        SettingsError: if the address is invalid.
    """
    check_online(settings)
    if mirror is not None:
        address = check_hub(mirror, "--mirror")
    else:
        address = check_hub(settings.hub, "HF_ENDPOINT or the setting `hub`")
    variable = problem_of_downloads(address, with_token=True)
    if variable is not None:
        raise DownloadError("hub.variable_unusable", variable=variable)
    return Hub(address)


def check_repository(name: str) -> str:
    """Return a repository's name, "owner/name".

    Raises:
        InvalidRequestError: if it is not one.
    """
    if not _REPOSITORY.fullmatch(name) or ".." in name or len(name) > _MAX_NAME_LENGTH:
        raise InvalidRequestError("name", "hub.name_invalid", name=name[:60])
    return name


@dataclass(frozen=True)
class Hub:
    """A hub at an address that `settings.check_hub` has validated.

    The account's token is sent to its own hub only: huggingface.co, or the one of HF_ENDPOINT. It is not sent to a
    mirror, and huggingface_hub's session drops it when a redirect leads to another origin.
    """

    address: str = HUB
    policy: RetryPolicy = RetryPolicy()

    def listing(
        self,
        repository: str,
        revision: str,
        license_name: str,
        cancel: Cancel,
        on_wait: Callable[[Fact], None],
        part: Part | None = None,
    ) -> Listing:
        """Return the files of a repository's model.

        Args:
            revision: a branch, tag or commit.
            on_wait: called with the reason of a wait.
            part: what the model has of the repository, if it is published in several.

        Raises:
            DownloadError: if there is no such model, this user may not read it, or the hub cannot be reached.
            CancelledError: on cancel.
        """

        def ask() -> Generator[Any, None, None]:
            with _typed_errors(self.policy.timeout, repository):
                try:
                    yield self._api().model_info(
                        repository, revision=revision, files_metadata=True, timeout=self.policy.timeout
                    )
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                    if isinstance(error, OSError):  # huggingface_hub's BadRequestError is both
                        raise
                    raise DownloadError("hub.malformed_answer") from error

        failures = 0
        while True:
            try:
                with _in_thread(ask(), cancel) as answers:
                    return read_listing(repository, next(answers), license_name, part)
            except UnavailableError as error:
                failures += 1
                self._wait(error, failures, cancel, on_wait, min(_LISTING_TRIES, self.policy.tries))

    def fetch(
        self,
        listing: Listing,
        file: RemoteFile,
        part: Path,
        cancel: Cancel,
        on_size: Callable[[int], None],
        on_wait: Callable[[Fact], None],
    ) -> None:
        """Fetch a file into `part`, continuing at its end, until it is complete, verified and on the disk.

        Args:
            on_size: called with the bytes that `part` holds, whenever they change.
            on_wait: called with the reason of a wait.

        Raises:
            DownloadError: if the content does not match the hash twice, the hub refuses, or it cannot be reached;
                received data is kept unless it did not match.
            OSError: if `part` cannot be written.
            CancelledError: on cancel; received data is kept.
        """
        problem: Fact | None = None
        for _ in range(_CONTENT_TRIES):
            with _open_part(part) as stream:
                problem = self._fill(listing, file, part, stream, cancel, on_size, on_wait)
                if problem is None:
                    os.fsync(stream.fileno())
                    return
            part.unlink()
            on_size(0)
            on_wait(Fact("hub.fetching_again", {"cause": problem}))
        raise DownloadError("hub.content_mismatch", cause=problem)

    def _fill(
        self,
        listing: Listing,
        file: RemoteFile,
        part: Path,
        stream: BinaryIO,
        cancel: Cancel,
        on_size: Callable[[int], None],
        on_wait: Callable[[Fact], None],
    ) -> Fact | None:
        """Complete a file; return the problem with its content, if any."""
        size, hasher = _hash_existing(file, part, stream, cancel)
        on_size(size)
        # The most bytes received: a hub that starts over and disconnects at the same byte is not retried forever.
        furthest, failures = size, 0
        while size < file.size:
            try:
                with _in_thread(self._content(listing, file, size), cancel) as content:
                    continues = next(content)
                    if size and not continues:  # the hub sends the file from its start
                        stream.truncate(0)
                        size, hasher = 0, hasher_of(file)
                    for chunk in content:
                        size += len(chunk)
                        if size > file.size:
                            return Fact("hub.file_other_size", {"file": file.path, "expected": file.size})
                        stream.write(chunk)
                        # A killed process loses only data in transit.
                        stream.flush()
                        hasher.update(chunk)
                        on_size(size)
                if size < file.size:
                    raise UnavailableError(Fact("hub.disconnected"))
            except _RangeError:
                return Fact("hub.file_other_size", {"file": file.path, "expected": file.size})
            except UnavailableError as error:
                failures = 1 if size > furthest else failures + 1
                furthest = max(furthest, size)
                self._wait(error, failures, cancel, on_wait, self.policy.tries)
        return None if matches(hasher, file) else Fact("hub.file_hash", {"file": file.path})

    def _content(self, listing: Listing, file: RemoteFile, start: int) -> Generator[Any, None, None]:
        """Yield whether the answer continues at `start`, then its chunks."""
        from huggingface_hub import hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers

        origin = file.origin or Origin(repository=listing.repository, commit=listing.commit, path=file.path)
        url = hf_hub_url(origin.repository, origin.path, revision=origin.commit, endpoint=self.address)
        # A range of a compressed answer would not be a range of the file.
        headers = {"accept-encoding": "identity"} | ({"range": f"bytes={start}-"} if start else {})
        headers = build_hf_headers(token=self._token(), headers={**_USER_AGENT, **headers})
        with (
            _typed_errors(self.policy.timeout, origin.repository),
            _session().stream("GET", url, headers=headers, timeout=self.policy.timeout) as response,
        ):
            hf_raise_for_status(response)
            partial = response.status_code == HTTPStatus.PARTIAL_CONTENT
            if partial and not response.headers.get("content-range", "").startswith(f"bytes {start}-"):
                raise UnavailableError(Fact("hub.other_range"))
            yield partial
            yield from response.iter_bytes()

    def _wait(
        self, error: UnavailableError, failures: int, cancel: Cancel, on_wait: Callable[[Fact], None], tries: int
    ) -> None:
        """Wait before the next attempt.

        Raises:
            DownloadError: if there were too many, or the hub asks for a long wait.
        """
        wait = max(min(self.policy.wait * 2.0 ** (failures - 1), self.policy.max_wait), error.retry_after or 0.0)
        if wait > self.policy.max_retry_after:
            raise DownloadError("hub.busy", cause=error.fact, seconds=wait)
        if failures >= tries:
            raise DownloadError("hub.unavailable", cause=error.fact, failures=failures)
        on_wait(Fact("hub.retrying", {"cause": error.fact, "seconds": math.ceil(wait)}))
        end = time.monotonic() + wait
        while (seconds := end - time.monotonic()) > 0:
            cancel.check()
            time.sleep(min(seconds, _POLL_SECONDS))
        cancel.check()

    def _api(self) -> "HfApi":
        from huggingface_hub import HfApi

        _session()
        return HfApi(endpoint=self.address, token=self._token(), headers=_USER_AGENT)

    def _token(self) -> bool | None:
        """Return huggingface_hub's argument `token`: its own choice, or none for a mirror."""
        from huggingface_hub import HfApi

        return None if self.address in {HUB, HfApi().endpoint} else False


def _session() -> Any:
    """Return huggingface_hub's session (an httpx client), which refuses redirects that are not safe."""
    from huggingface_hub import get_session

    session = get_session()
    hooks = session.event_hooks
    if _check_redirect not in hooks["response"]:
        session.event_hooks = {**hooks, "response": [*hooks["response"], _check_redirect]}
    return session


def _check_redirect(response: Any) -> None:
    """Refuse a redirect that leads away from https; within this machine http may lead to http."""
    if not response.has_redirect_location:
        return
    origin, location = str(response.request.url), response.headers["location"]
    try:
        target = urlsplit(urljoin(origin, location))
        local = target.scheme == "http" and target.hostname in LOOPBACK and urlsplit(origin).scheme == "http"
        safe = target.scheme == "https" or local
    except ValueError:
        safe = False
    if not safe:
        raise DownloadError("hub.unsafe_redirect", target=location[:60])


@contextmanager
def _in_thread(items: Generator[Item, None, None], cancel: Cancel) -> Iterator[Iterator[Item]]:
    """Run a generator in a thread and yield an iterator over its items, so that cancel does not wait for a silent hub.

    The thread ends when its read times out.
    """
    waiting: queue.Queue[Item | Exception | None] = queue.Queue(_QUEUED_CHUNKS)
    closed = threading.Event()

    def put(item: Item | Exception | None) -> bool:
        while not closed.is_set():
            try:
                waiting.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def run() -> None:
        try:
            with closing(items):
                if all(put(item) for item in items):
                    put(None)
        except Exception as error:
            put(error)

    def received() -> Iterator[Item]:
        while True:
            cancel.check()
            try:
                item = waiting.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item

    threading.Thread(target=run, name="hub", daemon=True).start()
    try:
        yield received()
    finally:
        closed.set()


class _RangeError(Exception):
    """The hub's file ends before the byte at which it was to continue."""


@contextmanager
def _typed_errors(timeout: float, repository: str) -> Iterator[None]:
    """Raise errors of huggingface_hub and its HTTP library as Tandem's."""
    try:
        yield
    except (DownloadError, UnavailableError):
        raise
    except Exception as error:
        raise _translated(error, timeout, repository) from error


def _translated(error: Exception, timeout: float, repository: str) -> Exception:
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        kinds = {
            errors.GatedRepoError: DownloadError(
                "hub.gated", repository=repository
            ),  # derives from RepositoryNotFoundError
            errors.RepositoryNotFoundError: DownloadError("hub.no_repository", repository=repository),
            errors.RevisionNotFoundError: RevisionError("hub.no_revision"),
        }
        refusal = next((ours for theirs, ours in kinds.items() if isinstance(error, theirs)), None)
        return refusal or _refusal(error.response.status_code, error.response.headers)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return DownloadError("hub.offline", by="HF_HUB_OFFLINE")
    # huggingface_hub 1 uses httpx, 2 uses httpx2: the same errors under the same names.
    causes: dict[str, Exception] = {
        "TimeoutException": UnavailableError(Fact("hub.silent", {"seconds": timeout})),
        "ConnectError": UnavailableError(Fact("hub.unreachable", {"reason": first_line(error)})),
        "TransportError": UnavailableError(Fact("hub.disconnected")),
        "OSError": UnavailableError(Fact("hub.disconnected")),
        "TooManyRedirects": DownloadError("hub.redirect_loop"),
        "InvalidURL": DownloadError("hub.malformed_answer"),
        "DecodingError": DownloadError("hub.malformed_answer"),
    }
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((causes[name] for name in names if name in causes), error)


def _refusal(status: int, headers: Any) -> Exception:
    codes = {HTTPStatus.UNAUTHORIZED: "hub.token_refused", HTTPStatus.FORBIDDEN: "hub.forbidden"}
    if status in codes:
        return DownloadError(codes[HTTPStatus(status)])
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return _RangeError()
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return UnavailableError(Fact("hub.rate_limited"), _retry_after(headers))
    if status == HTTPStatus.REQUEST_TIMEOUT or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return UnavailableError(Fact("hub.failed", {"status": status}), _retry_after(headers))
    return DownloadError("hub.status", status=status)


def _retry_after(headers: Any) -> float | None:
    """Return the seconds that a hub asks to wait, by `Retry-After` or its rate limit; dates are ignored."""
    from huggingface_hub.utils import parse_ratelimit_headers

    header = str(headers.get("retry-after", "")).strip()
    if header.isascii() and header.isdecimal():
        return float(header)
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else None


def _open_part(part: Path) -> BinaryIO:
    """Open a file for appending; a link is not followed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(part, flags, 0o666), "ab")


def _hash_existing(file: RemoteFile, part: Path, stream: BinaryIO, cancel: Cancel) -> tuple[int, Hasher]:
    """Return the size and hash of a partial download; one that is longer than the file is emptied."""
    hasher, size = hasher_of(file), 0
    if part.stat().st_size > file.size:
        stream.truncate(0)
    for chunk in chunks(part, cancel):
        hasher.update(chunk)
        size += len(chunk)
    return size, hasher
