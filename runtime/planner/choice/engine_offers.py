"""Offers of engines for a component, what PyTorch would run instead, and offers that settings exclude.

`engines.offers` makes the offers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from runtime.core.facts import Fact
from runtime.core.plan import EngineRef, LatentSize
from runtime.machine.probe import Machine
from runtime.models.quantization import FP8, NONE
from runtime.planner.constraints import ComponentSettings, Conflict, conflict


@dataclass(frozen=True, kw_only=True)
class PyTorchPath:
    """What runs a component if no engine does.

    Attributes:
        compiled: whether with compiled code.
        quantization: of a transformer's weights.
        as_measured: whether it computes as the baselines of engines were measured: in the dtype of a plan that the
            request does not change.
        usual_attention: whether with the attention kernel of such a plan. Baselines of block engines have no attention.
        seconds: of one call, as the forecast shows it; 0 if not measured.
        attention_seconds: of the attention in one call on one GPU, which is the same with block engines.
        faster: how many times as fast as on one GPU it is because several GPUs share it. They share block engines too,
            but no others.
    """

    compiled: bool = False
    quantization: str = NONE
    as_measured: bool = True
    usual_attention: bool = True
    seconds: float = 0.0
    attention_seconds: float = 0.0
    faster: float = 1.0

    @property
    def kind(self) -> str:
        """The key of `EngineRecord.baselines`."""
        return "compiled" if self.compiled else "eager"

    @property
    def title(self) -> Fact:
        """Its name in messages."""
        return Fact("planner.path_compiled") if self.compiled else Fact("planner.path_eager")


EAGER_PATH = PyTorchPath()


@dataclass(frozen=True)
class Comparison:
    """Seconds of one call of a component on engines and in PyTorch; PyTorch's are 0 if not measured.

    Attributes:
        attention: the part of both that is PyTorch's attention between block engines.
        measured: whether both are calls that were measured on this machine; otherwise they follow from other calls.
    """

    engine: float
    pytorch: float
    attention: float = 0.0
    measured: bool = False

    @property
    def speedup(self) -> float:
        """How many times as fast as PyTorch the engines are; 0 if not measured."""
        return self.pytorch / self.engine if self.engine else 0.0


@dataclass(frozen=True, kw_only=True)
class EngineOffer:
    """A component's engines from one builder: existing ones, and those that it would have to build.

    Attributes:
        backend: the backend that runs the engines.
        builder: the name of the builder.
        engines: the engines; `build` marks those to build. Empty if the backend does not support the device.
        missing: why an engine must be built; `None` if all exist.
        misfit: why the closest existing engine cannot be used, as a badge, such as "engine for other sizes".
        problem: why engines cannot be built on this machine; `None` if they can.
        build_seconds: estimated time to build the missing engines; 0 if unknown.
        seconds: of one call, measured (VAE: of the whole clip; block engines: without attention); 0 if not measured.
        baselines: of the same in PyTorch, "eager" and "compiled" as far as measured.
        file_bytes: size of the existing engines.
        in_blocks: whether its engines compute parts of each block of a transformer, see `plan.is_block_program`.
        on_request: whether they are built only if their backend is requested, because they are likely slower than
            PyTorch.
        scaled: whether `seconds` and `baselines` are scaled from another size at which the engines were measured.
    """

    backend: str
    builder: str
    engines: tuple[EngineRef, ...]
    missing: Fact | None = None
    misfit: Fact | None = None
    problem: Fact | None = None
    build_seconds: float = 0.0
    seconds: float = 0.0
    baselines: Mapping[str, float] = field(default_factory=dict)
    file_bytes: int = 0
    in_blocks: bool = False
    on_request: bool = False
    scaled: bool = False

    @property
    def ready(self) -> bool:
        """Whether all engines exist."""
        return bool(self.engines) and not any(use.build for use in self.engines)

    @property
    def pytorch_seconds(self) -> float:
        """Seconds of one call in PyTorch at its fastest; 0 if not measured."""
        return min(self.baselines.values(), default=0.0)

    @property
    def speedup(self) -> float:
        """Speedup over PyTorch at its fastest, measured on this machine; 0 if not measured."""
        return self.pytorch_seconds / self.seconds if self.ready and self.seconds else 0.0

    def is_compared(self, path: PyTorchPath) -> bool:
        """Return whether the baselines were measured with the settings of `path`."""
        # PyTorch is measured in FP8 for FP8 engines, and unquantized for all others.
        quantization = FP8 if any(use.precision == FP8 for use in self.engines) else NONE
        same = path.as_measured and path.quantization == quantization
        return same and (self.in_blocks or path.usual_attention)

    def compared(self, path: PyTorchPath) -> Comparison:
        """Compare the engines with what PyTorch would run instead, as measured when they were built."""
        if not self.ready or not self.seconds:
            return Comparison(0.0, path.seconds)
        attention, shared = (path.attention_seconds, path.faster) if self.in_blocks else (0.0, 1.0)
        baseline = self.baselines.get(path.kind, 0.0) if self.is_compared(path) else 0.0
        pytorch = (baseline + attention) / path.faster if baseline else path.seconds
        apart = bool(baseline) and not self.scaled and path.faster == shared == 1.0
        return Comparison((self.seconds + attention) / shared, pytorch, attention / shared, measured=apart)


# Maps a component, a latent size and a device to the offers, the preferred builder first.
Offers = Callable[[str, LatentSize, str], Sequence[EngineOffer]]
# The same for the size and device of a plan.
ComponentOffers = Callable[[str], Sequence[EngineOffer]]


def no_offers(_component: str, _latent: LatentSize, _device: str) -> Sequence[EngineOffer]:
    """Offer nothing: everything runs in PyTorch."""
    return ()


def admit(
    offers: Iterable[EngineOffer], case: ComponentSettings, machine: Machine
) -> tuple[list[EngineOffer], Conflict | None]:
    """Remove the offers that conflict with other settings.

    Offers that conflict with the machine remain. If their engines do not exist yet, the conflict becomes the offer's
    `problem`.

    Returns:
        The remaining offers, and the conflict of the first removed offer that could have been built; `None` if other
        engines of its backend remain.
    """
    admitted: list[EngineOffer] = []
    removed: list[tuple[str, Conflict]] = []
    for offer in offers:
        conflicting = conflict(_settings(offer, case), machine)
        if conflicting is not None and conflicting.setting:
            if offer.problem is None and not offer.on_request:
                removed.append((offer.backend, conflicting))
        elif conflicting is not None and not offer.ready and offer.problem is None:
            admitted.append(replace(offer, problem=conflicting.fact))
        else:
            admitted.append(offer)
    remain = {offer.backend for offer in admitted if offer.problem is None and not offer.on_request}
    return admitted, next((against for backend, against in removed if backend not in remain), None)


def refused(backend: str, offers: Iterable[EngineOffer], case: ComponentSettings, machine: Machine) -> Conflict | None:
    """Return which setting excludes all engines of a requested backend, `None` if none does.

    Args:
        offers: for the component.
        case: its settings.
    """
    of_backend = [_settings(offer, case) for offer in offers if offer.backend == backend]
    conflicts = [(settings, conflict(settings, machine)) for settings in of_backend or [replace(case, backend=backend)]]
    exclusions = [
        (settings.in_blocks, against) for settings, against in conflicts if against is not None and against.setting
    ]
    if len(exclusions) < len(conflicts):
        return None
    # Block engines allow more settings, so their conflict is the one to resolve.
    return max(exclusions, key=lambda pair: pair[0])[1]


def _settings(offer: EngineOffer, case: ComponentSettings) -> ComponentSettings:
    """Return a component's settings on the engines of an offer."""
    precision = offer.engines[-1].precision if offer.engines else ""
    return replace(case, backend=offer.backend, precision=precision, in_blocks=offer.in_blocks)
