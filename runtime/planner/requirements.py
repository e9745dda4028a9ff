"""Hardware requirements of a model: the smallest GPU for its default clip, and whether it runs on this machine.

Pure: forecasts of the planner for GPUs on the market, with as much system memory (RAM) as a strategy needs.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from runtime.core.errors import MemoryShortError, TandemError
from runtime.core.estimates import Seconds
from runtime.core.facts import Fact
from runtime.core.request import GenerationRequest
from runtime.core.units import memory_size
from runtime.machine.probe import Gpu, Machine
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_offers import Offers, no_offers
from runtime.planner.history import History
from runtime.planner.resolve import PlanningContext, resolve

_GIB = 1 << 30
# Memory of GPUs on the market in GiB; 5 % of it is assumed to be in use.
CARDS = (6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 80, 96, 141, 180, 288)
_FREE_SHARE = 0.95
# RAM that is no limit, in GiB.
PLENTY_OF_RAM = 1 << 12
_NOWHERE = Path("none.mp4")
# A model runs well if its default clip takes at most this long: people try a prompt, watch the clip and change the
# prompt, and a quarter of an hour leaves them four tries an hour. Slower models are for clips that run unattended.
WELL_SECONDS = 15 * 60.0
# Strategies that move components whole, if at all.
_WHOLE = frozenset({"none", "model"})
# The classes of `Fit`, best first.
FIT_KINDS = ("well", "slow", "too_large", "unsupported")


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
    """What a model's default clip needs.

    Attributes:
        least: the smallest GPU without quantized weights; `None` if no single GPU suffices.
        resident: the smallest GPU on which components stay loaded between videos, except perhaps the text encoder.
        fit: whether the clip runs on this machine.
    """

    least: Card | None
    resident: Card | None
    fit: "Fit"

    @property
    def runs_well_without_gpu(self) -> bool:
        """Whether the clip runs well on this machine's CPU, so that no GPU is needed."""
        return self.fit.kind == "well" and self.fit.where == "memory"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        cards = {"least": self.least, "resident": self.resident}
        return {
            **{name: card.to_json() if card else None for name, card in cards.items()},
            **self.fit.to_json(),
        }


def needs(spec: ModelSpec, machine: Machine, history: History = ()) -> Needs:
    """Return what a model needs in general and on this machine with the memory that is free now."""
    least = smallest_card(spec)
    resident = None if least is None else smallest_card(spec, resident=True, at_least=least.gib)
    return Needs(least=least, resident=resident, fit=fit(spec, machine, history))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether a model's default clip runs on this machine with the memory that is free now, everything on "auto".

    Attributes:
        kind: "well", "slow" (more than `WELL_SECONDS`), "too_large" (for memory) or "unsupported" (for another reason).
        verdict: the same in a few words.
        detail: the memory strategy; if it is too large, the most frames that fit, if any; if unsupported, the reason.
        peak_bytes: in the memory `where` components run, of `free_bytes`; 0 if it does not run.
        seconds: of the clip, without loading; `None` if it does not run.
        whole: whether memory takes a transformer whole; otherwise its blocks or layers are copied to the GPU in turn.
    """

    kind: Literal["well", "slow", "too_large", "unsupported"]
    verdict: Fact
    detail: Fact | None
    peak_bytes: int = 0
    free_bytes: int = 0
    where: str = ""
    seconds: Seconds | None = None
    whole: bool = False

    @property
    def runs(self) -> bool:
        """Whether the clip runs."""
        return self.seconds is not None

    @property
    def rank(self) -> int:
        """Place of the class in `FIT_KINDS`; lists have models that run well first."""
        return FIT_KINDS.index(self.kind)

    @property
    def summary(self) -> Fact:
        """The verdict with memory and strategy, or with the reason."""
        if self.runs:
            memory = {"peak": self.peak_bytes, "free": self.free_bytes, "where": self.where}
            return Fact("fit.summary", {"verdict": self.verdict, "strategy": self.detail, **memory})
        if self.detail is None:
            return self.verdict
        return Fact("fit.reason", {"verdict": self.verdict, "cause": self.detail})

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types; the summary is `here`."""
        return {
            "class": self.kind,
            "here": str(self.summary),
            "runs_here": self.runs,
            "peak_bytes": self.peak_bytes,
            "seconds": None if self.seconds is None else self.seconds.to_json(),
        }


def fit(spec: ModelSpec, machine: Machine, history: History = (), offers: Offers = no_offers) -> Fit:
    """Return whether a model runs on this machine; it need not be downloaded."""
    request = GenerationRequest(prompt="none", model=spec.name, seed=0)
    try:
        plan = resolve(request, spec, PlanningContext(machine, _NOWHERE, offers, history), builds_later=True)
    except MemoryShortError as error:
        verdict = _too_large(error.fact)
        return Fit(kind="too_large", verdict=verdict, detail=_shorter(request, spec, machine))
    except TandemError as error:
        return Fit(kind="unsupported", verdict=Fact("fit.unsupported"), detail=error.fact)
    seconds = plan.seconds["total"]
    data = {"seconds": seconds.likely}
    well = seconds.likely <= WELL_SECONDS
    return Fit(
        kind="well" if well else "slow",
        verdict=Fact("fit.well", data) if well else Fact("fit.slow", data),
        detail=plan.forecast.title,
        peak_bytes=plan.memory_bytes,
        free_bytes=plan.free_bytes,
        where="video memory" if plan.components["transformer"].device.startswith("cuda") else "memory",
        seconds=seconds,
        whole=plan.strategy.offload in _WHOLE,
    )


def _too_large(short: Fact) -> Fact:
    """Return what a refusal for lack of memory says in a few words."""
    data = short.data
    if short.code == "planner.ram_short":
        return Fact("fit.too_large", {"needed": data["ram"], "free": data["ram_free"], "where": "RAM"})
    if "peak" in data and "free" in data:
        return Fact("fit.too_large", {"needed": data["peak"], "free": data["free"], "where": data["where"]})
    return Fact("fit.too_large_for_all")


def _shorter(request: GenerationRequest, spec: ModelSpec, machine: Machine) -> Fact | None:
    """Return how many frames of the default size fit, if fewer than by default do."""

    def fits(step: int) -> bool:
        try:
            resolve(request.replace(frames=1 + stride * step), spec, PlanningContext(machine, _NOWHERE))
        except TandemError:
            return False
        return True

    stride = spec.frame_stride
    # More frames need more memory: bisect between a length that fits and one that does not.
    low, high = 1, (spec.defaults.frames - 1) // stride
    if high <= low or not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Fact("fit.shorter", {"frames": 1 + stride * low})


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
            plan = resolve(request, spec, PlanningContext(card_machine(gib), _NOWHERE))
        except TandemError:
            continue
        if plan.strategy.keep_loaded or not resident:
            # Each component is read into RAM on its way to the GPU, see `constraints.load_conflict`.
            ram = max(plan.forecast.ram_bytes, *(part.weights_bytes for part in plan.components.values()))
            return Card(gib=gib, peak_bytes=plan.memory_bytes, ram_bytes=ram, strategy=plan.forecast.title)
    return None


@lru_cache
def card_machine(gib: int, ram_gib: int = PLENTY_OF_RAM) -> Machine:
    """Return a computer with one GPU of the Ada generation, of whose memory 5 % is in use.

    Args:
        gib: memory of the GPU in GiB.
        ram_gib: system memory in GiB.
    """
    gpu = Gpu("a card", (8, 9), gib * _GIB, int(gib * _GIB * _FREE_SHARE), "")
    return Machine(
        system="Linux x86_64",
        cpu="",
        cores=8,
        ram_bytes=ram_gib * _GIB,
        ram_free_bytes=int(ram_gib * _GIB * _FREE_SHARE),
        gpus=(gpu,),
        gpu_problem=None,
        torch_version="2.13.0",
        torch_cuda="13.0",
        driver_cuda=(13, 0),
    )


def _request(spec: ModelSpec, offload: str = "auto") -> GenerationRequest:
    # No engines are offered, so everything runs in PyTorch. Seed and prompt do not matter.
    return GenerationRequest(prompt="none", model=spec.name, seed=0, offload=offload, quantization="none")
