"""A page behind gradio's server, with the gate before it."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import gradio as gr
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from runtime.ui import theme
from runtime.ui.files import find_output
from runtime.ui.head_injection import Document
from runtime.ui.security_middleware import Gate
from runtime.ui.visitor_sessions import Lobby

# Nobody uploads; the gate shuts the way in, and this holds should it ever open.
_MAX_UPLOAD_BYTES = 1024
_GOODBYE_SECONDS = 1
# Each page that watches a job takes one.
_THREADS = 80
# gradio keeps a copy of the page's state for each session.
_SESSIONS_KEPT = 300


def start(
    page: gr.Blocks,
    host: str,
    port: int,
    names: Callable[[], frozenset[str] | None],
    outputs_dir: Path,
    auth: tuple[str, str] | None = None,
    auth_message: str | None = None,
    lobby: Lobby | None = None,
    parcels: Sequence[BaseRoute] = (),
) -> str:
    """Serve a page until `stop`; return its address.

    Args:
        names: returns the host names that are answered to; `None` stands for any.
        lobby: of a visitors' page.
        parcels: routes beside gradio's.

    Raises:
        OSError: if the port is taken.
    """
    gate = Middleware(Gate, names=names, find=lambda asked: find_output(asked, outputs_dir), lobby=lobby)
    _, url, _ = page.launch(
        server_name=f"[{host}]" if ":" in host else host,
        server_port=port,
        auth=auth,
        auth_message=auth_message if auth else None,
        prevent_thread_lock=True,
        inbrowser=False,
        # See `tunnel`.
        share=False,
        quiet=True,
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        num_workers=0,
        allowed_paths=[str(outputs_dir)],
        max_file_size=_MAX_UPLOAD_BYTES,
        max_threads=_THREADS,
        state_session_capacity=_SESSIONS_KEPT,
        favicon_path=theme.ICON,
        theme=theme.theme(),
        app_kwargs={"middleware": [gate, Middleware(Document, head=theme.head())], "routes": list(parcels)},
    )
    return str(url)


def stop(page: gr.Blocks) -> None:
    """Stop serving without waiting for pages, which keep a connection open for as long as they are shown."""
    if page.is_running:
        errors = logging.getLogger("uvicorn.error")
        before = errors.level
        errors.setLevel(logging.CRITICAL)
        page.server.config.timeout_graceful_shutdown = _GOODBYE_SECONDS
        page.close(verbose=False)
        # Another page may go on.
        errors.setLevel(before)
