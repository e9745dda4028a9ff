"""Messages of `runtime.ui`."""

from collections.abc import Mapping

from runtime.core.messages import Message

MESSAGES: Mapping[str, Message] = {
    "ui.interrupted": Message("Tandem ended while this video was made.", "Resume it: ./install.sh jobs resume {job}"),
    "ui.visitor_interrupted": Message("Tandem ended while this video was made.", "Ask for it again."),
    # The form.
    "form.empty": Message("{field:setting} is empty.", "Give a value such as {default:g}."),
    "form.incomplete": Message("The form is incomplete.", "Reload the page."),
    "form.lora_is_path": Message(
        "LoRAs are given by name here, and “{file}” is a path.",
        "Put the file into weights/loras in the cache folder and give its name, without .safetensors.",
    ),
    "form.loras_not_text": Message("The LoRAs are not text, or too long.", "Write one a line: name:weight."),
}
