"""Weights outside the device: offloading, page-locked memory, and reading the next component's files ahead.

Offloading determines where a component's weights are between uses, and how they get to the device:

    device   on the device, always
    whole    in memory (RAM); copied to the device before the component's stage, freed after it
    blocks   in memory; each block is copied while the one before it runs (diffusers' group offloading)
    leaves   the same, layer by layer

On a CPU all are the same, and nothing is copied.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil
import torch

from runtime.core.errors import MachineError, first_line
from runtime.core.plan import ComponentPlan, ExecutionPlan
from runtime.models.quantization import NONE
from runtime.models.spec import ModelSpec, is_transformer
from runtime.planner import constraints
from runtime.upstream.diffusers import offload_groups

Placement = Literal["device", "whole", "blocks", "leaves"]

# PyTorch rounds a page-locked allocation up to a power of two: tensor by tensor, 14 billion weights in 28.6 GB take 41.
_SLAB_BYTES = 1 << 30
_ALIGNMENT = 256
# Page-locked memory cannot be swapped out, so at most half of the free memory is locked.
_SHARE = 0.5
_PIECE_BYTES = 8 << 20
# Files are read ahead only if they fit into free memory twice.
_FREE_FACTOR = 2.0

logger = logging.getLogger(__name__)


class Placed(Protocol):
    """A module with managed weights."""

    @property
    def waits_elsewhere(self) -> bool:
        """Whether `to_device` has to copy weights."""

    def to_device(self) -> None:
        """Make the module ready to be called."""

    def to_host(self) -> None:
        """Free the device's memory until the next `to_device`."""


def placement(name: str, part: ComponentPlan, offload: str) -> Placement:
    """Return the placement of a component's weights.

    The VAE and image encoders are small and move as a whole. Text encoders have no list of blocks that diffusers
    finds, so they move layer by layer where transformers move block by block.

    Args:
        offload: of the plan: "none", "model", "group" or "sequential"; "auto" is "none".

    Raises:
        InvalidRequestError: for weights that cannot leave the device.
    """
    if part.on_engine or offload in {"none", "auto"}:
        return "device"
    case = constraints.ComponentSettings(
        component=name, backend=part.backend, offload=offload, quantization=part.quantization
    )
    against = constraints.offload_conflict(case)
    if against is not None:
        raise against.refusal
    if offload == "model" or not (is_transformer(name) or name == "text_encoder"):
        return "whole"
    return "blocks" if offload == "group" and is_transformer(name) else "leaves"


def place(module: torch.nn.Module, how: Placement, part: ComponentPlan) -> Placed:
    """Manage where a module's weights are.

    Args:
        module: with its weights in memory (RAM), or on the device where `how` is "device" or it is quantized.

    Raises:
        MachineError: if diffusers refuses.
    """
    device = torch.device(part.device)
    if how == "device":
        return _Stays()
    quantized = part.quantization != NONE
    if how == "whole":
        return _QuantizedWhole(module, device) if quantized else _Whole(module, device)
    streams = device.type == "cuda"
    from diffusers.hooks import apply_group_offloading  # most jobs need no hooks, which take a second

    # diffusers pins quantized weights, because it knows their inner tensors.
    on_the_way = streams and not quantized and not pin(module)
    try:
        apply_group_offloading(
            # A text encoder has its embedding twice; the one outside of its stack is never called.
            getattr(module, "encoder", module),
            onload_device=device,
            offload_type="block_level" if how == "blocks" else "leaf_level",
            num_blocks_per_group=1,
            use_stream=streams,
            low_cpu_mem_usage=on_the_way,
        )
    except ValueError as error:
        raise MachineError("execution.group_offload_failed", device=part.device, error=first_line(error)) from error
    return _Hooked(module)


class _Stays:
    """Weights that stay on the device."""

    waits_elsewhere = False

    def to_device(self) -> None:
        """Nothing to do."""

    def to_host(self) -> None:
        """Nothing to do."""


class _Hooked:
    """Weights that diffusers' hooks copy while the module runs.

    Hooks copy a layer as soon as the one before it in the first call runs. Layers that read the text are called once,
    and would stay on the device.
    """

    waits_elsewhere = False

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def to_device(self) -> None:
        """Nothing to do."""

    def to_host(self) -> None:
        """Free layers that were copied and not called."""
        offload_groups(self._module)


class _Whole:
    """Weights copied to the device as a whole; the originals stay in memory, so that only copies are freed.

    The originals are not page-locked: a component is copied once a stage, and locking would take longer than it saves.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._originals: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def waits_elsewhere(self) -> bool:
        """Whether the weights are in memory."""
        return not self._originals

    def to_device(self) -> None:
        """Copy all weights to the device; if they do not fit, none."""
        if self._originals:
            return
        try:
            for tensor in (*self._module.parameters(), *self._module.buffers()):
                original = tensor.data
                tensor.data = original.to(self._device)
                self._originals.append((tensor, original))
        except BaseException:
            self.to_host()
            raise

    def to_host(self) -> None:
        """Use the originals again."""
        for tensor, original in self._originals:
            tensor.data = original
        self._originals.clear()


class _QuantizedWhole:
    """Quantized weights, moved by the quantization library; they are loaded onto the device to be quantized there."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device
        self.waits_elsewhere = False

    def to_device(self) -> None:
        """Move all weights to the device."""
        self._module.to(self._device)
        self.waits_elsewhere = False

    def to_host(self) -> None:
        """Move all weights to memory (RAM)."""
        self._module.to("cpu")
        self.waits_elsewhere = True


def pin(module: torch.nn.Module) -> bool:
    """Move a module's weights into page-locked memory; return whether that was done, else they stay as they are."""
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.numel()]
    needed = sum(tensor.nbytes for tensor in tensors)
    if needed > _SHARE * psutil.virtual_memory().available:
        return False
    try:
        move_into_slabs(tensors, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
    except RuntimeError as error:  # the system allows a process only so much of it
        logger.warning("Weights could not be page-locked, so they are copied more slowly: %s", error)
        return False
    return True


def slabs(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return the offsets of tensors of these byte sizes, by slab: as many in one as fit in `limit` bytes, in order."""
    offsets: list[list[int]] = []
    end = limit
    for size in sizes:
        if not offsets or end + size > limit:
            offsets.append([])
            end = 0
        offsets[-1].append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets


def move_into_slabs(
    tensors: Sequence[torch.Tensor], allocate: Callable[[int], torch.Tensor], limit: int = _SLAB_BYTES
) -> None:
    """Give tensors storage inside a few large allocations; their values stay.

    Args:
        tensors: dense, on the CPU.
        allocate: returns a one-dimensional uint8 tensor of that many bytes.
        limit: bytes of an allocation; a larger tensor has one to itself.
    """
    rest = list(tensors)
    for offsets in slabs([tensor.nbytes for tensor in rest], limit):
        here, rest = rest[: len(offsets)], rest[len(offsets) :]
        slab = allocate(offsets[-1] + here[-1].nbytes)
        for tensor, offset in zip(here, offsets, strict=True):
            place = slab[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.data)
            tensor.data = place


def next_files(spec: ModelSpec, plan: ExecutionPlan, running: str, resident: Collection[str]) -> list[Path]:
    """Return the weight files of the next component that is not in memory.

    Args:
        resident: components that are loaded or have no work left.
    """
    names = list(plan.components)
    after = names[names.index(running) + 1 :]
    coming = next((name for name in after if name not in resident), None)
    if coming is None or not plan.components[running].device.startswith("cuda") or plan.components[coming].on_engine:
        return []
    return spec.weight_paths(coming)


@contextmanager
def read_ahead(files: Sequence[Path], free_bytes: int | None = None) -> Iterator[None]:
    """Read files on a thread while entered, if free memory (RAM) suffices.

    Args:
        free_bytes: free memory; read from the system by default.
    """
    free = psutil.virtual_memory().available if free_bytes is None else free_bytes
    with contextlib.suppress(OSError):
        if not files or _FREE_FACTOR * sum(path.stat().st_size for path in files) > free:
            files = ()
    stop = threading.Event()
    thread = threading.Thread(target=_read_files, args=(files, stop), name="read-ahead", daemon=True)
    if files:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if files:
            thread.join()


def _read_files(files: Sequence[Path], stop: threading.Event) -> None:
    piece = bytearray(_PIECE_BYTES)
    with contextlib.suppress(OSError):  # loading the file reports the error
        for path in files:
            with path.open("rb", buffering=0) as file:
                while not stop.is_set() and file.readinto(piece):
                    pass
