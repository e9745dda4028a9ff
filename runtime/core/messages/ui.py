"""Messages of `runtime.ui`."""

from collections.abc import Mapping

from runtime.core.messages import Message

MESSAGES: Mapping[str, Message] = {}
