"""Which processes of several GPUs there are, and what they hold: started when first needed, kept between jobs."""

from collections.abc import Callable

import torch
from pydantic import TypeAdapter

from runtime.core.plan import EAGER, ComponentPlan, Speed, Split
from runtime.execution.parallel.group import Group, Limits
from runtime.execution.parallel.proxies import SharedDenoiser, SharedVideoDecoder, Texts
from runtime.machine.probe import gpu_index
from runtime.models.spec import ModelSpec

_PARTS = TypeAdapter(ComponentPlan)


def _never() -> None:
    """Nobody asks to stop."""


def shared_speed(speed: Speed, name: str) -> Speed:
    """Return how each of several GPUs computes a component: a transformer's passes are neither paired nor recorded."""
    if name == "vae":
        return Speed(compiled=speed.compiled, channels_last=speed.channels_last)
    return Speed(attention=speed.attention, compiled=speed.compiled, text_kept=speed.text_kept, fused=speed.fused)


class Shared:
    """A component that all of them have loaded; called like what it holds.

    Attributes:
        part: a denoiser or a video decoder.
    """

    def __init__(self, group: Group, name: str, part: SharedDenoiser | SharedVideoDecoder) -> None:
        self._group = group
        self._name = name
        self.part = part

    def close(self) -> None:
        """Have all of them let go of it."""
        if self._group.alive:
            self._group.call("free", _never, name=self._name)


class GroupManager:
    """The processes of one residency, none or a group. Not safe between threads.

    Args:
        limits: after which they count as hanging.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits
        self._group: Group | None = None
        self._texts = Texts()

    @property
    def group(self) -> Group | None:
        """The processes, while they are there."""
        return self._group if self._group is not None and self._group.alive else None

    def fits(self, split: Split | None) -> bool:
        """Whether there are those that a split wants: with `None`, that there are none."""
        there = self.group
        return (None if there is None else there.split) == split

    def load(
        self,
        split: Split,
        spec: ModelSpec,
        name: str,
        part: ComponentPlan,
        check: Callable[[], None],
        speed: Speed | None = None,
    ) -> Shared:
        """Have all of them load a component; they are started if they are not there.

        Args:
            check: raises where somebody wants the job to stop.
            speed: how it is computed, from `shared_speed`.

        Raises:
            TandemError: if that fails; none is left then.
        """
        group = self.group
        if group is None or group.split != split:
            self.dismiss()
            group = self._group = Group(split, check, self._limits)
            self._texts = Texts()
        told = _PARTS.dump_python(part, mode="json")
        loras = [use.model_dump(mode="json") for use in spec.loras_of(name)]
        directory, model = str(spec.directory), spec.name
        how = (speed or EAGER).model_dump(mode="json")
        answers = group.call(
            "load", check, name=name, part=told, directory=directory, model=model, loras=loras, speed=how
        )
        if name == "vae":
            return Shared(group, name, SharedVideoDecoder(group, check))
        dtype = getattr(torch, answers[0].said["dtype"])
        return Shared(group, name, SharedDenoiser(group, spec, name, dtype, self._texts, check))

    def reset_peak_memory(self) -> None:
        """Have `peak_bytes` start again."""
        if self.group is not None:
            self.group.reset_peak_memory()

    @property
    def peak_bytes(self) -> int:
        """The most that one of them allocated on its GPU since `reset_peak_memory`."""
        return 0 if self.group is None else self.group.peak_bytes

    def taken_bytes(self) -> dict[int, int]:
        """Return what they took from the driver, by the GPU's index."""
        if self.group is None:
            return {}
        taken = zip(self.group.split.devices, self.group.taken_bytes, strict=True)
        return {gpu_index(device): size for device, size in taken if device.startswith("cuda:")}

    def dismiss(self) -> None:
        """End all of them."""
        if self._group is not None:
            self._group.close()
        self._group = None
