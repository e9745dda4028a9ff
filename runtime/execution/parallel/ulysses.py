"""Ulysses: several processes compute one forward pass, each with a share of the tokens or, for attention, of the heads.

Source: https://arxiv.org/abs/2309.14509. diffusers' `ContextParallelConfig` does the same for token counts that divide
evenly. Other counts are padded with zeros for the exchange and cut before attention, so that no mask is needed and the
result is exact. (diffusers' `ulysses_anything` exchanges token counts four times per block and needs NCCL, which CPUs
do not have. Its `enable_parallelism` needs an accelerator too.)
"""

import math

import torch
import torch.distributed as dist

from runtime.execution.attention import FP8, Attention, attention
from runtime.execution.fp8_attention import MIN_TOKENS, attend_rounded, largest_of, scale_for
from runtime.models.row_operations import computed, from_fp8, to_fp8

# Into how many parts a process divides its heads at most. On two H200s with NVLink, five parts of 4 heads took 2.7 %
# longer than one of 20: smaller calls of attention cost more than the exchange that they hide.
PARTS = 1

# By name, because operators take tensors, numbers and strings only.
_GROUPS: dict[str, dist.ProcessGroup] = {}


class Tokens:
    """The division of a pass's tokens among processes: equal shares in order, padded with zeros at the end.

    All transformers of the same processes use one instance, so that their blocks are compiled once.

    Args:
        group: the processes, which all call the same methods in the same order.
        parts: see below.

    Attributes:
        parts: the most parts of a process's heads: it attends in one while others are exchanged; 1 for no overlap.
        count: tokens of the current pass; a transformer sets it before its blocks.
    """

    def __init__(self, group: dist.ProcessGroup, parts: int = PARTS) -> None:
        self._group = group
        self.parts = parts
        self._name = str(len(_GROUPS))
        _GROUPS[self._name] = group
        self._degree = dist.get_world_size(group)
        self._number = dist.get_rank(group)
        self.count = 0

    @property
    def share(self) -> int:
        """Tokens of one process, padding included."""
        return -(-self.count // self._degree)

    @property
    def start(self) -> int:
        """The place of this process's first token; beyond the end of the pass if it has padding only."""
        return self._number * self.share

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this process's share of a tensor with all tokens, (batch, tokens, …)."""
        return _padded(x[:, self.start : self.start + self.share], self.share)

    def own_first(self, count: int) -> int:
        """Return how many of this process's tokens are among the first `count` tokens of the pass."""
        return min(max(count - self.start, 0), self.share)

    def all(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the shares of all processes: return all tokens, (batch, tokens, …)."""
        parts = [torch.empty_like(x) for _ in range(self._degree)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, dim=1)[:, : self.count]

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """See `Sharing`."""
        return x[:, : max(self.count - self.start, 0)]

    def summed(self, values: torch.Tensor) -> list[float]:
        """See `Sharing`; every process adds the gathered values in the same order."""
        parts = [torch.empty_like(values) for _ in range(self._degree)]
        dist.all_gather(parts, values, group=self._group)
        return [math.fsum(column) for column in zip(*torch.stack(parts).tolist(), strict=True)]

    def around(self, kind: str) -> Attention:
        """Return an attention kernel that is called with, and returns, this process's share of the tokens."""
        return lambda query, key, value: self._attend((query, key, value), kind)

    def around_whole(self, kind: str) -> Attention:
        """Return an attention kernel for queries that every process has, all of them, as has its result.

        Keys and values are this process's share of the tokens. Every process gets the same bits.
        """
        return lambda query, key, value: _attend_whole(
            query, *(self._to_parts(x, 1)[0] for x in (key, value)), kind, self._name, self.count
        )

    def _attend(self, qkv: tuple[torch.Tensor, ...], kind: str) -> torch.Tensor:
        if kind == FP8 and self.count >= MIN_TOKENS:
            return self._attend_fp8(qkv)
        return self._from_parts(_attend_shared(*map(self._to_parts, qkv), [], kind, self._name, self.count))

    def _attend_fp8(self, qkv: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Attend as `attend_fp8`, with the scales of all tokens; half as many bytes are exchanged."""
        scales = [scale_for(largest) for largest in self._largest(*qkv)]
        rounded = [computed(to_fp8, x, scale).view(torch.uint8) for x, scale in zip(qkv, scales, strict=True)]
        out = self._from_parts(_attend_shared(*map(self._to_parts, rounded), scales, FP8, self._name, self.count))
        attended: torch.Tensor = computed(from_fp8, out.view(torch.float8_e4m3fn), scales[2], qkv[0].dtype)
        return attended

    def _to_parts(self, x: torch.Tensor, most: int | None = None) -> torch.Tensor:
        """Return a share of the tokens in the order in which it is sent.

        Args:
            x: (batch, share of tokens, heads, width); heads are a multiple of the processes.
            most: parts, instead of `parts`.

        Returns:
            (parts, processes, share, batch, heads of a part, width), see `attend_in_parts`.
        """
        heads = x.shape[2] // self._degree
        parts = max(count for count in range(1, (most or self.parts) + 1) if heads % count == 0)
        return x.unflatten(2, (self._degree, parts, heads // parts)).permute(3, 2, 1, 0, 4, 5).contiguous()

    def _from_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, share of tokens, heads, width): the inverse of `_to_parts`."""
        return x.permute(3, 2, 1, 0, 4, 5).flatten(2, 4)

    def _largest(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the largest magnitude of each, a scalar, over the tokens of all processes."""
        maxima = [largest_of(x) if x.shape[1] else x.new_zeros(()) for x in map(self.real, tensors)]
        largest: torch.Tensor = _maximum(torch.stack(maxima), self._name)
        return largest.unbind()


def attend_in_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scales: list[torch.Tensor],
    kind: str,
    group: str,
    count: int,
) -> torch.Tensor:
    """Exchange tokens for heads, attend, and exchange heads for tokens.

    Each process attends in parts of its heads. While it attends in one part, the next ones arrive, and the result of
    the previous one leaves.

    Args:
        q, k, v: this process's tokens, each (parts, processes, share, batch, heads of a part, width), contiguous: first
            what each process attends in first, and so on.
        scales: with `FP8`, of the values in e4m3 that the bytes in `q`, `k` and `v` are, see `attend_rounded`.
        kind: see `execution.attention`.
        group: name of the processes.
        count: tokens of the pass without padding.

    Returns:
        The result for this process's tokens, shaped like `q`.
    """
    received, out = [torch.empty_like(x) for x in (q, k, v)], torch.empty_like(q)
    arriving = [
        [_start(to[part], x[part], group) for to, x in zip(received, (q, k, v), strict=True)] for part in range(len(q))
    ]
    processes, share = q.shape[1:3]
    leaving, attended = [], []  # kept until it has left
    for part, works in enumerate(arriving):
        for work in works:
            work.wait()
        of_heads = [_all_tokens(x[part], count) for x in received]
        padded = _padded(_attend_by(kind, of_heads, scales), processes * share)
        attended.append(padded.unflatten(1, (processes, share)).permute(1, 2, 0, 3, 4).contiguous())
        leaving.append(_start(out[part], attended[part], group))
    for work in leaving:
        work.wait()
    return out


def attend_whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str, group: str, count: int) -> torch.Tensor:
    """Exchange tokens of keys and values for heads, attend with these heads, and gather the results.

    Args:
        q: all queries, (batch, queries, heads, width), the same in each process.
        k, v: this process's tokens, each (processes, share, batch, heads of a process, width), contiguous.
        kind, group, count: see `attend_in_parts`; tokens are those of keys and values.

    Returns:
        The result for all queries and heads, shaped like `q`.
    """
    received = [torch.empty_like(x) for x in (k, v)]
    for work in [_start(to, x, group) for to, x in zip(received, (k, v), strict=True)]:
        work.wait()
    own_queries = q.chunk(len(k), dim=2)[dist.get_rank(_GROUPS[group])]
    attended = attention(kind)(own_queries, *(_all_tokens(x, count) for x in received)).contiguous()
    parts = [torch.empty_like(attended) for _ in range(len(k))]
    dist.all_gather(parts, attended, group=_GROUPS[group])
    return torch.cat(parts, dim=2)


def _all_tokens(received: torch.Tensor, count: int) -> torch.Tensor:
    """Return (batch, count, heads, width) of what each process sent, (processes, share, batch, heads, width)."""
    return received.flatten(0, 1)[:count].transpose(0, 1)


def _attend_by(kind: str, qkv: list[torch.Tensor], scales: list[torch.Tensor]) -> torch.Tensor:
    if not scales:
        return attention(kind)(*qkv)
    return attend_rounded([x.view(torch.float8_e4m3fn) for x in qkv], scales).view(torch.uint8)


def _start(received: torch.Tensor, x: torch.Tensor, group: str) -> dist.Work:
    """Start to send `x[i]` to process i, and to receive in order what each process sends to this one."""
    work: dist.Work = dist.all_to_all_single(received, x, group=_GROUPS[group], async_op=True)
    return work


# Custom operators, so that a compiled block contains each as one call.
_attend_shared = torch.library.custom_op("tandem::attend_shared", attend_in_parts, mutates_args=())


_attend_whole = torch.library.custom_op("tandem::attend_whole", attend_whole, mutates_args=())


@_attend_shared.register_fake
def _(q: torch.Tensor, *_rest: object) -> torch.Tensor:
    return torch.empty_like(q)


@_attend_whole.register_fake
def _(q: torch.Tensor, *_rest: object) -> torch.Tensor:
    return q.new_empty(q.shape)


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
