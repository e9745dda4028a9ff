"""Settings of PyTorch that libraries change for the whole process do not change results."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.core.cancel import Cancel
from runtime.core.plan import ExecutionPlan
from runtime.core.tiles import spans
from runtime.execution.attention import attention
from runtime.execution.decoded_frames import blend_weights
from runtime.execution.residency import Residency
from runtime.models.spec import ModelSpec
from runtime.pipeline.sampling import decode
from tests.pipeline.test_parity import sample
from tests.plans import Alone, tiny_plan

Tiny = Callable[[str], ModelSpec]


@pytest.fixture
def low_default() -> Iterator[Callable[[], None]]:
    """What makes bfloat16 the dtype of new tensors, as loading does for a moment."""
    yield lambda: torch.set_default_dtype(torch.bfloat16)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("architecture", "step_cache"), [("wan2.2-a14b", "none"), ("wan2.2-ti2v-5b", "first-block:0.2")]
)
def test_the_default_dtype_does_not_change_frames(
    architecture: str, step_cache: str, tiny: Tiny, tmp_path: Path, low_default: Callable[[], None]
) -> None:
    spec = tiny(architecture)
    plan = tiny_plan(spec, tmp_path / "x.mp4", step_cache=step_cache)
    with Residency() as residency:
        wanted = made(spec, plan, residency)
        low_default()
        for one, other in zip(wanted, made(spec, plan, residency), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_the_default_dtype_does_not_change_blend_weights(low_default: Callable[[], None]) -> None:
    placed = spans(28, 12)
    wanted = blend_weights(placed, 8)
    low_default()
    assert all(torch.equal(one, other) for one, other in zip(wanted, blend_weights(placed, 8), strict=True))


class Looking(TorchDispatchMode):
    """Sees what PyTorch's own choice of an attention is between, at each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[bool, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cuda = torch.backends.cuda
        self.seen.add((cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.flash_sdp_enabled()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["native", "flash", "fp8"])
def test_attention_kernels_are_selected_per_thread(kind: str) -> None:
    q = torch.randn(1, 2304, 2, 32)
    with Looking() as looking, torch.no_grad():
        attention(kind)(q, q, q)
    assert looking.seen == {(True, True, True)}


def made(spec: ModelSpec, plan: ExecutionPlan, residency: Residency) -> list[torch.Tensor]:
    """Return the latents and the frames of a plan."""
    latents = sample(spec, plan, residency)
    with residency.video_decoder(spec, Alone(plan)) as decoder:
        return [latents, *decode(decoder, latents, plan.strategy.decode_chunk, Cancel())]
