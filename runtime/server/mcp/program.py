"""The MCP server as a program that a client starts and talks to over its standard streams."""

import asyncio
import contextlib
import os
import threading
from pathlib import Path

import httpx

from runtime.core.errors import MachineError, SettingsError, StoreError
from runtime.core.processes import stop_on_signals
from runtime.core.settings import Settings
from runtime.queue.store import NAME, JobStore
from runtime.server.job_files import find_output
from runtime.server.mcp.tools import McpTools
from runtime.server.mcp.transports import serve_stdio, standard_streams
from runtime.server.serve import address_of, print_line, serve

KEY_VARIABLE = "TANDEM_API_KEY"
_SECONDS = 5.0


def run(settings: Settings) -> str:
    """Serve the client on standard input and output until it closes its end; return the address of the API.

    Uses the Tandem that answers at the settings' port, or serves the API itself if none does, or if that one ends. In
    that case running videos are paused at the end, as on Ctrl-C of `serve`.

    Raises:
        SettingsError: if the API needs a key, and `TANDEM_API_KEY` has none or a wrong one.
        TandemError: as `serve`.
    """
    key = os.environ.get(KEY_VARIABLE) or None
    with standard_streams() as (incoming, outgoing), stop_on_signals() as stop, contextlib.ExitStack() as stack:
        api = _Api(settings, key)
        stack.callback(api.close)
        api.ensure()
        if os.isatty(incoming):
            print_line("AI assistants start this program; it reads their messages from standard input. Ctrl-C ends it.")
        files = _Files(settings)
        stack.callback(files.close)
        tools = McpTools(api.url, key, files.find, api.ensure)
        asyncio.run(serve_stdio(tools, incoming, outgoing, stop))
    return api.url


class _Api:
    """The API that the tools call: of a Tandem that runs already, or else of this process."""

    def __init__(self, settings: Settings, key: str | None) -> None:
        self.url = address_of(settings.host, settings.port)
        self._settings = settings
        self._key = key
        self._lock = threading.Lock()
        self._serving = contextlib.ExitStack()

    def ensure(self) -> None:
        """Serve the API if it does not answer, as at the start, and after the Tandem that was used has ended.

        Raises:
            SettingsError: if it does not accept the key.
            TandemError: as `serve`.
        """
        with self._lock:
            if _answers(self.url, self._key):
                print_line(f"Using the Tandem at {self.url}.")
                return
            try:
                self._serving.enter_context(serve(self._settings))
            except MachineError:  # another program was faster
                if not _answers(self.url, self._key):
                    raise
            else:
                print_line(f"Tandem's API is at {self.url}v1.")
                _answers(self.url, self._key)

    def close(self) -> None:
        """Stop serving, if this process does."""
        self._serving.close()


def _answers(url: str, key: str | None) -> bool:
    """Return whether Tandem answers at an address.

    Raises:
        SettingsError: if it does not accept the key.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url}v1/models", headers=headers, timeout=_SECONDS, trust_env=False)
        code = answer.json()["error"]["code"] if answer.is_error else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False
    if code in {"server.api_key_missing", "server.api_key_wrong"}:
        raise SettingsError("server.mcp_key", variable=KEY_VARIABLE, address=url)
    return code is None


class _Files:
    """Finds the files of videos in the outputs folder. Without the job store, there are none."""

    def __init__(self, settings: Settings) -> None:
        self._store: JobStore | None = None
        self._settings = settings

    def find(self, video_id: str) -> Path | None:
        """Return the file of a completed video."""
        try:
            if self._store is None:
                self._store = JobStore(self._settings.cache_dir / NAME)
            saved = self._store.get(video_id).saved
        except StoreError:
            return None
        return None if saved is None else find_output(str(saved.video), self._settings.outputs_dir)

    def close(self) -> None:
        """Close the job store."""
        if self._store is not None:
            self._store.close()
