"""What runs on GPUs of different sizes, as the planner forecasts it: the tables of docs/cards.md and README.md.

Pure, without torch. Of the memory of the simulated machines, 5 % is in use.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from runtime.core.errors import MemoryShortError
from runtime.core.request import AUTO, GenerationRequest
from runtime.machine.probe import Machine
from runtime.models.catalogue import find, known_models
from runtime.models.spec import ModelSpec
from runtime.planner.requirements import PLENTY_OF_RAM, card_machine
from runtime.planner.resolve import PlanningContext, resolve

_GIB = 1 << 30
_NOWHERE = Path("none")
_SHIPPED = "diorama"
CARDS = (6, 8, 12, 16, 24, 48, 80)
# GPU memory and RAM of machines whose RAM may be the limit, in GiB.
MACHINES = ((6, 32), (8, 16), (8, 32), (12, 32), (16, 32), (24, 32), (24, 64))
_README_CARDS = (6, 12, 24)
_README_MODELS = (
    *("diorama", "wan2.1-t2v-1.3b", "wan2.2-ti2v-5b", "hunyuan-video", "framepack-i2v"),
    *("wan2.1-i2v-14b-480p", "wan2.2-t2v-a14b"),
)
_DOES_NOT_RUN = "–"
_OFFLOADED = {"model": "components", "group": "blocks", "sequential": "layers"}
_QUANTIZED = {"fp8": "FP8", "bnb-8bit": "8-bit", "bnb-4bit": "4-bit"}
_PACKAGES = (("bitsandbytes", "0.50.2"), ("torchao", "0.18.0"), ("triton", "3.5.0"))


class Clip(NamedTuple):
    """A clip of a model.

    Attributes:
        model: name of the model.
        frames: by default; 0 for a model whose memory does not depend on the length.
    """

    model: str
    width: int
    height: int
    frames: int

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return _specs()[self.model]

    @property
    def title(self) -> str:
        """The model's name for people."""
        return "Diorama (shipped)" if self.model == _SHIPPED else self.spec.title

    @property
    def is_default(self) -> bool:
        """Whether this is the size that the model makes by default."""
        return (self.width, self.height) == (self.spec.defaults.width, self.spec.defaults.height)

    def request(self, frames: int, quantization: str) -> GenerationRequest:
        """Return the request of this clip with another length."""
        size = {"width": self.width, "height": self.height, "frames": frames or AUTO}
        return GenerationRequest.from_mapping(
            {"prompt": "none", "model": self.model, "seed": 0, "quantization": quantization, **size}
        )


@cache
def _specs() -> dict[str, ModelSpec]:
    """Return the models by name, the smallest first."""
    specs = [find(_SHIPPED, _NOWHERE), *(known.spec(_NOWHERE) for known in known_models())]
    return {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.total_parameters)}


def clips() -> list[Clip]:
    """Return a clip for each landscape size that a model was made for; of the shipped model, for the default size."""
    return [
        Clip(name, width, height, 0 if spec.section else spec.defaults.frames)
        for name, spec in _specs().items()
        for width, height in (spec.sizes if name != _SHIPPED else [(spec.defaults.width, spec.defaults.height)])
        if width > height
    ]


@cache
def machine(gib: int, ram: int) -> Machine:
    """Return a `card_machine` with the packages that quantize weights.

    Args:
        gib: memory of the GPU in GiB.
        ram: system memory in GiB.
    """
    return replace(card_machine(gib, ram), packages=_PACKAGES)


class Fit(NamedTuple):
    """How a clip runs on a machine.

    Attributes:
        frames: the most that fit, if fewer than by default; otherwise 0.
        way: how the weights are held, in a word or two.
        ram_bytes: system memory that it needs.
        tiles: whether frames are decoded in tiles.
    """

    frames: int
    way: str
    ram_bytes: int
    tiles: bool


@cache
def fit(clip: Clip, gib: int, ram: int) -> Fit | None:
    """Return how a clip runs on a `machine`, `None` if no length does; with plenty of RAM, without quantization."""
    quantization = "none" if ram == PLENTY_OF_RAM else AUTO
    default_fit = _plan(clip, clip.frames, gib, ram, quantization)
    if default_fit is not None:
        return default_fit._replace(frames=0)
    stride = clip.spec.frame_stride
    longest = None if clip.frames == 0 else _plan(clip, 1 + stride, gib, ram, quantization)
    if longest is None:
        return None
    # More frames need more memory: bisect between a length that fits and one that does not.
    low, high = 1, (clip.frames - 1) // stride
    while high - low > 1:
        middle = (low + high) // 2
        shorter = _plan(clip, 1 + stride * middle, gib, ram, quantization)
        low, high, longest = (low, middle, longest) if shorter is None else (middle, high, shorter)
    return longest


def _plan(clip: Clip, frames: int, gib: int, ram: int, quantization: str) -> Fit | None:
    try:
        plan = resolve(clip.request(frames, quantization), clip.spec, PlanningContext(machine(gib, ram), _NOWHERE))
    except MemoryShortError:
        return None
    strategy = plan.strategy
    if strategy.quantization != "none":
        way = _QUANTIZED[strategy.quantization]
    elif strategy.offload != "none":
        way = _OFFLOADED[strategy.offload]
    else:
        way = "loaded" if strategy.keep_loaded else "in turn"
    # Each component is read into RAM on its way to the GPU.
    ram_bytes = max(plan.forecast.ram_bytes, *(part.weights_bytes for part in plan.components.values()))
    return Fit(frames, way, ram_bytes, strategy.decode_tile is not None)


def by_card() -> str:
    """Return the table of GPUs in machines that have as much RAM as a clip needs, with that RAM in GiB."""

    def cell(clip: Clip, gib: int) -> str:
        result = fit(clip, gib, PLENTY_OF_RAM)
        if result is None:
            return _DOES_NOT_RUN
        return f"{_length(result)}{result.way} {_gib(result)}" + "*" * result.tiles

    return _table(clips(), [f"{gib} GB" for gib in CARDS], [[cell(clip, gib) for gib in CARDS] for clip in clips()])


def by_machine() -> str:
    """Return the table of machines with little RAM."""

    def cell(clip: Clip, gib: int, ram: int) -> str:
        result = fit(clip, gib, ram)
        return _DOES_NOT_RUN if result is None else _length(result) + result.way + "*" * result.tiles

    columns = [f"{gib} GB, {ram} GB RAM" for gib, ram in MACHINES]
    return _table(clips(), columns, [[cell(clip, *sizes) for sizes in MACHINES] for clip in clips()])


def for_readme() -> str:
    """Return the short table of README.md: the default clips of some models on three cards."""

    def cell(clip: Clip, gib: int) -> str:
        result = fit(clip, gib, PLENTY_OF_RAM)
        if result is None:
            return _DOES_NOT_RUN
        offloaded = result.way in _OFFLOADED.values()
        return _length(result) + (f"offload, {_gib(result)} GB of RAM" if offloaded else "runs")

    chosen = [clip for clip in clips() if clip.model in _README_MODELS and clip.is_default]
    columns = [f"{gib} GB" for gib in _README_CARDS]
    return _table(chosen, columns, [[cell(clip, gib) for gib in _README_CARDS] for clip in chosen])


def _length(result: Fit) -> str:
    return f"up to {result.frames} frames, " if result.frames else ""


def _gib(result: Fit) -> int:
    return -(-result.ram_bytes // _GIB)


def _table(chosen: Sequence[Clip], columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; models with the same row share it."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for clip, row in zip(chosen, cells, strict=True):
        length = f"{clip.frames} frames" if clip.frames else "any length"
        rows.setdefault((f"{clip.width}×{clip.height}, {length}", *row), []).append(clip.title)
    head = ("model", "clip", *columns)
    lines = [head, ("---",) * len(head), *((", ".join(names), *row) for row, names in rows.items())]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
