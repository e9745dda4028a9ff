"""Sparse attention as requested: "sol", or "sol:TAU" with a threshold.

Sol-Attn (https://arxiv.org/abs/2607.24027) divides tokens into blocks of 64. Each block of queries attends exactly to
itself, its two neighbours, and the blocks of keys whose mean score is more than TAU standard deviations above the mean
of all blocks; every other block of keys contributes one term, from its mean key and the sum of its values. It needs no
training. A higher TAU is faster and less exact.

Attention stays exact in the first fifth of a schedule's steps and in a transformer's first block, as in the paper, and
in short sequences, where sparse attention is not faster.
"""

from runtime.core.errors import InvalidRequestError
from runtime.core.facts import shortened

SOL = "sol"
# The default is that of the kernel and of the paper's authors; ComfyUI's node has the same limits, and 1.3 as its own.
TAU, LEAST_TAU, MOST_TAU = 1.0, 0.0, 4.0
# Tokens of a block.
BLOCK = 64
# Width of a head; the kernel has no other.
HEAD_WIDTH = 128
# Shorter sequences are attended exactly. The kernel's documentation states "roughly 12k", ComfyUI's node this number.
LEAST_TOKENS = 12_288
# Blocks of a transformer that are exact in every step.
EXACT_BLOCKS = 1
# Of a schedule's steps, one of so many is exact.
_EXACT_STEPS = 5


def exact_steps(steps: int) -> int:
    """Return how many of a schedule's first steps have exact attention, with sparse attention in the others."""
    return -(-steps // _EXACT_STEPS)


def exact_share(blocks: int) -> float:
    """Return the share of a long schedule's calls of attention, in a transformer of so many blocks, that is exact."""
    return 1 - (1 - 1 / _EXACT_STEPS) * max(1 - EXACT_BLOCKS / blocks, 0.0)


def is_sparse(attention: str) -> bool:
    """Whether a request's attention is sparse."""
    return kernel_of(attention) == SOL


def kernel_of(attention: str) -> str:
    """Return the kernel that a request's attention names, without a threshold: one of `request.ATTENTIONS`."""
    return attention.partition(":")[0]


def tau_of(attention: str) -> float:
    """Return the threshold of sparse attention."""
    return float(attention.partition(":")[2] or TAU)


def read_sparse(field: str, value: str) -> str:
    """Return sparse attention in its shortest notation: "sol" or "sol:1.5".

    Args:
        field: the request field, for errors.

    Raises:
        InvalidRequestError: for a threshold that is no number or out of range.
    """
    kernel, colon, number = value.partition(":")
    if not colon:
        return kernel
    try:
        tau = float(number)
    except ValueError:
        tau = -1.0
    if not LEAST_TAU <= tau <= MOST_TAU:
        raise InvalidRequestError(
            field, "sparse_attention.tau", tau=shortened(number), least=LEAST_TAU, most=MOST_TAU, default=TAU
        )
    return f"{kernel}:{abs(tau):g}"
