"""Messages of `runtime.pipeline`."""

from collections.abc import Mapping

from runtime.core.messages.message import Message

MESSAGES: Mapping[str, Message] = {
    "pipeline.unknown_words": Message(
        "The model does not know {words:words}: the {field} was encoded without these words."
    ),
    "pipeline.text_cut": Message("The {field} is longer than the model supports; the end was cut off."),
    "pipeline.degraded": Message("{component:component}: slower than planned. {reason}"),
    "pipeline.left_float16": Message(
        "{component:component}: float16 overflowed in PyTorch too; the weights were loaded again in {dtype}."
    ),
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
    "pipeline.clip_black": Message("The clip is black from beginning to end.", "{cause}"),
    "pipeline.clip_blank": Message("Every frame of the clip is a single color.", "{cause}"),
    "pipeline.clip_frozen": Message("The clip is frozen: all its frames are the same.", "{cause}"),
    "pipeline.sound_not_finite": Message(
        "The sound has NaN or Inf: the video is saved without it. Another seed, or more precise weights, may help."
    ),
    "pipeline.sound_silent": Message("The sound is silent from beginning to end. Name sounds in the prompt."),
    "pipeline.sound_clipped": Message("The sound is clipped: {share:.1%} of its samples are at the highest level."),
    "cause.vae_engine": Message(
        "Most likely the VAE decoder fails in {precision} on {backend:backend}: use {set[backend]} vae=pytorch."
    ),
    "cause.transformer_engine": Message(
        "Most likely the {component:lower_component} fails on {backend:backend}: "
        "use {set[backend]} {component}=pytorch."
    ),
    "cause.guidance_scale": Message("Most likely the guidance scale of {scale:g} is too high: use a value below 10."),
    "cause.quantization": Message(
        "Most likely {quantization} is too imprecise for the transformers: use {set[quantization=none]}."
    ),
    "cause.vae_precision": Message(
        "Most likely {dtype} is too imprecise for the VAE: use {set[vae_precision=float32]}."
    ),
    "cause.vae_precision_or_weights": Message(
        "Most likely {dtype} is too imprecise for the VAE: use {set[vae_precision=float32]}. "
        "Otherwise the model's weights are damaged: copy or download the model again."
    ),
    "cause.float16": Message(
        "Most likely float16 overflows. Use another prompt or seed, or a GPU that supports bfloat16."
    ),
    "cause.few_steps": Message("Most likely {steps:n step} are too few: use the model's default number of steps."),
    "cause.weights": Message(
        "Most likely the model's weights are damaged: copy or download the model again. Or try another seed."
    ),
    "pipeline.not_finite": Message(
        "Step {step} of {of} returned NaN or Inf.",
        "Lower the guidance scale; if it happens in the first step, the model's weights are damaged.",
    ),
    "pipeline.scheduler_failed": Message(
        "The scheduler {scheduler}, as this model configures it, failed: {error}.",
        "Copy the model's scheduler folder again, or use another number of steps.",
    ),
    "pipeline.scheduler_noise": Message(
        "The scheduler {scheduler} adds noise that does not follow the seed, so that a video could not be repeated.",
        "Use another model, or another scheduler in the model's scheduler folder.",
    ),
    "pipeline.backend_unsupported": Message(
        "{backend:backend} engines cannot be built here: {component:component} runs on {device}, "
        "which {backend:backend} does not support.",
        "Use another backend.",
    ),
    "pipeline.not_buildable": Message(
        "{backend:backend} engines cannot be built here: {cause:clause}.", "{cause:remedy}"
    ),
    "pipeline.outputs_folder": Message(
        "Nothing can be written to the folder for videos, {folder}: {reason}.",
        "Make the folder writable, or set TANDEM_CACHE_DIR to another folder.",
    ),
    "checkpoint.damaged": Message("The checkpoint is damaged."),
    "checkpoint.other_version": Message("It was written by another version of Tandem."),
    "checkpoint.other_clip": Message("It belongs to another clip, or the model's files have changed."),
    "checkpoint.other_scheduler": Message("It was written with another version of {scheduler}."),
    "checkpoint.scheduler_value": Message("{attribute} is a {type}, which cannot be stored."),
    "checkpoint.not_writable": Message("{folder} cannot be written: {reason}."),
    "checkpoint.no_memory": Message("There is not enough memory (RAM) to write it."),
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
