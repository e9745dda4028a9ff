"""Several processes compute one forward pass: each has a share of the tokens, and for attention a share of the heads.

This is Ulysses (https://arxiv.org/abs/2309.14509), as diffusers' `ContextParallelConfig` has it, with what that lacks:
tokens that cannot be shared evenly. There the sequence is filled up with zeros for the exchange, and cut again before
attention, which so sees the tokens that there are and no others: nothing is masked, and nothing is inexact. (diffusers'
`ulysses_anything` has everybody tell how many tokens it has, four times a block, and wait for that; and it needs NCCL,
which no CPU has. Its `enable_parallelism` asks for an accelerator as well.)
"""

import math

import torch
import torch.distributed as dist

from runtime.execution.attention import Attention
from runtime.execution.fp8_attention import FEWEST, attend_fp8, attend_rounded, in_fp8, out_of_fp8, scale_for

# By name, for an operator takes tensors and numbers.
_GROUPS: dict[str, dist.ProcessGroup] = {}


class Tokens:
    """How the tokens of a pass lie among processes: equal shares in order, the last ones filled up with zeros.

    One serves all transformers that the same processes share, so that their blocks are compiled once.

    Args:
        group: the processes that share, each calling the same methods in the same order.

    Attributes:
        count: tokens of the pass that runs; whoever runs it sets it before.
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
        """Tokens of one process, filled up."""
        return -(-self.count // self._degree)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this process's share of a tensor with all tokens, (batch, tokens, …)."""
        start = self._number * self.share
        part = x[:, start : start + self.share]
        return _filled(part, self.share)

    def all(self, x: torch.Tensor) -> torch.Tensor:
        """Return all tokens, (batch, tokens, …), of which each process has its share."""
        parts = [torch.empty_like(x) for _ in range(self._degree)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, dim=1)[:, : self.count]

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """See `Sharing`."""
        return x[:, : max(self.count - self._number * self.share, 0)]

    def summed(self, values: torch.Tensor) -> list[float]:
        """See `Sharing`: each is given what all have, and adds it up in the same order."""
        parts = [torch.empty_like(values) for _ in range(self._degree)]
        dist.all_gather(parts, values, group=self._group)
        return [math.fsum(column) for column in zip(*torch.stack(parts).tolist(), strict=True)]

    def around(self, attention: Attention) -> Attention:
        """Return an attention that is called with this process's share of the tokens, and computed by `attention`."""
        if attention is attend_fp8:
            return self._attend_fp8
        return lambda query, key, value: self._attend(query, key, value, attention)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention) -> torch.Tensor:
        return self._to_tokens(attention(*self._to_heads(q, k, v)))

    def _attend_fp8(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend as `attend_fp8` does: rounded by the largest of all tokens, and half as many bytes are exchanged."""
        if self.count < FEWEST:
            return self._attend(q, k, v, attend_fp8)
        scales = [scale_for(largest) for largest in self._largest(q, k, v)]
        rounded = [in_fp8(x, scale).view(torch.uint8) for x, scale in zip((q, k, v), scales, strict=True)]
        out = attend_rounded([x.view(torch.float8_e4m3fn) for x in self._to_heads(*rounded)], scales)
        return out_of_fp8(self._to_tokens(out.view(torch.uint8)).view(torch.float8_e4m3fn), scales[2], q.dtype)

    def _to_heads(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return all tokens of this process's heads.

        Args:
            tensors: alike, (batch, share of tokens, heads, width); heads are a multiple of the processes.

        Returns:
            Each (batch, tokens, heads of one process, width).
        """
        each = tensors[0].shape[2] // self._degree
        packed = torch.stack([x.unflatten(2, (self._degree, each)) for x in tensors], dim=3)
        # (process, share, batch, tensors, heads of one process, width)
        received = self._exchanged(packed.permute(2, 1, 0, 3, 4, 5))
        return received.flatten(0, 1)[: self.count].transpose(0, 1).unbind(2)

    def _to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return this process's share of the tokens, of all heads: what `_to_heads` did, undone."""
        filled = _filled(x, self._degree * self.share)
        received = self._exchanged(filled.unflatten(1, (self._degree, self.share)).permute(1, 2, 0, 3, 4))
        return received.permute(2, 1, 0, 3, 4).flatten(2, 3)

    def _largest(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the largest magnitude of each, a scalar, over the tokens of all processes."""
        own = [x.abs().amax() if x.shape[1] else x.new_zeros(()) for x in map(self.real, tensors)]
        made: torch.Tensor = _maximum(torch.stack(own), self._name)
        return made.unbind()

    def _exchanged(self, x: torch.Tensor) -> torch.Tensor:
        """Return what every process has for this one, in order; `x` is what this one has for each."""
        made: torch.Tensor = _exchange(x.contiguous(), self._name)
        return made


# Operators of their own, so that a compiled block holds each as one call.
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


def _filled(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return a tensor with as many tokens, (batch, tokens, …), zeros at the end."""
    if x.shape[1] == count:
        return x
    out = x.new_zeros((x.shape[0], count, *x.shape[2:]))
    out[:, : x.shape[1]] = x
    return out
