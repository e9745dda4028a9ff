"""Common parts of the training scripts: time limit, several GPUs, Muon and moving averages of weights."""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

LOG = logging.getLogger(__name__)
CHECK_EVERY = 10  # steps between looks at rank 0's clock


def start() -> tuple[int, int, torch.device]:
    """Join the process group that torchrun set up, if any: rank, world size and this process's device."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7.0f ms %(message)s")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    if rank:
        logging.getLogger().setLevel(logging.WARNING)
    return rank, world, device


class Clock:
    """Progress 0..1 through a time budget, the same on every rank of ``group``."""

    def __init__(self, minutes: float, device: torch.device, group: dist.ProcessGroup | None = None, lead: int = 0):
        self.seconds, self.device, self.group, self.lead = minutes * 60, device, group, lead
        self.began = time.monotonic()
        self.steps, self.progress, self.waited = 0, 0.0, 0.0

    def restart(self, minutes: float) -> None:
        """Begin again with ``minutes`` left, as after compiling."""
        self.seconds, self.began, self.progress, self.steps = minutes * 60, time.monotonic(), 0.0, 0

    def tick(self) -> bool:
        """Count a step; True while there is time."""
        if self.steps % CHECK_EVERY == 0:
            now = torch.tensor([(time.monotonic() - self.began) / self.seconds], device=self.device)
            if dist.is_initialized():
                dist.broadcast(now, self.lead, group=self.group)
            asked = time.monotonic()
            self.progress = float(now)  # waits for the GPU; hardly any waiting means that the CPU is what is slow
            self.waited += time.monotonic() - asked
        self.steps += 1
        return self.progress < 1

    def rate(self, warm_up: int = 100, first: float = 1.0, last: float = 0.0) -> float:
        """The learning rate's factor: a short warm-up, then straight from ``first`` to ``last`` within the budget."""
        return min(1.0, self.steps / warm_up) * max(first + (last - first) * self.progress, 0.0)


def autocast(device: torch.device) -> torch.autocast:
    """Compute in bfloat16 on GPUs alone: processors without its instructions take a hundred times as long."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def channels_last(model: nn.Module) -> None:
    """Lay the weights of all 3D convolutions out channels-last, which the GPU's kernels prefer."""
    for module in model.modules():
        if isinstance(module, nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)


def _orthogonal(update: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of (n, r, c), by five Newton-Schulz steps in bfloat16 (Jordan et al., 2024)."""
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Muon for weights of two dimensions and more (convolutions flattened), AdamW for the rest.

    Muon's update is scaled to the size of AdamW's (Liu et al., 2025), so that one learning rate serves both.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        lr: float,
        decay: float,
        *,
        plain: bool = False,
        skip: tuple[str, ...] = (),
    ) -> None:
        self.lr, self.decay = lr, decay
        self.shapes: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        rest = []
        for name, p in named:
            if not p.requires_grad:
                continue
            rows, columns = p.shape[0], p.numel() // max(p.shape[0], 1)
            matrix = p.dim() in (2, 4, 5) and min(rows, columns) >= 8
            if plain or not matrix or any(s in name for s in skip):
                rest.append(p)
            else:
                self.shapes[rows, columns].append(p)
        self.adam = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=decay, fused=rest[0].is_cuda)
        self.momentum = {k: torch.zeros(len(ps), *k, device=ps[0].device) for k, ps in self.shapes.items()}

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One step at ``factor`` times the learning rate."""
        for group in self.adam.param_groups:
            group["lr"] = self.lr * factor
        self.adam.step()
        for (rows, columns), ps in self.shapes.items():
            grads = torch.stack([p.grad.reshape(rows, columns) for p in ps if p.grad is not None])
            momentum = self.momentum[rows, columns]
            momentum.lerp_(grads, 0.05)
            update = _orthogonal(grads.lerp(momentum, 0.95)) * (0.2 * max(rows, columns) ** 0.5)
            live: list[Tensor] = list(ps)
            torch._foreach_mul_(live, 1 - self.lr * factor * self.decay)
            torch._foreach_add_(
                live, [u.reshape(p.shape) for u, p in zip(update, ps, strict=True)], alpha=-self.lr * factor
            )

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.adam.zero_grad(set_to_none=True)
        for ps in self.shapes.values():
            for p in ps:
                p.grad = None


def average_gradients(parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Mean of the gradients over the ranks of ``group``, in one message; clips their norm to 1.

    Gradients that are not finite become 0: the step is skipped.
    """
    grads: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        parts = flat.split([g.numel() for g in grads])
        torch._foreach_copy_(grads, [part.view_as(g) for g, part in zip(grads, parts, strict=True)])
    torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
    for grad in grads:
        grad.nan_to_num_(0.0, 0.0, 0.0)


class Average:
    """An exponential moving average of a module's parameters, quick at first."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.count = decay, 0
        self.names = [n for n, _ in module.named_parameters()]
        self.live: list[Tensor] = [p for _, p in module.named_parameters()]
        self.mean: list[Tensor] = [p.detach().clone() for p in self.live]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are now."""
        self.count += 1
        decay = min(self.decay, self.count / (self.count + 10))
        torch._foreach_lerp_(self.mean, self.live, 1 - decay)

    def state(self, module: nn.Module) -> dict[str, Tensor]:
        """The state of ``module`` with the averages in the parameters' place."""
        return module.state_dict() | dict(zip(self.names, self.mean, strict=True))

    @torch.no_grad()
    def store(self) -> None:
        """Put the averages in the parameters' place."""
        torch._foreach_copy_(self.live, self.mean)
