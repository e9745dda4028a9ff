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
    "cli.limit_without_share": Message("{flag} has no effect without a share link.", "Add --share."),
    "cli.out_unreadable": Message("{field:setting} is empty or unreadable.", "Give a file name that ends in .mp4."),
    "cli.usage": Message("{problem}.", "See: {help}"),
    "cli.web_flag_before_command": Message(
        "{flag} before a command is an option of the web app.", "Put the command's own options after it. See: {help}"
    ),
    "bench.backend_without_configuration": Message(
        "{set[backends]} alone leaves nothing to compare.",
        'Name configurations, as in --config "onnx: --backend all=onnxruntime".',
    ),
    "bench.count_invalid": Message("{field:setting} is {value}.", "Give a whole number from {low} to {high}."),
    "bench.nothing_measured": Message("Nothing was measured: {why}", "Choose another configuration."),
    "bench.rate_invalid": Message(
        "{field:setting} is {value}.", "Give the device's tera-operations per second, such as 790."
    ),
}
