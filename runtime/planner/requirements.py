"""What a model needs: the smallest graphics card that makes its default clip, and what it takes on this machine.

Pure: the planner's own forecasts, on cards that are sold, with all the memory (RAM) that a way asks for.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from runtime.core.errors import TandemError
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.core.units import memory_size
from runtime.machine.probe import Gpu, Machine
from runtime.models.spec import ModelSpec
from runtime.planner.history import History
from runtime.planner.resolve import resolve

_GIB = 1 << 30
# GiB of memory of cards that are sold; a twentieth of each is taken to be in use.
CARDS = (6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 80, 96, 141, 180, 288)
_FREE_SHARE = 0.95
_RAM_BYTES = 1 << 42


@dataclass(frozen=True, kw_only=True)
class Card:
    """The smallest card on which a clip is made in some way.

    Attributes:
        gib: its memory; `peak_bytes` of it are taken.
        ram_bytes: of system memory, beside it.
        way: how the weights are held.
    """

    gib: int
    peak_bytes: int
    ram_bytes: int
    way: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return dict(vars(self))

    def __str__(self) -> str:
        """Return it in a few words."""
        return f"{self.gib} GB card and {memory_size(self.ram_bytes)} of RAM"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a model's default clip needs, without quantized weights.

    Attributes:
        least: the smallest card; `None` where none that is sold suffices.
        resident: the smallest on which parts stay loaded between videos, all but perhaps the text encoder.
        here: how it goes on this machine, in a sentence.
        runs_here: whether it does.
        peak_bytes: of this machine's memory for models, at the peak; 0 where it does not run.
    """

    least: Card | None
    resident: Card | None
    here: str
    runs_here: bool
    peak_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        cards = {"least": self.least, "resident": self.resident}
        return {**vars(self), **{name: card.to_json() if card else None for name, card in cards.items()}}


def needs(spec: ModelSpec, machine: Machine, history: History = ()) -> Needs:
    """Return what a model needs, and how it goes here with what is free now."""
    least = smallest_card(spec)
    resident = None if least is None else smallest_card(spec, resident=True, at_least=least.gib)
    try:
        plan = resolve(_request(spec), spec, machine, Path("none.mp4"), history=history)
    except TandemError as error:
        return Needs(least=least, resident=resident, here=error.what, runs_here=False, peak_bytes=0)
    where = "video memory" if plan.components["transformer"].device.startswith("cuda") else "memory"
    here = f"{memory_size(plan.memory_bytes)} of {memory_size(plan.free_bytes)} of {where}. {plan.forecast.title}"
    return Needs(least=least, resident=resident, here=here, runs_here=True, peak_bytes=plan.memory_bytes)


def smallest_card(spec: ModelSpec, *, resident: bool = False, at_least: int = 0) -> Card | None:
    """Return the smallest card of `at_least` GiB that makes a model's default clip, or makes it with all loaded."""
    return next(filter(None, (_on(spec, gib, resident=resident) for gib in CARDS if gib >= at_least)), None)


def _on(spec: ModelSpec, gib: int, *, resident: bool) -> Card | None:
    """Return the card of that size if the default clip is made on it without loss, or with everything loaded."""
    plan = _planned(spec, gib, resident=resident)
    if plan is None or (resident and not plan.strategy.keep_loaded):
        return None
    return Card(
        gib=gib,
        peak_bytes=plan.memory_bytes,
        ram_bytes=plan.forecast.ram_bytes,
        way=str(plan.forecast.title).rstrip("."),
    )


def _planned(spec: ModelSpec, gib: int, *, resident: bool) -> ExecutionPlan | None:
    try:
        request = _request(spec, offload="none" if resident else "auto")
        return resolve(request, spec, _card_machine(gib), Path("none.mp4"))
    except TandemError:
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
    # No engines are offered, so all is PyTorch's; the seed and the words change nothing.
    return GenerationRequest(prompt="none", model=spec.name, seed=0, offload=offload, quantization="none")
