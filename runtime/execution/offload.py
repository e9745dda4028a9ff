"""Offloading: where a component's weights are between uses, and how they get to the device.

    device   on the device, always
    whole    in memory (RAM); copied to the device before the component's stage, freed after it
    blocks   in memory; each block is copied while the one before it runs (diffusers' group offloading)
    leaves   the same, layer by layer

On a CPU all are the same, and nothing is copied.
"""

from typing import Any, Literal, Protocol

import torch
from diffusers.hooks import apply_group_offloading

from runtime.core.errors import MachineError, first_line
from runtime.core.plan import ComponentPlan
from runtime.execution.pinned_memory import pin
from runtime.models.quantization import NONE
from runtime.models.spec import is_transformer
from runtime.planner import constraints
from runtime.upstream.diffusers import offload_groups

Placement = Literal["device", "whole", "blocks", "leaves"]


class Placed(Protocol):
    """A module with managed weights."""

    @property
    def waits_elsewhere(self) -> bool:
        """Whether `bring` has to copy weights."""
        ...

    def bring(self) -> None:
        """Make the module ready to be called."""
        ...

    def away(self) -> None:
        """Free the device's memory until the next `bring`."""
        ...


def placement(name: str, part: ComponentPlan, offload: str) -> Placement:
    """Return the placement of a component's weights.

    The VAE is small and moves as a whole. Text encoders have no list of blocks that diffusers finds, so they move layer
    by layer where transformers move block by block.

    Args:
        offload: of the plan: "none", "model", "group" or "sequential"; "auto" is "none".

    Raises:
        InvalidRequestError: for weights that cannot leave the device.
    """
    if part.engines or offload in {"none", "auto"}:
        return "device"
    case = constraints.ComponentSettings(
        component=name, backend=part.backend, offload=offload, quantization=part.quantization
    )
    against = constraints.cannot_wait(case)
    if against is not None:
        raise against.refusal
    if offload == "model" or name == "vae":
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

    def bring(self) -> None:
        """Nothing to do."""

    def away(self) -> None:
        """Nothing to do."""


class _Hooked:
    """Weights that diffusers' hooks copy while the module runs.

    Hooks copy a layer as soon as the one before it in the first call runs. Layers that read the text are called once,
    and would stay on the device.
    """

    waits_elsewhere = False

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def bring(self) -> None:
        """Nothing to do."""

    def away(self) -> None:
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

    def bring(self) -> None:
        """Copy all weights to the device; if they do not fit, none."""
        if self._originals:
            return
        try:
            for tensor in (*self._module.parameters(), *self._module.buffers()):
                original = tensor.data
                tensor.data = original.to(self._device)
                self._originals.append((tensor, original))
        except BaseException:
            self.away()
            raise

    def away(self) -> None:
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

    def bring(self) -> None:
        """Move all weights to the device."""
        self._module.to(self._device)
        self.waits_elsewhere = False

    def away(self) -> None:
        """Move all weights to memory (RAM)."""
        self._module.to("cpu")
        self.waits_elsewhere = True
