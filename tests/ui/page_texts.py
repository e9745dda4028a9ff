"""What the page shows of a fact."""

from typing import Any

from runtime.ui.formatting import page_text, paragraph
from tests.facts import fact

UNKNOWN = paragraph(fact("ui.unknown_action"))


def message(code: str, **data: Any) -> str:
    """Return a fact's sentence and remedy in the words of the form."""
    return paragraph(fact(code, **data))


def line(code: str, **data: Any) -> str:
    """Return a fact's sentence without the remedy."""
    return page_text(fact(code, **data)).what
