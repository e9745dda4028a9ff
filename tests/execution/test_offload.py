"""Offloading: the placement of weights, moving them without changing values, and which memory ran out."""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.hooks.group_offloading import ModuleGroup
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from runtime.core.errors import EngineError, InvalidRequestError, ran_out
from runtime.core.estimates import MemoryStrategy
from runtime.core.events import VideoSaved
from runtime.core.plan import ComponentPlan, EngineRef
from runtime.core.request import GenerationRequest
from runtime.execution.offload import move_into_slabs, place, placement, slabs
from runtime.execution.residency import Residency
from runtime.models.images import with_images
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from runtime.planner.resolve import PlanningContext, resolve
from tests.families.framepack_models import pipeline
from tests.image_files import picture
from tests.pipeline.runs import events_of
from tests.pipeline.test_parity import sample
from tests.pipeline.test_run import frames_of
from tests.plans import gpu, machine, tiny_plan
from tests.tiny_models import IN_JOBS, LTX2_ARCHITECTURES

ENGINE = EngineRef(id="1", program="vae_next", builder="b", precision="float32", profile=((1, 8, 8),) * 3)


def part(device: str = "cuda:0", quantization: str = "none", engines: tuple[EngineRef, ...] = ()) -> ComponentPlan:
    """Return a component's plan."""
    return ComponentPlan(
        backend="pytorch",
        device=device,
        dtype="bfloat16",
        weights_bytes=0,
        reasons=(),
        quantization=quantization,
        engines=engines,
    )


@pytest.mark.parametrize(
    ("offload", "text_encoder", "transformer", "vae"),
    [
        ("none", "device", "device", "device"),
        ("auto", "device", "device", "device"),
        ("model", "whole", "whole", "whole"),
        ("group", "leaves", "blocks", "whole"),
        ("sequential", "leaves", "leaves", "whole"),
    ],
)
def test_placement_of_weights(offload: str, text_encoder: str, transformer: str, vae: str) -> None:
    assert placement("text_encoder", part(), offload) == text_encoder
    for name in ("transformer", "transformer_2"):
        assert placement(name, part(), offload) == transformer
        assert placement(name, part(quantization="bnb-4bit"), offload) == transformer
        assert placement(name, part(engines=(ENGINE,)), offload) == "device"
    assert placement("vae", part(), offload) == vae


@pytest.mark.parametrize("offload", ["model", "group", "sequential"])
def test_eight_bit_weights_stay_on_the_device(offload: str) -> None:
    assert placement("transformer", part(quantization="bnb-8bit"), "none") == "device"
    with pytest.raises(InvalidRequestError) as caught:
        placement("transformer", part(quantization="bnb-8bit"), offload)
    assert (caught.value.field, caught.value.code) == ("offload", "planner.8bit_offloaded")
    assert caught.value.data["offload"] == offload


def layers() -> torch.nn.Module:
    """Return a module with weights, shared ones and a buffer."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    module[1].weight = module[0].weight
    return module.requires_grad_(requires_grad=False)


def tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return all weights and buffers."""
    return [*module.parameters(), *module.buffers()]


def test_a_component_moves_to_its_device_and_back_unchanged() -> None:
    module = layers()
    before = [tensor.data_ptr() for tensor in tensors(module)]
    placed = place(module, "whole", part("cpu"))
    for _ in range(2):
        assert placed.waits_elsewhere
        placed.to_device()
        assert not placed.waits_elsewhere
        module(torch.ones(2, 3))
        placed.to_host()
        assert [tensor.data_ptr() for tensor in tensors(module)] == before


def test_quantized_weights_move_to_their_device() -> None:
    module = layers()
    placed = place(module, "whole", part("meta", quantization="bnb-4bit"))
    assert not placed.waits_elsewhere  # they are quantized on the device
    placed.to_host()
    assert placed.waits_elsewhere
    placed.to_device()
    assert not placed.waits_elsewhere
    assert {tensor.device.type for tensor in tensors(module)} == {"meta"}


def test_weights_stay_in_memory_if_the_device_is_full() -> None:
    module = layers()
    placed = place(module, "whole", part("cuda:99"))
    with pytest.raises((RuntimeError, AssertionError)):
        placed.to_device()
    assert placed.waits_elsewhere
    assert {tensor.device.type for tensor in tensors(module)} == {"cpu"}


@given(st.lists(st.integers(1, 5000), max_size=30), st.integers(256, 4096))
def test_tensors_in_slabs_do_not_overlap(sizes: list[int], limit: int) -> None:
    placed = slabs(sizes, limit)
    assert sum(map(len, placed)) == len(sizes)
    left = iter(sizes)
    for offsets in placed:
        here = [(offset, next(left)) for offset in offsets]
        assert here[0][0] == 0
        for (start, size), (following, _) in itertools.pairwise(here):
            assert start + size <= following
        assert len(here) == 1 or here[-1][0] + here[-1][1] <= limit
        assert all(offset % 256 == 0 for offset in offsets)


def test_moving_into_slabs_changes_no_value() -> None:
    torch.manual_seed(0)
    given_ = [torch.randn(3, 5), torch.randn(70, dtype=torch.bfloat16), torch.randn(2, 2, 2), torch.randn(1000)]
    wanted = [tensor.clone() for tensor in given_]
    asked: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        asked.append(size)
        return torch.empty(size, dtype=torch.uint8)

    move_into_slabs(given_, allocate, limit=1024)
    assert len(asked) == 2
    assert asked[1] == 4000
    assert given_[0].untyped_storage().data_ptr() == given_[2].untyped_storage().data_ptr()
    for tensor, value in zip(given_, wanted, strict=True):
        assert torch.equal(tensor, value)


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "VRAM"),
        (RuntimeError("CUDA error: out of memory"), "VRAM"),
        (MemoryError(), "RAM"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), "RAM"),
        (RuntimeError("could not create a primitive"), "RAM"),
        (RuntimeError("could not create a primitive descriptor for a convolution"), None),
        (OSError(12, "Cannot allocate memory"), "RAM"),
        (OSError(28, "No space left on device"), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("DefaultCPUAllocator"), None),
    ],
)
def test_which_memory_ran_out(error: BaseException, full: str | None) -> None:
    assert ran_out(error) == full


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
CAPTURE_ENDED = torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
REFUSED = EngineError("engine.torch_tensorrt_failed", error="unknown operator")


@pytest.mark.parametrize(
    ("first", "then", "explicit", "full"),
    [
        (FULL, RuntimeError("While interpreting the module got an error"), True, "VRAM"),
        (MemoryError(), ValueError("cannot be exported"), True, "RAM"),
        (FULL, CAPTURE_ENDED, False, "VRAM"),
        (KeyError("aten.foo"), CAPTURE_ENDED, False, None),
        (FULL, RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, None),
        (MemoryError(), OSError(28, "No space left on device"), False, None),
        (KeyError("size"), FULL, False, "VRAM"),
        (FULL, REFUSED, True, None),
    ],
)
def test_which_error_counts_as_exhaustion(first: Exception, then: Exception, explicit: bool, full: str | None) -> None:
    def raise_first() -> None:
        raise copy.copy(first)

    with pytest.raises(type(then)) as caught:
        try:
            raise_first()
        except Exception as error:
            if explicit:
                raise then from error
            raise then  # noqa: B904 - that is under test
    assert caught.value.__context__ is not None
    assert ran_out(caught.value) == full


def test_an_allocation_larger_than_any_memory_exhausts_ram() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert ran_out(caught.value) == "RAM"


class Reading(TorchFunctionMode):
    """Fails where a weight is computed with that a hook has not brought, or has taken back.

    Attributes:
        away: the weights that wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.away: set[torch.Tensor] = set()
        self.moving = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.moving and getattr(func, "__name__", "") != "__get__":
            read = {one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.nn.Parameter)}
            assert not read & self.away, f"{func} of a weight that waits"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reading]:
    """JobHooks what diffusers' hooks bring and take back: on a CPU it stays where it is."""
    found = Reading()

    def moving(name: str, note: Callable[[Any, set[torch.Tensor]], None]) -> None:
        move = getattr(ModuleGroup, name)

        def moved(group: Any) -> None:
            found.moving = True
            move(group)
            found.moving = False
            note(group, {*group.parameters, *(each for one in group.modules for each in one.parameters())})

        monkeypatch.setattr(ModuleGroup, name, moved)

    moving("onload_", lambda _, weights: found.away.difference_update(weights))
    moving("offload_", lambda _, weights: found.away.update(weights))
    with found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*IN_JOBS, "hunyuan-video"])
@pytest.mark.parametrize("offload", ["group", "sequential"])
def test_weights_are_on_the_device_when_they_are_used(
    architecture: str, offload: str, tiny: Callable[[str], ModelSpec], tmp_path: Path, reading: Reading
) -> None:
    spec = tiny(architecture)
    asked = {"prompt": "a red boat", "width": 64, "height": 32, "frames": 9, "steps": 2, "offload": offload}
    here = machine(gpu=gpu(), torch_cuda="13.0")
    plan = resolve(GenerationRequest.from_mapping(asked), spec, PlanningContext(here, tmp_path / "x.mp4"))
    parts = {name: one.replace(device="cpu", dtype="float32") for name, one in plan.components.items()}
    plan = plan.replace(components=parts)
    with Residency() as residency:
        wanted = sample(spec, plan, residency)
        waiting = len(reading.away)
        assert waiting > 50
        assert torch.equal(sample(spec, plan, residency), wanted)
        assert len(reading.away) == waiting
    # It would be seen.
    if offload == "group" and "text_kept" not in spec.lacks:
        careless = plan.replace(speed=plan.speed.replace(text_kept=True))
        with Residency() as residency, pytest.raises(AssertionError, match="of a weight that waits"):
            sample(spec, careless, residency)


@pytest.mark.slow
def test_weights_are_on_the_device_when_a_section_is_made(tmp_path: Path, reading: Reading) -> None:
    pipeline().save_pretrained(tmp_path / "FramePackI2V")
    picture(48, 32).save(tmp_path / "image.png")
    asked = {"prompt": "a red boat", "image": str(tmp_path / "image.png"), "width": 48, "height": 32, "frames": 73}
    request = GenerationRequest.from_mapping({**asked, "steps": 2, "seed": 1, "fps": 12})
    spec = with_images(read_spec(tmp_path / "FramePackI2V", "framepack"), request, tmp_path, tmp_path)
    plan = resolve(request, spec, PlanningContext(machine(), tmp_path / "x.mp4"))

    def made(strategy: MemoryStrategy) -> tuple[bytes, int]:
        """Return the frames, and how many weights waited at the end."""
        reading.away.clear()
        with Residency() as residency:
            events = events_of(plan.replace(strategy=strategy), spec, residency)
            waiting = len(reading.away)
        assert isinstance(events[-1], VideoSaved), events[-1]
        return frames_of(plan.output), waiting

    wanted, _ = made(plan.strategy)
    for offload in ("group", "sequential"):
        frames, waiting = made(plan.strategy.replace(offload=offload, keep_loaded=False))
        assert waiting > 50
        assert frames == wanted


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*LTX2_ARCHITECTURES, "wan2.1-vace"])
def test_weights_are_on_the_device_in_whole_jobs(
    architecture: str, tiny: Callable[[str], ModelSpec], tmp_path: Path, reading: Reading
) -> None:
    spec = tiny(architecture)
    plan = tiny_plan(spec, tmp_path / "x.mp4", width=96, height=64, steps=2)
    frames = []
    for offload in ("none", "model", "group", "sequential"):
        reading.away.clear()
        with Residency() as residency:
            strategy = plan.strategy.replace(offload=offload, keep_loaded=offload == "none")
            # As in a plan: weights that are not on the device make no keys and values to keep.
            speed = plan.speed.replace(text_kept=plan.speed.text_kept and offload in {"none", "model"})
            events = events_of(plan.replace(strategy=strategy, speed=speed), spec, residency)
            waiting = len(reading.away)
        assert isinstance(events[-1], VideoSaved), events[-1]
        frames.append(frames_of(plan.output))
        assert (waiting > 50) == (offload in {"group", "sequential"})
    assert all(made == frames[0] for made in frames)
