"""What the script of the tabs Queue and History asks for, read with trust in nothing."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.core.errors import InvalidRequestError
from runtime.ui.history_view import ALL, FILTERS

# What a view goes to, by the tab that shows it.
SHOWN: Mapping[str, tuple[str, ...]] = {
    "make": (),
    "queue": ("line", "ended"),
    "history": ("compare", "settings", "detail", "gallery", "room"),
}
_ID = re.compile(r"[0-9a-f]{8}")
_MOST_SENT = 200_000
_MOST_SEARCHED, _LAST_PAGE = 200, 1_000_000
_PAIR = 2


@dataclass(frozen=True)
class Asked:
    """What the script asks for.

    Attributes:
        act, of: what to do, and with what.
        values: of a form beside the button.
        tab: that is open.
        search, state, page: what the history shows.
        open: the job whose details are shown.
        pair: the two that are compared.
        marks: of what is drawn already, by part.
        number: of the question.
    """

    act: str
    of: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    tab: str = "make"
    search: str = ""
    state: str = ALL
    page: int = 0
    open: str = ""
    pair: tuple[str, ...] = ()
    marks: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0


def read(message: Any) -> Asked:
    """Read what the script sends.

    Raises:
        InvalidRequestError: if it is not what a page sends.
    """
    try:
        sent = json.loads(message) if isinstance(message, str) and len(message) <= _MOST_SENT else None
    except (ValueError, RecursionError):
        sent = None
    match sent:
        case {
            "act": str(act),
            "of": str(of),
            "tab": str(tab),
            "search": str(search),
            "state": str(state),
            "page": int(page),
            "open": str(opened),
            "pair": [*pair],
            "values": dict(values),
            "marks": dict(marks),
            "number": int(number),
        } if tab in SHOWN and state in FILTERS and 0 <= page <= _LAST_PAGE and len(search) <= _MOST_SEARCHED:
            ids = tuple(one for one in pair if isinstance(one, str) and is_id(one))
            return Asked(
                act=act,
                of=of,
                values=values,
                tab=tab,
                search=search,
                state=state,
                page=page,
                open=opened if is_id(opened) else "",
                pair=ids if len(ids) == _PAIR else (),
                marks=marks,
                number=number,
            )
    raise unknown()


def is_id(text: str) -> bool:
    """Return whether this can be a job's id."""
    return _ID.fullmatch(text) is not None


def unknown() -> InvalidRequestError:
    """Return the error for what no page asks for."""
    return InvalidRequestError("act", "There is no such action or job.", "Load the page again.")
