"""Messages of `runtime.execution`."""

from collections.abc import Mapping

from runtime.core.messages import Message

MESSAGES: Mapping[str, Message] = {
    "execution.attention_unavailable": Message("The attention {attention} does not run here: {reason}."),
    "execution.compilation_failed": Message("PyTorch could not compile it ({error})."),
    "execution.triton_failed": Message("A Triton kernel failed ({error})."),
    "execution.graph_capture_failed": Message("CUDA could not record a graph of it ({error})."),
    "execution.engine_not_finite": Message("Its engine returned NaN or Inf."),
    "execution.engine_out_of_memory": Message("Its engine ran out of memory."),
    "execution.engine_load_out_of_memory": Message("Memory ran out while its engine was loaded."),
}
