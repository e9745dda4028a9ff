"""Attention in FP8 (e4m3), by cuDNN on Hopper and newer, through `nvidia-cudnn-frontend`.

Queries, keys and values are each scaled as a whole, so that the largest magnitude is that of e4m3. Probabilities are
scaled by 256: otherwise those below 1/512 of a row's largest, at thousands of tokens most of them, would become zero.
The result is an average of values and has their scale. On Hopper cuDNN returns it in FP8 only.

The error is that of 4 significant bits in each factor, some percent of the result on random inputs;
bench/gpu/speed.py measures it. Attention to fewer than `MIN_TOKENS` tokens is not faster in FP8, so it runs in
the original dtype.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from runtime.models.row_operations import RowCall, computed, from_fp8, to_fp8

_E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0
_PROBABILITY_SCALE = 256.0
MIN_TOKENS = 2048
_SCALARS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


def attend_fp8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the attention of (batch, tokens, heads, head width), in the dtype of `q`."""
    if k.shape[1] < MIN_TOKENS:
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
    scales = [scale_for(largest_of(x)) for x in (q, k, v)]
    rounded = [computed(to_fp8, x, scale) for x, scale in zip((q, k, v), scales, strict=True)]
    attended: torch.Tensor = computed(from_fp8, attend_rounded(rounded, scales), scales[2], q.dtype)
    return attended


def rounding_of_attention(width: int, dtype: torch.dtype, device: str) -> Sequence[RowCall]:
    """Return the operations of `row_operations` around the attention of queries, keys and values of a width."""
    x, scale = torch.ones(1, width, dtype=dtype, device=device), torch.ones((), device=device)
    return (to_fp8, (x, scale)), (from_fp8, (x.to(_E4M3), scale, dtype))


def build_kernel(tokens: int, heads: int, width: int, device: str) -> None:
    """Build cuDNN's kernel for attention among all tokens of a clip, which takes seconds, before the first call.

    Args:
        width: of a head.
        device: a CUDA device, with its index.
    """
    index = torch.device(device).index
    with torch.cuda.device(index):
        _graph((1, tokens, heads, width), tokens, index)


def attend_rounded(rounded: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the attention of queries, keys and values in e4m3; the result is in e4m3, with the values' scale.

    Args:
        scales: the factor of each, from `scale_for`.
    """
    attended: torch.Tensor = torch.ops.tandem.attend_fp8(*rounded, *(1 / scale for scale in scales))
    return attended


def largest_of(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, a scalar, in the dtype of `x`."""
    # A compiler fuses the first with what comes before; the second reads the values once, in one kernel.
    return x.abs().amax() if torch.compiler.is_compiling() else torch.linalg.vector_norm(x, math.inf)


def scale_for(largest: torch.Tensor) -> torch.Tensor:
    """Return the factor, a scalar in float32, that brings values of at most `largest` into the range of e4m3."""
    return _LARGEST / largest.float().clamp_min(1e-6)


@torch.library.custom_op("tandem::attend_fp8", mutates_args=())
def _attend_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descale_q: torch.Tensor,
    descale_k: torch.Tensor,
    descale_v: torch.Tensor,
) -> torch.Tensor:
    # The result keeps the scale of the values, in which it fits FP8; the caller multiplies by descale_v.
    q, k, v = (x.contiguous() for x in (q, k, v))
    if q.device.type != "cuda":
        return _emulate(q, k, v, descale_q * descale_k)
    # cuDNN's handle and its kernels belong to the current GPU.
    with torch.cuda.device(q.device):
        run, names = _graph(tuple(q.shape), k.shape[1], q.device.index)
        out = torch.empty_like(q)
        scalars = {
            "descale_q": descale_q,
            "descale_k": descale_k,
            "descale_v": descale_v,
            "descale_s": _constant(1 / _PROBABILITY_SCALE, q.device),
            "scale_s": _constant(_PROBABILITY_SCALE, q.device),
            "scale_o": 1 / descale_v,
        }
        tensors = {names[name]: value.reshape(1, 1, 1, 1) for name, value in scalars.items()}
        tensors |= {names[name]: x.transpose(1, 2) for name, x in (("q", q), ("k", k), ("v", v), ("o", out))}
        tensors |= {
            names[name]: torch.empty(1, 1, 1, 1, device=q.device, dtype=torch.float32) for name in ("amax_s", "amax_o")
        }
        run(tensors)
        return out


@_attend_fp8.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descale_q: torch.Tensor,
    descale_k: torch.Tensor,
    descale_v: torch.Tensor,
) -> torch.Tensor:
    return q.new_empty(q.shape)


def _emulate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descale: torch.Tensor) -> torch.Tensor:
    """Emulate cuDNN in float32 with the same roundings, to measure the error on other devices."""
    q32, k32, v32 = (x.float().transpose(1, 2) for x in (q, k, v))
    scores = q32 @ k32.transpose(-1, -2) * (descale / math.sqrt(q.shape[-1]))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    probabilities = (weights * _PROBABILITY_SCALE).to(_E4M3).float() / _PROBABILITY_SCALE
    out = probabilities @ v32 / weights.sum(-1, keepdim=True)
    return out.clamp(-_LARGEST, _LARGEST).transpose(1, 2).contiguous().to(_E4M3)


@lru_cache(maxsize=64)
def _constant(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((1, 1, 1, 1), value, device=device, dtype=torch.float32)


@lru_cache(maxsize=64)
def _handle(device: int) -> Any:
    import cudnn

    return cudnn.create_handle()


@lru_cache(maxsize=64)
def _graph(shape: tuple[int, ...], keys: int, device: int) -> tuple[Any, dict[str, Any]]:
    """Build cuDNN's graph for one shape; return a function that runs it, and its tensors by name."""
    import cudnn

    handle = _handle(device)
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.FP8_E4M3,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    batch, tokens, heads, width = shape

    def dims(length: int) -> dict[str, list[int]]:
        # Heads first in name, tokens first in memory.
        return {
            "dim": [batch, heads, length, width],
            "stride": [length * heads * width, width, heads * width, 1],
        }

    names: dict[str, Any] = {
        name: graph.tensor(name=name, data_type=cudnn.data_type.FP8_E4M3, **dims(length))
        for name, length in (("q", tokens), ("k", keys), ("v", keys))
    }
    scalar: dict[str, list[int]] = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1]}
    names |= {name: graph.tensor(name=name, data_type=cudnn.data_type.FLOAT, **scalar) for name in _SCALARS}
    out, _, amax_s, amax_o = graph.sdpa_fp8(
        **names, attn_scale=1 / math.sqrt(width), generate_stats=False, use_causal_mask=False
    )
    shaped = dims(tokens)
    out.set_output(True).set_dim(shaped["dim"]).set_stride(shaped["stride"])
    out.set_data_type(cudnn.data_type.FP8_E4M3)
    for amax in (amax_s, amax_o):
        amax.set_output(True).set_dim(scalar["dim"]).set_stride(scalar["stride"])
        amax.set_data_type(cudnn.data_type.FLOAT)
    names |= {"o": out, "amax_s": amax_s, "amax_o": amax_o}
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    size = graph.get_workspace_size()

    def run(tensors: dict[Any, torch.Tensor]) -> None:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        workspace = torch.empty(max(size, 1), device=f"cuda:{device}", dtype=torch.uint8)
        graph.execute(tensors, workspace, handle=handle)

    return run, names
