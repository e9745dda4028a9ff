"""Where a chat model runs that enhances a prompt, and in which precision. Pure."""

from typing import NamedTuple

# Of its weights, for states and the keys and values of some thousand tokens, and for what the libraries take.
_MARGIN, _OVERHEAD_BYTES = 1.15, 1 << 29
_BF16_BYTES, _FLOAT32_BYTES = 2, 4


class ChatPlacement(NamedTuple):
    """Where a chat model runs.

    Attributes:
        on_gpu: whether on the GPU; else on the CPU.
        dtype: by torch's name.
        bytes: that it needs there.
    """

    on_gpu: bool
    dtype: str
    bytes: int


def place_chat_model(parameters: int, gpu_bytes: int | None, ram_bytes: int) -> ChatPlacement | None:
    """Return where a chat model runs: on the GPU if it fits, on the CPU in float32 if that fits, else in bfloat16.

    Args:
        parameters: its number of weights.
        gpu_bytes: free memory of the GPU; `None` without one.
        ram_bytes: free memory of the machine.

    Returns:
        `None` if it fits nowhere.
    """
    small, large = least_bytes(parameters), _needed(parameters, _FLOAT32_BYTES)
    if gpu_bytes is not None and small <= gpu_bytes:
        return ChatPlacement(True, "bfloat16", small)
    # Many CPUs compute faster in float32. Its files are read in their own precision, beside the weights.
    if large <= ram_bytes:
        return ChatPlacement(False, "float32", large)
    return ChatPlacement(False, "bfloat16", small) if small <= ram_bytes else None


def least_bytes(parameters: int) -> int:
    """Return the memory in which a chat model runs."""
    return _needed(parameters, _BF16_BYTES)


def _needed(parameters: int, element_bytes: int) -> int:
    return round(_MARGIN * parameters * element_bytes) + _OVERHEAD_BYTES
