"""Messages of `runtime.cli`."""

from collections.abc import Mapping

from runtime.core.messages import Message

MESSAGES: Mapping[str, Message] = {
    "bench.configuration_invalid": Message("Configuration “{configuration}”: {cause}", "{cause:remedy}"),
    "cli.flags_invalid": Message("{problem}.", "Give options as `generate` takes them."),
    "cli.guidance_invalid": Message("{field:setting} is {value}.", "Give a number such as 4, or two such as 4,3."),
    "cli.preset_without_lora": Message(
        "The preset {preset} is for a step-distillation LoRA, and none is given.",
        "Add {set[loras]} FILE, with both files for a model with two experts.",
    ),
}
