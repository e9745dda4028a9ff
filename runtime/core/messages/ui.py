"""Messages of `runtime.ui`."""

from collections.abc import Mapping

from runtime.core.messages import Message

MESSAGES: Mapping[str, Message] = {
    "ui.interrupted": Message("Tandem ended while this video was made.", "Resume it: ./install.sh jobs resume {job}"),
    "ui.visitor_interrupted": Message("Tandem ended while this video was made.", "Ask for it again."),
}
