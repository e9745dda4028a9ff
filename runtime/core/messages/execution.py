"""Messages of `runtime.execution`."""

from collections.abc import Mapping

from runtime.core.messages.message import Message

MESSAGES: Mapping[str, Message] = {
    "execution.attention_unavailable": Message(
        "The attention kernel {attention} does not run on this machine: {reason}."
    ),
    "execution.attention_inexact": Message("The attention kernel {attention} returns wrong values on this machine."),
    "execution.compilation_failed": Message("Compilation failed ({error})."),
    "execution.triton_failed": Message("A Triton kernel failed ({error})."),
    "execution.int8_failed": Message("A kernel of comfy-kitchen failed ({error})."),
    "execution.graph_capture_failed": Message("Recording a CUDA graph failed ({error})."),
    "execution.group_offload_failed": Message(
        "Group offloading to {device} failed: {error}.",
        "Use {set[offload=model]} or {set[offload=none]}.",
    ),
    "execution.vae_overflow": Message(
        "The VAE returned NaN or Inf.", "It probably overflows in {dtype}: use {set[vae_precision=float32]}."
    ),
    "execution.vae_not_finite": Message(
        "The VAE returned NaN or Inf.", "Its weights are damaged: copy or download the model again."
    ),
    "execution.interpolator_not_finite": Message(
        "The network that interpolates returned NaN or Inf in {dtype}.", "Use {set[interpolate=off]}."
    ),
    "execution.upscaler_not_finite": Message(
        "The upscaler returned NaN or Inf in {dtype}.", "Choose another upscaler; its weights may be damaged."
    ),
    "parallel.not_started": Message(
        "The processes of {count:n GPU} cannot be started: {reason}.", "Use {set[gpus=1]}."
    ),
    "parallel.failed": Message(
        "GPU {gpu} of {gpus} ({device}): {cause:clause}.",
        "Resume the job, with {set[gpus=1]} if it happens again; the log has more.",
    ),
    "parallel.failed_with_log": Message(
        "GPU {gpu} of {gpus} ({device}): {cause:clause}. The last line of its log: “{last}”.",
        "Resume the job, with {set[gpus=1]} if it happens again; the log has more.",
    ),
    "parallel.process_ended": Message("Its process ended ({exit})."),
    "parallel.task_failed": Message("Its process failed: {error}."),
    "parallel.not_responding": Message("Its process has not responded for {seconds:duration}."),
    "parallel.task_timeout": Message("Its process did not finish “{task}” within {seconds:duration}."),
    "execution.engine_not_finite": Message("Its engine returned NaN or Inf."),
    "execution.engine_out_of_memory": Message("Its engine ran out of memory."),
    "execution.block_not_on_engine": Message(
        "Blocks whose weight {weight} is quantized, replaced, or of another dtype or device run in PyTorch."
    ),
    "execution.engine_load_out_of_memory": Message("Its engine ran out of memory while loading."),
    "execution.engine_failed": Message("Its engine failed: {error}."),
    "execution.device_lost": Message(
        "The process cannot use the GPU any more: {error}.",
        "Resume the job; if it happens again, use {set[backend]} all=pytorch.",
    ),
}
