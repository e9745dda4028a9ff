"""Messages of `runtime.bench`."""

from collections.abc import Mapping

from runtime.core.messages.message import Message

MESSAGES: Mapping[str, Message] = {
    "bench.backend_without_configuration": Message(
        "{set[backends]} alone leaves nothing to compare.",
        'Name configurations, as in --config "onnx: --backend all=onnxruntime".',
    ),
    "bench.cancelled": Message("Cancelled: these are the measurements until then."),
    "bench.configuration_invalid": Message("Configuration “{configuration}”: {cause}", "{cause:remedy}"),
    "bench.configuration_repeated": Message(
        "Two configurations are named “{configuration}”.", "Give each its own name."
    ),
    "bench.configuration_unnamed": Message(
        "--config is {value}, without a name of 1 to {longest} characters before a colon.",
        'Give it as in --config "onnx: --backend all=onnxruntime".',
    ),
    "bench.count_invalid": Message("{field:setting} is {value}.", "Give a whole number from {low} to {high}."),
    "bench.folder_is_file": Message("{field:setting} is {folder}, which is a file.", "Give the name of a folder."),
    "bench.not_a_result": Message(
        "{file} is not a complete benchmark result.", "Give a bench.json that `{tandem} bench` wrote."
    ),
    "bench.not_read": Message("{file} cannot be read: {error}.", "Give a bench.json that `{tandem} bench` wrote."),
    "bench.not_written": Message(
        "{file} cannot be written: {error}.", "Free some space, or give another folder by --out."
    ),
    "bench.nothing_measured": Message("Nothing was measured. {why}", "Choose another configuration."),
    "bench.nothing_to_compare": Message(
        "Nothing in these results can be compared: {why}", "Measure the same configurations, with the same request."
    ),
    "bench.results_empty": Message("The results have no configurations.", "Measure again."),
    "bench.other_schema": Message("{file} has schema {schema}; this version reads {readable}.", "Measure again."),
    "bench.prompt_is_file": Message(
        "{prompt} looks like a file, not a prompt.", "Compare two results with `{tandem} bench compare A.json B.json`."
    ),
    "bench.two_kinds": Message(
        "One result is of whole clips, the other of forward passes.", "Give two of the same kind."
    ),
    "bench.two_machines": Message("The results are of two machines: {machines:list}.", "Measure both on one machine."),
}
