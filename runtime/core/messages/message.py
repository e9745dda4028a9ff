"""The text of one fact."""

from typing import NamedTuple


class Message(NamedTuple):
    """The templates of one code; `badge` is a short form of `what` for badges and tables."""

    what: str
    remedy: str = ""
    badge: str = ""
