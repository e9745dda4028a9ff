"""Estimates of a plan: memory per stage, seconds with their uncertainty, and the strategies to choose from.

Plain data: `planner.strategies` fills it in. Bytes and seconds throughout.
"""

from dataclasses import dataclass, replace
from typing import Any

from runtime.core.facts import Fact, short
from runtime.core.frozen import FrozenModel


class MemoryStrategy(FrozenModel):
    """How a clip fits into memory: where the weights are, in which precision, and how much is decoded at a time.

    Attributes:
        offload: where weights are while they are not used: "none" (the device), or in RAM, brought by whole component
            ("model"), by block ("group") or by layer ("sequential").
        quantization: of the transformers' weights: "none", "bnb-8bit", "bnb-4bit" or "fp8".
        keep_loaded: whether components stay on the device between stages and jobs, all but those `freed` after their
            stage. Offloaded components stay in RAM in any case, all but those `freed`, which are alone there.
        decode_chunk: latent frames that the VAE decodes in one call.
        decode_tile: side of the tiles that the VAE decodes and encodes a frame in, in latents; `None` for it whole.
    """

    offload: str = "none"
    quantization: str = "none"
    keep_loaded: bool = False
    freed: tuple[str, ...] = ()
    decode_chunk: int = 1
    decode_tile: int | None = None

    @property
    def lossless(self) -> bool:
        """Whether the video is the same as with unlimited memory."""
        return self.quantization == "none" and self.decode_tile is None

    @property
    def flags(self) -> str:
        """Options that select it on the command line; empty if only "auto" selects it."""
        flags = [f"--offload {self.offload}"] if self.offload != "none" else []
        flags += [f"--quantization {self.quantization}"] if self.quantization != "none" else []
        return " ".join(flags)

    def keeps(self, component: str) -> bool:
        """Return whether a component stays on the device after its stage."""
        return self.keep_loaded and component not in self.freed


class StageMemory(FrozenModel):
    """Memory on the device while one component runs.

    Attributes:
        stage: "encode", "denoise" or "decode".
        component: the component that runs.
        weights_bytes: all weights on the device, of this component and others.
        working_bytes: activations, and for the VAE its caches.
        overhead_bytes: latents and the libraries' own memory.
        allocator_slack_bytes: memory that PyTorch's allocator may use on top; a plan that fits leaves it free.
        measured: whether the peak was measured on this machine.
    """

    stage: str
    component: str
    weights_bytes: int
    working_bytes: int
    overhead_bytes: int
    allocator_slack_bytes: int = 0
    measured: bool = False

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak, without the allocator's slack."""
        return self.weights_bytes + self.working_bytes + self.overhead_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and the peak."""
        return {**self.model_dump(), "peak_bytes": self.peak_bytes}


def basis(*, measured: bool, inferred: bool = True) -> Fact:
    """Return what a figure rests on; see `Seconds`."""
    if measured:
        return Fact("planner.measured")
    return Fact("planner.inferred" if inferred else "planner.estimated")


@dataclass(frozen=True)
class Seconds:
    """A duration: most likely `likely`, between `low` and `high`.

    Attributes:
        measured: whether this very thing was measured on this machine.
        inferred: whether it follows from measurements of something else on this machine: another size, or one call by
            itself. What is neither is an estimate.
    """

    likely: float
    low: float
    high: float
    measured: bool = False
    inferred: bool = False

    @property
    def known(self) -> bool:
        """Whether it rests on measurements on this machine."""
        return self.measured or self.inferred

    @property
    def basis(self) -> Fact:
        """What it rests on."""
        return basis(measured=self.measured, inferred=self.inferred)

    def as_inferred(self) -> "Seconds":
        """Return the same seconds, which follow from what was measured."""
        return replace(self, measured=False, inferred=self.known)

    def __add__(self, other: "Seconds") -> "Seconds":
        """Return both one after the other; measured only if both are."""
        measured = self.measured and other.measured
        return Seconds(
            self.likely + other.likely,
            self.low + other.low,
            self.high + other.high,
            measured,
            inferred=not measured and self.known and other.known,
        )

    def __mul__(self, times: float) -> "Seconds":
        """Return the duration of so many repetitions."""
        return replace(self, likely=self.likely * times, low=self.low * times, high=self.high * times)

    def to_json(self) -> dict[str, Any]:
        """Return seconds to the millisecond."""
        return {
            "seconds": round(self.likely, 3),
            "low": round(self.low, 3),
            "high": round(self.high, 3),
            "measured": self.measured,
        }


class BackendSeconds(FrozenModel):
    """The forecast of one component of a clip on one backend.

    Attributes:
        builder: of its engines; empty in PyTorch.
        seconds: of all its calls.
    """

    backend: str
    builder: str
    seconds: Seconds


class StrategyForecast(FrozenModel):
    """The forecast of one strategy for a clip.

    Attributes:
        title: the strategy in words.
        peak_bytes: on the device.
        ram_bytes: in system memory, if the device has its own.
        seconds: of the whole video, without loading.
        fits: whether it fits the device's free memory, `fits_ram` the free system memory.
        lacks: why it cannot be used, however much memory is free; `None` if it can.
        offered: whether a request with its offload and quantization selects it.
    """

    strategy: MemoryStrategy
    title: Fact
    peak_bytes: int
    ram_bytes: int
    seconds: Seconds
    fits: bool
    fits_ram: bool
    lacks: Fact | None = None
    offered: bool = False

    def verdict(self, where: str, *, taken: bool = False) -> Fact:
        """Return in a few words whether it can be used; `where` names the device's memory."""
        if taken:
            return Fact("strategy.used")
        if self.lacks is not None:
            return Fact("strategy.unavailable", {"cause": self.lacks})
        if not self.fits and not self.fits_ram:
            return Fact("strategy.too_little_of_both", {"memory": where})
        if not (self.fits and self.fits_ram):
            return Fact("strategy.too_little", {"memory": "RAM" if self.fits else where})
        return Fact("strategy.fits" if self.offered else "strategy.not_needed")

    def to_json(self, *, taken: bool = False) -> dict[str, Any]:
        """Return the fields and the strategy's as one object of JSON types; `taken` is whether a plan uses it."""
        numbers = self.model_dump(include={"peak_bytes", "ram_bytes", "fits", "fits_ram", "offered"})
        strategy = self.strategy
        return {
            "title": str(self.title).rstrip("."),
            "lacks": "" if self.lacks is None else short(self.lacks),
            **numbers,
            **strategy.model_dump(mode="json"),
            "flags": strategy.flags,
            "lossless": strategy.lossless,
            "seconds": self.seconds.to_json(),
            "taken": taken,
        }
