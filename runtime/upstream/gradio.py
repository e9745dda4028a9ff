"""Private names of gradio that Tandem uses, each with the reason.

Gradio has no public function to validate a call before it runs, to check whether a request is logged in, or to open a
share link without its own page script. `tests/upstream/test_gradio.py` fails if a release of gradio changes one of
them.
"""

import asyncio
import contextlib
import importlib
import inspect
import os
import re
import sys
from collections import ChainMap
from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starlette.requests import Request

# From these headers, a page's addresses are built.
_ADDRESS_HEADERS = ("x-forwarded-host", "x-forwarded-proto", "x-gradio-server")
# The session of a call without one: its own name.
_CALL = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class PageFunction:
    """One function of a page that can be called over HTTP.

    Attributes:
        defaults: one value per input.
        queued: whether calls go through gradio's queue.
        api_name: its name, which is unique.
    """

    defaults: tuple[Any, ...]
    queued: bool
    api_name: str


def load() -> None:
    """Import gradio without analytics, interface files, copies of the page for each session, and tasks without end.

    Reason: `gradio.component_meta` parses the source of each component class and writes a .pyi file for editors, unless
    `inspect.getfile` raises `OSError` for the class; that takes half of the import's time. The queue computes
    statistics with pandas after every call, which nothing here shows; the variables are undocumented. Every page and
    every call of `/generate` is a session. Its copy of the configuration, 0.2 MB, serves only gradio's deep links,
    whose route is closed. The tasks of a stream, which keep it open, would outlive it if its client is gone.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(sys.maxsize)  # calls between two statistics
    os.environ["GRADIO_ANALYTICS_MAX_EVENTS"] = "1"
    find_file = inspect.getfile

    def find_other_file(target: Any) -> str:
        if isinstance(target, type) and target.__module__.startswith("gradio."):
            raise OSError("gradio's interface files are not written")
        return find_file(target)

    vars(inspect)["getfile"] = find_other_file
    try:
        importlib.import_module("gradio")
    finally:
        vars(inspect)["getfile"] = find_file
    _keep_small_sessions()
    _end_tasks_with_their_streams()


def _keep_small_sessions() -> None:
    from gradio import state_holder

    class SmallSession(state_holder.SessionState):  # type: ignore[misc]  # gradio has no types
        """What gradio stores of a session: the components that were changed in it, without their configuration."""

        def __init__(self, blocks: Any) -> None:
            page = blocks.default_config
            super().__init__(SimpleNamespace(blocks=(), default_config=page))
            self.blocks_config.blocks, self.blocks_config.fns = ChainMap({}, page.blocks), ChainMap({}, page.fns)

        def _update_config(self, key: int) -> None:
            pass

        def _update_value_in_config(self, key: int, value: Any) -> None:
            pass

    vars(state_holder)["SessionState"] = SmallSession


def _end_tasks_with_their_streams() -> None:
    from gradio import routes

    running: ContextVar[set[asyncio.Task[Any]]] = ContextVar("running")

    def create_task(*arguments: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(*arguments, **options)
        with contextlib.suppress(LookupError):
            running.get().add(task)
            task.add_done_callback(running.get().discard)
        return task

    class Stream(routes.StreamingResponse):  # type: ignore[misc]  # gradio has no types
        """A response whose tasks end with it."""

        async def __call__(self, *request: Any) -> None:
            token = running.set(set())
            try:
                await super().__call__(*request)
            finally:
                for task in running.get():
                    task.cancel()
                running.reset(token)

    vars(routes)["StreamingResponse"] = Stream
    vars(routes)["asyncio"] = SimpleNamespace(**(vars(asyncio) | {"create_task": create_task}))


def requires_login(app: Any) -> bool:
    """Return whether the app was launched with `auth`.

    Reason: `App.auth` is an undocumented attribute; the middleware checks the login before gradio does.
    """
    return app.auth is not None


def login_token(app: Any, cookies: Mapping[str, str]) -> str | None:
    """Return the login token among a request's cookies, if gradio issued it.

    Reason: `App.tokens` and the cookie names are undocumented; gradio checks them in its own routes only.
    """
    return next((cookies[name] for name in _login_cookies(app) if cookies.get(name) in app.tokens), None)


def _login_cookies(app: Any) -> tuple[str, str]:
    """Return the names of the cookies that may have a login token, for HTTPS and for HTTP."""
    return f"access-token-{app.cookie_id}", f"access-token-unsecure-{app.cookie_id}"


def page_key(scope: MutableMapping[str, Any]) -> tuple[object, Hashable | None]:
    """Return the configuration that a page is made of, and all that a request changes of it; `None` if it is no page.

    These are the address that the request names and the user who is logged in. Session, language and theme are chosen
    in the browser.

    Reason: gradio renders its page for each request, which takes 13 ms or more, and has no cache. What it reads of the
    request, `Blocks.config` and `App.tokens` are undocumented.
    """
    app = scope["app"]
    blocks = app.get_blocks()
    if scope["path"] != "/" or scope["query_string"]:
        return blocks.config, None
    request = Request(scope)
    # As gradio looks for the user of a page: only the first token counts, even if it has ended.
    tokens = (request.cookies.get(name) for name in _login_cookies(app))
    user = app.tokens.get(next(filter(None, tokens), None))
    forwarded = tuple(request.headers.get(name) for name in _ADDRESS_HEADERS)
    return blocks.config, (str(request.url), scope.get("root_path"), forwarded, user)


@dataclass(frozen=True)
class Logins:
    """The logins of a page: the id in the names of its cookies, and the user of each token."""

    cookie_id: str
    tokens: Mapping[str, str]


def logins(app: Any, most: int) -> Logins:
    """Return the newest logins of a page; the others end.

    Args:
        most: number of logins.

    Reason: as for `login_token`; gradio keeps every login until its process ends.
    """
    for token in list(app.tokens)[:-most]:
        app.tokens.pop(token, None)
    return Logins(app.cookie_id, dict(app.tokens))


def functions(app: Any) -> dict[int, PageFunction]:
    """Return the page's functions by the number that calls name them by; those that run in the browser are left out.

    Reason: `Blocks.fns` is undocumented; gradio answers calls with the wrong number of values with status 500.
    """
    return {
        number: PageFunction(
            tuple(getattr(component, "value", None) for component in function.inputs),
            bool(function.queue),
            str(function.api_name),
        )
        for number, function in app.get_blocks().fns.items()
        if function.fn is not None
    }


def function_number(app: Any, api_name: str) -> int:
    """Return the number of the function that a page offers as `api_name`.

    Reason: as for `functions`.
    """
    entries = app.get_blocks().fns.items()
    return next(int(number) for number, function in entries if function.api_name == api_name)


# Seconds until gradio's queue looks again for calls to start.
_QUEUE_PAUSE = 0.01


def poll_less(page: Any) -> None:
    """Have gradio's queue look for new calls 100 times a second instead of 1,000, and hardly ever for progress.

    Reason: `Blocks._queue` is private, and its pauses are undocumented. While nothing happens, they took 4 % of a core.
    No function of a page reports progress by `gradio.Progress`.
    """
    queue = page._queue
    queue.sleep_when_free = _QUEUE_PAUSE
    queue.progress_update_sleep_when_free = 60.0


def has_session(app: Any, session: str) -> bool:
    """Return whether a session waits for answers.

    Reason: `Blocks._queue` is private; gradio would open an endless stream for a session that does not exist.
    """
    return session in app.get_blocks()._queue.pending_messages_per_session


def has_event(app: Any, event: str) -> bool:
    """Return whether a call is queued, runs, or has results that were not fetched.

    Reason: `Blocks._queue` is private; gradio answers with status 500 for an event that does not exist.
    """
    queue = app.get_blocks()._queue
    return event in queue.event_ids_to_events or any(
        event in events for events in queue.pending_event_ids_session.values()
    )


def forget_unread(app: Any, most: int, whole: int) -> None:
    """Forget the results of calls that ended, except for unread ones of the newest sessions.

    Args:
        most: number of sessions whose results are kept.
        whole: number of these sessions with all results; of other programs' calls, the last result is kept.

    Reason: `Blocks._queue` is private; gradio keeps the unread results of 2,000 sessions, and the names of all. The
    results of one call are a few hundred kilobytes in memory, and a call that waits gets its place in the queue every
    few seconds. A call without a session has its own.
    """
    from gradio.server_messages import EstimationMessage, ProcessGeneratingMessage

    def keep(results: Any, without: type) -> None:
        for result in [results.get_nowait() for _ in range(results.qsize())]:
            if not isinstance(result, without):
                results.put_nowait(result)

    queue = app.get_blocks()._queue
    busy = {event.session_hash for event in queue.event_ids_to_events.values()}
    ended = []
    for session, results in list(queue.pending_messages_per_session.items()):
        keep(results, without=EstimationMessage)
        if session in busy:
            continue
        if results.empty() and not queue.pending_event_ids_session.get(session):
            del queue.pending_messages_per_session[session]
        else:
            ended.append(session)
    for session in ended[: max(len(ended) - most, 0)]:
        del queue.pending_messages_per_session[session]
    for session in ended[-most : max(len(ended) - whole, 0)]:
        # Pages are sent changes of earlier results.
        if queue.pending_event_ids_session.get(session) == {session}:
            keep(queue.pending_messages_per_session[session], without=ProcessGeneratingMessage)
    for session in queue.pending_event_ids_session.keys() - queue.pending_messages_per_session.keys() - busy:
        del queue.pending_event_ids_session[session]
    sessions = app.state_holder.session_data
    for session in [name for name in list(sessions) if name not in busy and _CALL.fullmatch(name)]:
        sessions.pop(session, None)


def open_calls(app: Any, user: str) -> int:
    """Return how many calls of a user are queued or run.

    Reason: `Blocks._queue` is private; gradio limits the calls of all users together only.
    """
    events = app.get_blocks()._queue.event_ids_to_events.values()
    return sum(event.request.user.display_name == user for event in events)


@contextlib.contextmanager
def served_by(server: Any, url: str, earlier: Logins | None = None) -> Iterator[None]:
    """Have the page that is launched in this block served by another server than gradio's.

    Args:
        server: has the methods `start(app)`, which returns once requests are answered, and `close()`.
        url: its address.
        earlier: logins that are valid from the first request on.

    Reason: `launch` has no parameter for the server and for logins, and gradio's own server limits neither connections
    nor the time that a request takes to arrive.
    """
    from gradio import http_server

    def start_server(app: Any, server_name: str, server_port: int, **_: object) -> tuple[str, int, str, Any]:
        if earlier is not None:
            app.cookie_id = earlier.cookie_id
            app.tokens |= earlier.tokens
        server.start(app)
        return server_name, server_port, url, server

    before = http_server.start_server
    vars(http_server)["start_server"] = start_server
    try:
        yield
    finally:
        vars(http_server)["start_server"] = before


def share_server_address() -> str | None:
    """Return the address of the share server that the environment names, `None` for gradio's own.

    Reason: `gradio.networking` is undocumented; `launch(share=True)` would add a script from another host to the page.
    """
    from gradio import networking

    address: str | None = networking.GRADIO_SHARE_SERVER_ADDRESS
    return address


def share_api_address() -> str:
    """Return the URL that gives the address of gradio's share server.

    Reason: as for `share_server_address`.
    """
    from gradio import networking

    return str(networking.GRADIO_API_SERVER)


@dataclass(frozen=True)
class TunnelProgram:
    """Gradio's program `frpc`: its path, file name, download address and SHA-256 (`None` if there is none)."""

    path: Path
    name: str
    address: str
    checksum: str | None


def tunnel_program() -> TunnelProgram:
    """Return where gradio keeps its tunnel program.

    Reason: `gradio.tunneling` is undocumented, and runs a program that is already there without checking it.
    """
    from gradio import tunneling

    return TunnelProgram(
        Path(tunneling.BINARY_PATH),
        str(tunneling.BINARY_REMOTE_NAME),
        str(tunneling.BINARY_URL),
        tunneling.CHECKSUMS.get(tunneling.BINARY_URL),
    )


def download_tunnel_program() -> bool:
    """Download gradio's tunnel program; return whether it has the checksum that gradio publishes.

    Reason: as for `tunnel_program`.

    Raises:
        httpx.HTTPError, httpx.InvalidURL, OSError: if it cannot be downloaded or kept.
    """
    from gradio import tunneling

    try:
        tunneling.Tunnel.download_binary()
    except tunneling.ChecksumMismatchError:
        return False
    return True
