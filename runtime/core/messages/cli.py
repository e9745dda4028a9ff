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
    "bench.nothing_measured": Message("Nothing was measured. {why}", "Choose another configuration."),
    "cli.delete_not_confirmed": Message("Deletion needs a confirmation, and there is no terminal.", "Add --yes."),
    "cli.file_unreadable": Message("FILE is empty or unreadable.", "Give the path of an engine file."),
    "cli.folder_not_created": Message("The folder {folder} cannot be created: {error}.", "Give a writable folder."),
    "cli.folder_unreadable": Message("{field:setting} is empty or unreadable.", "Give the name of a folder."),
    "cli.license_not_confirmed": Message(
        "The license needs a confirmation, and there is no terminal.", "Add --yes if you agree to it."
    ),
    "cli.no_such_component": Message("{model} has no component {component}.", "Select one of {choices:list}."),
    "cli.revision_unreadable": Message("{field:setting} is empty or unreadable.", "Give a branch, tag or commit."),
    "cli.size_invalid": Message("{field:setting} is {value}.", "Give a size, as in 500MB or 20GB."),
    "cli.trust_not_confirmed": Message(
        "Opening {file} needs a confirmation, and there is no terminal.", "Add --yes if you trust the file."
    ),
    "bench.configuration_repeated": Message(
        "Two configurations are named “{configuration}”.", "Give each its own name."
    ),
    "bench.configuration_unnamed": Message(
        "--config is {value}, without a name of 1 to {longest} characters before a colon.",
        'Give it as in --config "onnx: --backend all=onnxruntime".',
    ),
    "bench.folder_is_file": Message("{field:setting} is {folder}, which is a file.", "Give the name of a folder."),
    "bench.incomplete": Message("{file} is incomplete.", "Give a bench.json that `bench` wrote."),
    "bench.not_a_result": Message("{file} is not a benchmark result.", "Give a bench.json that `bench` wrote."),
    "bench.not_json": Message("{file} is not JSON.", "Give a bench.json that `bench` wrote."),
    "bench.not_read": Message("{file} cannot be read: {error}.", "Give a bench.json that `bench` wrote."),
    "bench.not_written": Message(
        "{file} cannot be written: {error}.", "Free some space, or give another folder by --out."
    ),
    "bench.nothing_to_compare": Message(
        "Nothing in these results can be compared: {why}", "Measure the same configurations, with the same request."
    ),
    "bench.other_schema": Message("{file} has schema {schema}; this version reads {readable}.", "Measure again."),
    "bench.two_kinds": Message(
        "One result is of whole clips, the other of forward passes.", "Give two of the same kind."
    ),
    "bench.two_machines": Message("The results are of two machines: {machines:list}.", "Measure both on one machine."),
}
