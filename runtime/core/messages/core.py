"""Messages of `runtime.core`."""

from collections.abc import Mapping

from runtime.core.messages import Message

MESSAGES: Mapping[str, Message] = {
    # Transitional: text from code that does not state facts yet.
    "text": Message("{what}", "{remedy}"),
    "event.waits_for_gpus": Message("Waiting for {wanted} GPUs: {free} free."),
    "event.fell_back": Message("{component:component}: PyTorch instead of {backend:backend}. {reason:advice}"),
    "event.slower": Message("About {times:.1f} times as long."),
    "event.less_exact": Message("The video is slightly less exact."),
    "event.out_of_memory": Message("Out of memory ({memory}) in the {stage} stage ({component:lower_component})."),
    "event.out_of_memory_strategy": Message(
        "Out of memory ({memory}) in the {stage} stage ({component:lower_component}). "
        "The job can continue with less memory: {effects:clauses}."
    ),
    "event.out_of_memory_retried": Message(
        "Out of memory ({memory}) in the {stage} stage ({component:lower_component}). "
        "The job continues with less memory: {effects:clauses}."
    ),
    "event.out_of_memory_repeated": Message(
        "Out of memory ({memory}) in the {stage} stage ({component:lower_component}). "
        "The job continues with less memory: {effects:clauses}. {lost_seconds:duration} of work is repeated."
    ),
    "event.internal_error": Message("Internal error: {error}", "See the log for details."),
    "internal_error": Message("Internal error: {error}", "The details are in {log}."),
}
