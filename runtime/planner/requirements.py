"""Hardware requirements of a model: the smallest GPU for its default clip, and memory on this machine.

Pure: forecasts of the planner for GPUs on the market, with as much system memory (RAM) as a strategy needs.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from runtime.core.errors import TandemError
from runtime.core.facts import Fact
from runtime.core.request import GenerationRequest
from runtime.core.units import memory_size
from runtime.machine.probe import Gpu, Machine
from runtime.models.spec import ModelSpec
from runtime.planner.history import History
from runtime.planner.resolve import resolve

_GIB = 1 << 30
# Memory of GPUs on the market in GiB; 5 % of it is assumed to be in use.
CARDS = (6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 80, 96, 141, 180, 288)
_FREE_SHARE = 0.95
_RAM_BYTES = 1 << 42


@dataclass(frozen=True, kw_only=True)
class Card:
    """The smallest GPU for a clip.

    Attributes:
        gib: its memory in GiB.
        peak_bytes: the clip's peak on it.
        ram_bytes: system memory that the clip needs in addition.
        strategy: title of the memory strategy.
    """

    gib: int
    peak_bytes: int
    ram_bytes: int
    strategy: Fact

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types; the strategy is `way`."""
        return {
            "gib": self.gib,
            "peak_bytes": self.peak_bytes,
            "ram_bytes": self.ram_bytes,
            "way": str(self.strategy).rstrip("."),
        }

    def __str__(self) -> str:
        """Return it in a few words."""
        return f"{self.gib} GB card and {memory_size(self.ram_bytes)} of RAM"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a model's default clip needs, without quantized weights.

    Attributes:
        least: the smallest GPU; `None` if no single GPU suffices.
        resident: the smallest GPU on which components stay loaded between videos, except perhaps the text encoder.
        here: memory and strategy on this machine, or why the clip cannot run.
        runs_here: whether the clip runs on this machine.
        peak_bytes: the peak in this machine's device memory; 0 if the clip cannot run.
    """

    least: Card | None
    resident: Card | None
    here: Fact
    runs_here: bool
    peak_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        cards = {"least": self.least, "resident": self.resident}
        return {
            **{name: card.to_json() if card else None for name, card in cards.items()},
            "here": str(self.here),
            "runs_here": self.runs_here,
            "peak_bytes": self.peak_bytes,
        }


def needs(spec: ModelSpec, machine: Machine, history: History = ()) -> Needs:
    """Return what a model needs in general and on this machine with the memory that is free now."""
    least = smallest_card(spec)
    resident = None if least is None else smallest_card(spec, resident=True, at_least=least.gib)
    try:
        plan = resolve(_request(spec), spec, machine, Path("none.mp4"), history=history)
    except TandemError as error:
        return Needs(least=least, resident=resident, here=error.fact, runs_here=False, peak_bytes=0)
    data = {
        "peak": plan.memory_bytes,
        "free": plan.free_bytes,
        "where": "video memory" if plan.components["transformer"].device.startswith("cuda") else "memory",
        "strategy": plan.forecast.title,
    }
    here = Fact("planner.runs_here", data)
    return Needs(least=least, resident=resident, here=here, runs_here=True, peak_bytes=plan.memory_bytes)


def smallest_card(spec: ModelSpec, *, resident: bool = False, at_least: int = 0) -> Card | None:
    """Return the smallest GPU that makes a model's default clip without loss.

    Args:
        resident: whether components must stay loaded.
        at_least: smallest memory to consider, in GiB.
    """
    for gib in CARDS:
        if gib < at_least:
            continue
        try:
            request = _request(spec, offload="none" if resident else "auto")
            plan = resolve(request, spec, _card_machine(gib), Path("none.mp4"))
        except TandemError:
            continue
        if plan.strategy.keep_loaded or not resident:
            ram = plan.forecast.ram_bytes
            return Card(gib=gib, peak_bytes=plan.memory_bytes, ram_bytes=ram, strategy=plan.forecast.title)
    return None


@lru_cache
def _card_machine(gib: int) -> Machine:
    card = Gpu("a card", (8, 9), gib * _GIB, int(gib * _GIB * _FREE_SHARE), "")
    return Machine(
        system="Linux x86_64",
        cpu="",
        cores=8,
        ram_bytes=_RAM_BYTES,
        ram_free_bytes=_RAM_BYTES,
        gpus=(card,),
        gpu_problem=None,
        torch_version="2.13.0",
        torch_cuda="13.0",
        driver_cuda=(13, 0),
    )


def _request(spec: ModelSpec, offload: str = "auto") -> GenerationRequest:
    # No engines are offered, so everything runs in PyTorch. Seed and prompt do not matter.
    return GenerationRequest(prompt="none", model=spec.name, seed=0, offload=offload, quantization="none")
