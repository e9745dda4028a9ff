"""Sparse attention, Sol-Attn, by the kernels of the package `comfy-kitchen`; see `core.sparse_attention`.

The kernels (compute capability 8.0 and newer, heads of 128 channels, 16 bits) round queries, keys and values to INT8.
They weigh a pooled term by the score of the query block's mean, where the paper has that of each query. Errors by
threshold: bench/gpu/sparse_attention.py.
"""

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from runtime.core.sparse_attention import BLOCK


def attend_sparse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: float, last: int = 0) -> torch.Tensor:
    """Return sparse attention of (batch, tokens, heads, head width), in the dtype of `q`.

    Args:
        tau: the threshold, in standard deviations.
        last: how many of the last tokens, those of the text, attend exactly and are attended to exactly. The block in
            which they begin counts as theirs.
    """
    attended: torch.Tensor = torch.ops.tandem.attend_sparse(q, k, v, tau, last)
    return attended


# A custom operator, so that a compiled block calls it without a graph break and without importing the package.
@torch.library.custom_op("tandem::attend_sparse", mutates_args=())
def _attend_sparse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: float, last: int) -> torch.Tensor:
    blocks = -(-q.shape[1] // BLOCK)
    exact_from = (q.shape[1] - last) // BLOCK if last else blocks
    if q.device.type != "cuda":
        return emulate(q, k, v, tau, exact_from)
    package: Any = import_module("comfy_kitchen")
    if not package.sol_attn_is_available(q.device):
        # Its own fallback takes memory that is quadratic in the tokens.
        raise RuntimeError(f"comfy-kitchen has no kernel for {torch.cuda.get_device_name(q.device)}")
    exact = [exact_from, blocks] if last else [0, 0]
    with torch.cuda.device(q.device):
        attended: torch.Tensor = package.sol_attn(q, k, v, tau=tau, sink_blocks=exact, sink_q=exact)
    return attended


@_attend_sparse.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: float, last: int) -> torch.Tensor:
    return q.new_empty(q.shape)


def emulate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: float, exact_from: int) -> torch.Tensor:
    """Compute sparse attention in float32 without rounding, on any device; memory is quadratic in the tokens.

    Args:
        exact_from: the first of the blocks that attend exactly and are attended to exactly.
    """
    tokens, scale = q.shape[1], q.shape[3] ** -0.5
    queries, keys, values = (x.float().transpose(1, 2) for x in (q, k, v))
    lengths = torch.full((-(-tokens // BLOCK),), BLOCK, device=q.device)
    lengths[-1] -= len(lengths) * BLOCK - tokens
    mean_queries, mean_keys, mean_values = (_block_means(x, lengths) for x in (queries, keys, values))
    # All scores of a row may change by the same amount, so that those of a row's blocks have a mean of 0.
    center = mean_keys.mean(2, keepdim=True)
    keys, mean_keys = keys - center, mean_keys - center
    scores = mean_queries @ mean_keys.transpose(2, 3) * scale
    # The variance of a row of scores, estimated from that of each channel of the mean keys.
    deviation = (mean_queries.square() @ mean_keys.square().mean(2, keepdim=True).transpose(2, 3)).sqrt() * scale
    number = torch.arange(len(lengths), device=q.device)
    exact = (scores > tau * deviation) | ((number[:, None] - number).abs() <= 1)
    exact |= (number >= exact_from) | (number >= exact_from)[:, None]
    block = torch.arange(tokens, device=q.device) // BLOCK
    # A pooled term is one more key, with the weight of as many tokens as its block has.
    pooled = (scores + lengths.log()).masked_fill(exact, -torch.inf)[:, :, block]
    alone = (queries @ keys.transpose(2, 3) * scale).masked_fill(~exact[:, :, block][..., block], -torch.inf)
    weights = torch.cat([alone, pooled], dim=3).softmax(3)
    return (weights @ torch.cat([values, mean_values], dim=2)).transpose(1, 2).to(q.dtype).contiguous()


def _block_means(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the means of each block of tokens, (batch, heads, blocks, width), of (batch, heads, tokens, width)."""
    padded = F.pad(x, (0, 0, 0, len(lengths) * BLOCK - x.shape[2]))
    return padded.unflatten(2, (-1, BLOCK)).sum(3) / lengths[:, None]
