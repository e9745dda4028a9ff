"""What programs and pages may send to gradio's endpoints: judged before gradio sees it. Pure functions.

gradio takes much on trust, and what does not fit ends as a traceback and an answer 500: even its refusals do where they
quote NaN. It also fetches files that a
request names, by address or by path; nobody hands files in here.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Two texts of 5,000 characters, each written as an escape of twelve, and room for the rest.
MAX_BODY_BYTES = 192 * 1024
_DEEPEST = 16
_MOST_VALUES = 5_000
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_EVENT = re.compile(r"[0-9a-f]{32}")


class RefusedError(Exception):
    """What was sent cannot be; says why, and the HTTP status that goes with it."""

    def __init__(self, said: str, status: int = 422) -> None:
        super().__init__(said)
        self.said = said
        self.status = status


def session_of(value: object) -> str:
    """Return a session's name.

    Raises:
        RefusedError: for what cannot be one.
    """
    if isinstance(value, str) and _SESSION.fullmatch(value):
        return value
    raise RefusedError("The name of the session is 1 to 64 letters, digits, - or _.")


def is_event(value: str) -> bool:
    """Return whether this can be an event's id."""
    return _EVENT.fullmatch(value) is not None


def read_call(
    body: bytes, inputs: Mapping[int, int], api: int | None = None, defaults: Sequence[Any] = ()
) -> dict[str, Any]:
    """Read what calls a function of the page.

    Args:
        inputs: how many values each function takes, by its number.
        api: the function that is called, where the address says so; else the body does.
        defaults: of that function's values; the last ones may be left out, so that there may come more.

    Raises:
        RefusedError: for what gradio could not make sense of.
    """
    call = _read_object(body)
    number = call.get("fn_index") if api is None else api
    if isinstance(number, bool) or not isinstance(number, int) or number not in inputs:
        raise RefusedError("There is no such function here.")
    data = call.get("data")
    if api is not None and isinstance(data, list) and data:
        data = call["data"] = [*data, *defaults[len(data) :]]
    if not isinstance(data, list) or len(data) != inputs[number]:
        most = "at most " if api is not None else ""
        raise RefusedError(
            f'"data" is a list of {most}{inputs[number]} values, in the order of the endpoint\'s parameters.'
        )
    if call.get("session_hash") is not None:
        session_of(call["session_hash"])
    elif api is None:
        raise RefusedError("The name of the session is missing.")
    if call.get("batched") not in (None, False) or call.get("oauth_token") is not None:
        raise RefusedError("Batches and tokens are not taken here.")
    for name, kind in (("event_id", str), ("trigger_id", int), ("simple_format", bool)):
        if call.get(name) is not None and type(call[name]) is not kind:
            raise RefusedError(f'"{name}" is not what it should be.')
    _check_values([data, call.get("event_data")])
    return call


def read_reset(body: bytes) -> None:
    """Read what gradio does nothing with.

    Raises:
        RefusedError: for what cannot be.
    """
    if not isinstance(_read_object(body).get("event_id"), str):
        raise RefusedError("There is no such event.")


def read_cancel(body: bytes) -> dict[str, Any]:
    """Read what ends the watching of an event.

    Raises:
        RefusedError: for what cannot be.
    """
    call = _read_object(body)
    session_of(call.get("session_hash"))
    number, event = call.get("fn_index"), call.get("event_id")
    if isinstance(number, bool) or not isinstance(number, int) or not isinstance(event, str) or not is_event(event):
        raise RefusedError("There is no such event.")
    return call


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RefusedError("What was sent is not JSON.") from error
    if not isinstance(value, dict):
        raise RefusedError("What was sent is not a JSON object.")
    return value


def _check_values(values: object) -> None:
    """Refuse what nests deep, holds very much, or names a file."""
    waiting: list[tuple[object, int]] = [(values, 0)]
    seen = 0
    while waiting:
        value, depth = waiting.pop()
        seen += 1
        if seen > _MOST_VALUES or depth > _DEEPEST:
            raise RefusedError("What was sent holds more than any form here.")
        if isinstance(value, dict):
            if "path" in value or "url" in value:
                raise RefusedError("Files are not taken here.")
            waiting += [(one, depth + 1) for one in value.values()]
        elif isinstance(value, list):
            waiting += [(one, depth + 1) for one in value]
