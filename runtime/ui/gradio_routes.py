"""The routes of gradio that this app uses; every other one is shut. Pure tables.

Open are the page and what it loads, the log-in, the calls of its functions and the streams that answer them. Shut are,
among others: uploads and their progress, the proxy, files by path or address, deep links, component servers, calls
around the queue, streams of media, recordings, run history, monitoring, profiling, the log-out, which ends everybody's
session, the access token, icons of any size, and the development pages.
"""

import re
from typing import Literal

Needs = Literal["nothing", "login"]

FILE = "/gradio_api/file="
# Of visitors, who see no paths: this app's own.
VIDEO = "/video/"
JOIN = "/gradio_api/queue/join"
RUN = "/gradio_api/run/predict"
GENERATE = "/gradio_api/call/generate"
CANCEL = "/gradio_api/cancel"
RESET = "/gradio_api/reset"
STREAM = "/gradio_api/queue/data"
HEARTBEAT = "/gradio_api/heartbeat/"
LOGIN = "/login"
# This app's own, for the person whose Tandem it is: see `parcels`.
PARCELS = "/tandem/"

_NAME = r"[A-Za-z0-9_@-][A-Za-z0-9_.@-]*"
_READ_BEFORE_LOGIN = re.compile(
    r"/|/theme\.css|/gradio_api/theme\.css|/favicon\.ico|/robots\.txt|/manifest\.json"
    r"|/gradio_api/(?:app_id|login_check|startup-events)/?"
    rf"|/(?:assets|static|svelte)(?:/{_NAME}){{1,6}}"
)
_READ = re.compile(
    rf"/config/?|/gradio_api/info/?|/gradio_api/openapi\.json|/gradio_api/user/?|{STREAM}"
    rf"|{HEARTBEAT}[A-Za-z0-9_-]{{1,64}}|{GENERATE}/[0-9a-f]{{32}}"
    rf"|{PARCELS}(?:now|poster/[0-9a-f]{{8}}\.webp|copy/[0-9a-f]{{8}}\.mp4|report/(?:whole/)?[0-9a-f]{{8}}\.json)"
)
_WRITE = re.compile(rf"{JOIN}|{RUN}|{GENERATE}/?|{CANCEL}|{RESET}/?")


def needs(method: str, path: str) -> Needs | None:
    """Return what a request needs to be let through; `None` says that it never is."""
    if method in {"GET", "HEAD"}:
        if _READ_BEFORE_LOGIN.fullmatch(path):
            return "nothing"
        return "login" if _READ.fullmatch(path) else None
    if method == "POST":
        if path.rstrip("/") == LOGIN:
            return "nothing"
        return "login" if _WRITE.fullmatch(path) else None
    return None
