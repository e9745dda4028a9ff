"""Messages of `runtime.pipeline`."""

from collections.abc import Mapping

from runtime.core.messages import Message

MESSAGES: Mapping[str, Message] = {
    "pipeline.unknown_words": Message("The model does not know {words:quoted}: the {field} was encoded without."),
    "pipeline.text_cut": Message("The {field} is longer than the model reads; the end was cut off."),
    "pipeline.degraded": Message("{component:component}: slower than planned. {reason}"),
    "pipeline.engine_rebuilt": Message(
        "{component:component}: the engine {engine} cannot be used ({problem}) and is rebuilt."
    ),
    "pipeline.step_not_resumable": Message("The job cannot be resumed between its steps: {cause:clause}."),
    "pipeline.checkpoint_unusable": Message("The checkpoint cannot be used ({cause:clause}); starting over."),
    "pipeline.checkpoints_stopped": Message(
        "Checkpoints cannot be saved: {cause:clause}. If the job is interrupted, it starts over."
    ),
    "pipeline.checkpoints_stopped_after": Message(
        "Checkpoints cannot be saved any more: {cause:clause}. If the job is interrupted, it resumes after step {step}."
    ),
    "checkpoint.damaged": Message("The checkpoint is damaged."),
    "checkpoint.other_version": Message("Another version of Tandem wrote it."),
    "checkpoint.other_clip": Message("It belongs to another clip, or the model's files have changed."),
    "checkpoint.other_scheduler": Message("It was written with another version of {scheduler}."),
    "checkpoint.scheduler_value": Message("{attribute} holds a {type}, which cannot be stored."),
    "checkpoint.not_writable": Message("{folder} cannot be written: {reason}."),
    "checkpoint.no_memory": Message("There is not enough memory (RAM) to copy it."),
    "checkpoint.boundary_unusable": Message(
        "The checkpoint between the two transformers cannot be used: {cause:clause}.", "Generate the video again."
    ),
    "checkpoint.boundary_missing": Message(
        "There is no checkpoint between the two transformers: the job was interrupted earlier, or it was removed.",
        "Generate the video again; its checkpoint is then kept.",
    ),
    "checkpoint.boundary_not_copied": Message(
        "The second half cannot be prepared: {cause:clause}.", "Free some disk space and try again."
    ),
    "pipeline.out_of_memory": Message(
        "Out of memory ({memory}) in the {stage} stage ({component:lower_component}).",
        "Use a smaller size or fewer frames, or close other programs.",
    ),
    "pipeline.out_of_memory_resumable": Message(
        "Out of memory ({memory}) in the {stage} stage ({component:lower_component}).",
        "Close other programs and resume the job: it continues after step {step} of {of}.",
    ),
    "pipeline.out_of_memory_strategy": Message(
        "Out of memory ({memory}) in the {stage} stage ({component:lower_component}).",
        "Generate again with {changes:settings}: {effects:clauses}.",
    ),
    "pipeline.out_of_memory_resumable_strategy": Message(
        "Out of memory ({memory}) in the {stage} stage ({component:lower_component}).",
        "Resume the job with {changes:settings}: {effects:clauses}. It continues after step {step} of {of}.",
    ),
}
