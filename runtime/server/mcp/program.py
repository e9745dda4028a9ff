"""The MCP server as a program that a client starts and talks to over its standard streams."""

import asyncio
import contextlib
import os
from pathlib import Path

import httpx

from runtime.core.errors import SettingsError, StoreError
from runtime.core.processes import stop_on_signals
from runtime.core.settings import Settings
from runtime.queue.store import NAME, JobStore
from runtime.server.job_files import find_output
from runtime.server.mcp.tools import McpTools
from runtime.server.mcp.transports import serve_stdio, standard_streams
from runtime.server.serve import address_of, print_line, serve

KEY_VARIABLE = "TANDEM_API_KEY"
_SECONDS = 10.0


def run(settings: Settings) -> str:
    """Serve the client on standard input and output until it closes its end; return the address of the API.

    Uses the Tandem that answers at the settings' port, or serves the API itself. In that case running videos are paused
    at the end, as on Ctrl-C of `serve`.

    Raises:
        SettingsError: if the API needs a key, and `TANDEM_API_KEY` has none or a wrong one.
        TandemError: as `serve`.
    """
    key = os.environ.get(KEY_VARIABLE) or None
    with standard_streams() as (incoming, outgoing), stop_on_signals() as stop, contextlib.ExitStack() as stack:
        url = address_of(settings.host, settings.port)
        if _answers(url, key):
            print_line(f"Using the Tandem at {url}.")
        else:
            stack.enter_context(serve(settings))
            _answers(url, key)
            print_line(f"Tandem's API is at {url}v1.")
        files = _Files(settings)
        stack.callback(files.close)
        asyncio.run(serve_stdio(McpTools(url, key, files.find), incoming, outgoing, stop))
    return url


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
