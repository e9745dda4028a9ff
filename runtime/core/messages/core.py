"""Messages of `runtime.core`."""

from collections.abc import Mapping

from runtime.core.messages import Message

MESSAGES: Mapping[str, Message] = {
    # Transitional: text from code that does not state facts yet.
    "text": Message("{what}", "{remedy}"),
    "internal_error": Message("Internal error: {error}", "The details are in {log}."),
}
