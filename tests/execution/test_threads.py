"""While one thread loads a model, the libraries change PyTorch for all: what another one computes must not show it."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.core.cancel import Cancel
from runtime.core.plan import ExecutionPlan, Speed
from runtime.core.tiles import spans
from runtime.execution.attention import attention
from runtime.execution.residency import Residency
from runtime.execution.tiling import shares
from runtime.families.wan.transformer import fuse
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from runtime.pipeline.sampling import decode
from tests.pipeline.test_parity import sample
from tests.plans import Alone, tiny_plan
from tests.waiting import PATIENCE

Tiny = Callable[[str], ModelSpec]
# So many that each of the three threads loads while another one computes.
_JOBS = 24


@contextmanager
def making(loading: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Load in another thread, which waits for what is done here while it makes a transformer without memory."""
    made, go_on = threading.Event(), threading.Event()
    make = WanTransformer3DModel.from_config

    def slowly(*arguments: Any, **named: Any) -> Any:
        made.set()
        go_on.wait(PATIENCE)
        return make(*arguments, **named)

    monkeypatch.setattr(WanTransformer3DModel, "from_config", slowly)
    thread = threading.Thread(target=loading)
    thread.start()
    try:
        assert made.wait(PATIENCE)
        yield
    finally:
        go_on.set()
        thread.join(PATIENCE)
    assert not thread.is_alive()


def test_matrices_are_joined_while_another_model_loads(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny("wan2.1")
    part = tiny_plan(spec, tmp_path / "x.mp4").components["transformer"]
    module: Any = load_module(spec, "transformer", part)
    fusing = threading.Thread(target=fuse, args=(module,))
    with making(lambda: load_module(spec, "transformer", part), monkeypatch):
        fusing.start()
        fusing.join(0.5)
    fusing.join(PATIENCE)
    assert module.blocks[0].attn1.fused_projections
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}


@pytest.mark.parametrize("attention", ["native", "flash"])
def test_jobs_at_once_give_what_each_gives_alone(attention: str, tiny: Tiny, tmp_path: Path) -> None:
    speeds = [Speed(attention=attention, fused=True, text_kept=True, paired=paired) for paired in (False, True)]
    plans = [
        (spec, tiny_plan(spec, tmp_path / "x.mp4").replace(speed=speed))
        for spec in map(tiny, ("wan2.2-a14b", "wan2.2-ti2v-5b"))
        for speed in speeds
    ]

    def alone(number: int) -> list[torch.Tensor]:
        spec, plan = plans[number % len(plans)]
        with Residency() as residency:  # which loads, and lets go
            return made(spec, plan, residency)

    wanted = [alone(number) for number in range(len(plans))]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(alone, range(_JOBS)))
    for number, frames in enumerate(found):
        assert all(torch.equal(*both) for both in zip(frames, wanted[number % len(plans)], strict=True)), number


@pytest.fixture
def low_default() -> Iterator[Callable[[], None]]:
    """What makes bfloat16 the dtype of new tensors, as loading does for a moment."""
    yield lambda: torch.set_default_dtype(torch.bfloat16)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("architecture", ["wan2.2-a14b", "wan2.2-ti2v-5b"])
@pytest.mark.parametrize("step_cache", ["none", "first-block:0.2"])
def test_the_default_dtype_does_not_show(
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


def test_nor_do_the_shares_of_tiles(low_default: Callable[[], None]) -> None:
    placed = spans(28, 12)
    wanted = shares(placed, 8)
    low_default()
    assert all(torch.equal(one, other) for one, other in zip(wanted, shares(placed, 8), strict=True))


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
def test_one_threads_attention_is_not_anothers(kind: str) -> None:
    q = torch.randn(1, 2304, 2, 32)
    with Looking() as looking, torch.no_grad():
        attention(kind)(q, q, q)
    assert looking.seen == {(True, True, True)}


def made(spec: ModelSpec, plan: ExecutionPlan, residency: Residency) -> list[torch.Tensor]:
    """Return the latents and the frames of a plan."""
    latents = sample(spec, plan, residency)
    with residency.video_decoder(spec, Alone(plan)) as decoder:
        return [latents, *decode(decoder, latents, plan.strategy.decode_chunk, Cancel())]
