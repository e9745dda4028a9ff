"""Which requests reach Gradio, and what they may contain. Pure functions.

Open are the page and its assets, the login, calls of the page's functions, the streams of their results, and Tandem's
own routes, one of which takes the place of Gradio's uploads. All other routes of Gradio are closed, among them the
proxy, files by path or address, deep links, component servers, media streams, monitoring, the log-out (it ends every
session) and the development pages.

Gradio trusts what it is sent: a call that does not fit ends as a traceback and status 500, and a value that looks like
a file is read or downloaded. Calls are therefore validated before Gradio sees them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from python_multipart.multipart import parse_options_header
from starlette.exceptions import HTTPException

from runtime.core.facts import Fact, as_text
from runtime.core.images import PREFIX
from runtime.video.export import MOST_CLIPS
from runtime.video.image_messages import MAX_FILE_BYTES

Access = Literal["public", "login"]

FILE = "/gradio_api/file="
JOIN = "/gradio_api/queue/join"
RUN = "/gradio_api/run/predict"
GENERATE = "/gradio_api/call/generate"
CANCEL = "/gradio_api/cancel"
RESET = "/gradio_api/reset"
STREAM = "/gradio_api/queue/data"
HEARTBEAT = "/gradio_api/heartbeat/"
LOGIN = "/login"
# Tandem's own routes: all of the owner's page, and the videos of the visitors' page.
OWN = "/tandem/"
IMAGES = f"{OWN}images/"
VIDEOS = f"{OWN}videos/"
LATENTS = f"{OWN}latents/"
# The control frames of the form.
CONTROL = f"{OWN}control"
# Of both pages: what clips can be exported to, by their ids, and the export.
EXPORT = f"{OWN}export"
# The path of Gradio's own route, which gradio_client uses; `image_uploads` takes its place.
UPLOAD = "/gradio_api/upload"
VIDEO = "/video/"

# Two texts of 5,000 characters, each character as an escape of twelve bytes, and the other fields.
MAX_BODY_BYTES = 192 * 1024
# Of an upload: an image or a video, and the form around it.
MAX_UPLOAD_BYTES = MAX_FILE_BYTES + 64 * 1024
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})
_MAX_DEPTH = 16
_MAX_VALUES = 5_000
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_EVENT = re.compile(r"[0-9a-f]{32}")

# File systems refuse names of more than 255 bytes, and Gradio answers that with status 500.
_NAME = r"[A-Za-z0-9_@-][A-Za-z0-9_.@-]{0,199}"
_PUBLIC = re.compile(
    r"/|/theme\.css|/gradio_api/theme\.css|/favicon\.ico|/robots\.txt|/manifest\.json"
    r"|/gradio_api/(?:app_id|login_check|startup-events)/?"
    rf"|/(?:assets|static|svelte)(?:/{_NAME}){{1,6}}|{OWN}fonts/[a-z0-9-]{{1,32}}\.woff2|{OWN}examples/[a-z]{{1,32}}\.webp"
)
_READ = re.compile(
    rf"/config/?|/gradio_api/info/?|/gradio_api/openapi\.json|/gradio_api/user/?|{STREAM}"
    rf"|{HEARTBEAT}[A-Za-z0-9_-]{{1,64}}|{GENERATE}/[0-9a-f]{{32}}"
    rf"|{EXPORT}/[0-9a-f]{{8}}(?:-[0-9a-f]{{8}}){{0,{MOST_CLIPS - 1}}}"
)
_UPLOADS = re.compile(rf"{UPLOAD}|{IMAGES}[^/]{{1,600}}", re.DOTALL)
_VIDEOS = re.compile(rf"{VIDEOS}[^/]{{1,600}}", re.DOTALL)
_LATENTS = re.compile(rf"{LATENTS}[0-9a-f]{{16}}/[0-9]{{1,15}}/[0-9]{{1,15}}/[^/]{{1,600}}")
_WRITE = re.compile(rf"{JOIN}|{GENERATE}/?|{CANCEL}|{RESET}/?|{EXPORT}|{_UPLOADS.pattern}", re.DOTALL)
_OWNER_READ = re.compile(
    rf"{OWN}(?:now(?:/[0-9]{{1,15}})?|poster/[0-9a-f]{{8}}\.webp|(?:copy|before)/[0-9a-f]{{8}}\.mp4|clip/[0-9a-f]{{8}}/[0-9]{{1,9}}\.mp4"
    rf"|report/(?:whole/)?[0-9a-f]{{8}}\.json)|{FILE}.*",
    re.DOTALL,
)
_OWNER_WRITE = re.compile(rf"{RUN}|{CONTROL}|{OWN}panels/[a-z]{{1,16}}|{_LATENTS.pattern}|{_VIDEOS.pattern}", re.DOTALL)
_VISITOR_READ = re.compile(rf"{VIDEO}.*", re.DOTALL)


class RefusedError(HTTPException):
    """A request that is refused, with the HTTP status; `detail` is the fact's text.

    Args:
        fact: the reason, or its code.
        data: of the reason, if its code is given.
        text: `detail`, if the fact has more than the client should read.
    """

    def __init__(self, fact: Fact | str, status: int = 422, *, text: str = "", **data: Any) -> None:
        self.fact = Fact(fact, data) if isinstance(fact, str) else fact
        super().__init__(status, text or as_text(self.fact))


def access(method: str, path: str, *, visitors: bool = False) -> Access | None:
    """Return what a request needs to be passed on; `None` if it is always refused.

    Args:
        visitors: whether it is the page of a share link's visitors.
    """
    if method in {"GET", "HEAD"}:
        if _PUBLIC.fullmatch(path):
            return "public"
        pattern = _VISITOR_READ if visitors else _OWNER_READ
        return "login" if _READ.fullmatch(path) or pattern.fullmatch(path) else None
    if method == "POST":
        if path.rstrip("/") == LOGIN:
            return "public"
        own_write = not visitors and _OWNER_WRITE.fullmatch(path)
        return "login" if _WRITE.fullmatch(path) or own_write else None
    return None


def is_upload(path: str) -> bool:
    """Return whether a POST to this path sends an image, a video, or a part of a file of latents."""
    return any(pattern.fullmatch(path) is not None for pattern in (_UPLOADS, _VIDEOS, _LATENTS))


def charset_problem(content_type: str) -> str | None:
    """Return the charset of a form if it is not UTF-8, else `None`.

    Starlette decodes with any codec of Python; that of "idna" needs seconds for some names, on the event loop.
    """
    kind, options = parse_options_header(content_type)
    charset = options.get(b"charset", b"utf-8").decode("latin-1").strip().lower()
    return charset if kind == b"multipart/form-data" and charset not in _CHARSETS else None


def read_session(value: object) -> str:
    """Return the name of a session.

    Raises:
        RefusedError: if the value cannot be one.
    """
    if isinstance(value, str) and _SESSION.fullmatch(value):
        return value
    raise RefusedError("server.session_name")


def read_call(
    body: bytes, inputs: Mapping[int, int], api: int | None = None, defaults: Sequence[Any] = ()
) -> dict[str, Any]:
    """Read a call of one of the page's functions.

    Args:
        inputs: the number of values that each function takes, by function number.
        api: the function that the address names; without it, the body names one.
        defaults: of that function's values; a caller may leave the last ones out.

    Raises:
        RefusedError: if Gradio could not handle it.
    """
    call = read_object(body)
    number = call.get("fn_index") if api is None else api
    if isinstance(number, bool) or not isinstance(number, int) or number not in inputs:
        raise RefusedError("server.not_found", kind="function")
    data = call.get("data")
    if api is not None and isinstance(data, list) and data:
        data = call["data"] = [*data, *defaults[len(data) :]]
    if not isinstance(data, list) or len(data) != inputs[number]:
        code = "server.call_values" if api is None else "server.call_too_many_values"
        raise RefusedError(code, count=inputs[number])
    call["data"] = data = [_uploaded(value) for value in data]
    if call.get("session_hash") is not None:
        read_session(call["session_hash"])
    elif api is None:
        raise RefusedError("server.session_name")
    if call.get("batched") not in (None, False) or call.get("oauth_token") is not None:
        raise RefusedError("server.call_unsupported")
    for name, kind in (("event_id", str), ("trigger_id", int), ("simple_format", bool)):
        if call.get(name) is not None and type(call[name]) is not kind:
            raise RefusedError("server.call_type", name=name)
    check_values([data, call.get("event_data")])
    return call


def _uploaded(value: Any) -> Any:
    """Return the name of the copy of an uploaded image that gradio_client sends as a file; other values unchanged."""
    match value:
        case {"path": str(path), "meta": {"_type": "gradio.FileData"}} if path.startswith(PREFIX):
            return path
    return value


def read_reset(body: bytes) -> None:
    """Read a reset, which Gradio accepts and ignores.

    Raises:
        RefusedError: if it names no event.
    """
    if not isinstance(read_object(body).get("event_id"), str):
        raise RefusedError("server.not_found", kind="event")


def read_cancel(body: bytes) -> dict[str, Any]:
    """Read the request to stop watching an event.

    Raises:
        RefusedError: if it names no session or event.
    """
    call = read_object(body)
    read_session(call.get("session_hash"))
    number, event = call.get("fn_index"), call.get("event_id")
    if isinstance(number, bool) or not isinstance(number, int) or not isinstance(event, str):
        raise RefusedError("server.not_found", kind="event")
    if _EVENT.fullmatch(event) is None:
        raise RefusedError("server.not_found", kind="event")
    return call


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object.

    Raises:
        RefusedError: if it is none.
    """
    try:
        value = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RefusedError("server.not_json") from error
    if not isinstance(value, dict):
        raise RefusedError("server.not_an_object")
    return value


def check_values(values: object) -> None:
    """Check that values are not nested deeply, not very many, and name no file.

    Raises:
        RefusedError: otherwise.
    """
    waiting: list[tuple[object, int]] = [(values, 0)]
    count = 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if count > _MAX_VALUES or depth > _MAX_DEPTH:
            raise RefusedError("server.call_too_large")
        if isinstance(value, dict):
            if "path" in value or "url" in value:
                raise RefusedError("server.call_files")
            waiting += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            waiting += [(item, depth + 1) for item in value]
