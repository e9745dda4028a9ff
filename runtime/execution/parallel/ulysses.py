"""Ulysses: several processes compute one forward pass, each with a share of the tokens or, for attention, of the heads.

Source: https://arxiv.org/abs/2309.14509. diffusers' `ContextParallelConfig` does the same for token counts that divide
evenly. Other counts are padded with zeros for the exchange and cut before attention, so that no mask is needed and the
result is exact. (diffusers' `ulysses_anything` exchanges token counts four times per block and needs NCCL, which CPUs
do not have. Its `enable_parallelism` needs an accelerator too.)
"""

import math

import torch
import torch.distributed as dist

from runtime.execution.attention import Attention
from runtime.execution.fp8_attention import MIN_TOKENS, attend_fp8, attend_rounded, from_fp8, scale_for, to_fp8

# By name, because operators take tensors, numbers and strings only.
_GROUPS: dict[str, dist.ProcessGroup] = {}


class Tokens:
    """The division of a pass's tokens among processes: equal shares in order, padded with zeros at the end.

    All transformers of the same processes use one instance, so that their blocks are compiled once.

    Args:
        group: the processes, which all call the same methods in the same order.

    Attributes:
        count: tokens of the current pass; set before it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._name = str(len(_GROUPS))
        _GROUPS[self._name] = group
        self._degree = dist.get_world_size(group)
        self._number = dist.get_rank(group)
        self.count = 0

    @property
    def share(self) -> int:
        """Tokens of one process, padding included."""
        return -(-self.count // self._degree)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this process's share of a tensor with all tokens, (batch, tokens, …)."""
        start = self._number * self.share
        return _padded(x[:, start : start + self.share], self.share)

    def own_first(self, count: int) -> int:
        """Return how many of this process's tokens are among the first `count` tokens of the pass."""
        return min(max(count - self._number * self.share, 0), self.share)

    def all(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the shares of all processes: return all tokens, (batch, tokens, …)."""
        parts = [torch.empty_like(x) for _ in range(self._degree)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, dim=1)[:, : self.count]

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """See `Sharing`."""
        return x[:, : max(self.count - self._number * self.share, 0)]

    def summed(self, values: torch.Tensor) -> list[float]:
        """See `Sharing`; every process adds the gathered values in the same order."""
        parts = [torch.empty_like(values) for _ in range(self._degree)]
        dist.all_gather(parts, values, group=self._group)
        return [math.fsum(column) for column in zip(*torch.stack(parts).tolist(), strict=True)]

    def around(self, attention: Attention) -> Attention:
        """Wrap an attention kernel so that it is called with, and returns, this process's share of the tokens."""
        if attention is attend_fp8:
            return self._attend_fp8
        return lambda query, key, value: self._attend(query, key, value, attention)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention) -> torch.Tensor:
        return self._to_tokens(attention(*self._to_heads(q, k, v)))

    def _attend_fp8(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend as `attend_fp8`, with the scales of all tokens; half as many bytes are exchanged."""
        if self.count < MIN_TOKENS:
            return self._attend(q, k, v, attend_fp8)
        scales = [scale_for(largest) for largest in self._largest(q, k, v)]
        rounded = [to_fp8(x, scale).view(torch.uint8) for x, scale in zip((q, k, v), scales, strict=True)]
        out = attend_rounded([x.view(torch.float8_e4m3fn) for x in self._to_heads(*rounded)], scales)
        return from_fp8(self._to_tokens(out.view(torch.uint8)).view(torch.float8_e4m3fn), scales[2], q.dtype)

    def _to_heads(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return all tokens of this process's heads.

        Args:
            tensors: of equal shape, (batch, share of tokens, heads, width); heads are a multiple of the processes.

        Returns:
            Each (batch, tokens, heads of one process, width).
        """
        each = tensors[0].shape[2] // self._degree
        packed = torch.stack([x.unflatten(2, (self._degree, each)) for x in tensors], dim=3)
        # (process, share, batch, tensors, heads of one process, width)
        received = self._exchanged(packed.permute(2, 1, 0, 3, 4, 5))
        return received.flatten(0, 1)[: self.count].transpose(0, 1).unbind(2)

    def _to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return this process's share of the tokens with all heads: the inverse of `_to_heads`."""
        padded = _padded(x, self._degree * self.share)
        received = self._exchanged(padded.unflatten(1, (self._degree, self.share)).permute(1, 2, 0, 3, 4))
        return received.permute(2, 1, 0, 3, 4).flatten(2, 3)

    def _largest(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the largest magnitude of each, a scalar, over the tokens of all processes."""
        own = [x.abs().amax() if x.shape[1] else x.new_zeros(()) for x in map(self.real, tensors)]
        largest: torch.Tensor = _maximum(torch.stack(own), self._name)
        return largest.unbind()

    def _exchanged(self, x: torch.Tensor) -> torch.Tensor:
        """Send `x[i]` to process i, and return what each process sent to this one, in order."""
        received: torch.Tensor = _exchange(x.contiguous(), self._name)
        return received


# Custom operators, so that a compiled block contains each as one call.
@torch.library.custom_op("tandem::exchange", mutates_args=())
def _exchange(x: torch.Tensor, group: str) -> torch.Tensor:
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=_GROUPS[group])
    return received


@_exchange.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("tandem::maximum", mutates_args=())
def _maximum(x: torch.Tensor, group: str) -> torch.Tensor:
    most = x.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=_GROUPS[group])
    return most


@_maximum.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x)


def _padded(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return (batch, tokens, …) with `count` tokens, zeros at the end."""
    if x.shape[1] == count:
        return x
    out = x.new_zeros((x.shape[0], count, *x.shape[2:]))
    out[:, : x.shape[1]] = x
    return out
