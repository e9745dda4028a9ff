"""Choose each component's backend from the engines that exist or can be built for it.

`engines.offers` makes the offers; `planner.resolve` calls `admit`, then `choose`. Pure: no files or devices are read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, EngineRef, LatentSize
from runtime.core.request import AUTO
from runtime.machine.probe import Machine
from runtime.models.quantization import FP8, NONE
from runtime.planner.constraints import ComponentSettings, Conflict, conflict

# Minimum speedup over PyTorch for the automatic choice of an engine. Smaller differences are within timing noise.
_MIN_SPEEDUP = 1.03


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
    """

    engine: float
    pytorch: float
    attention: float = 0.0

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
        return Comparison((self.seconds + attention) / shared, pytorch, attention / shared)


# Maps a component, a latent size and a device to the offers, the preferred builder first.
Offers = Callable[[str, LatentSize, str], Sequence[EngineOffer]]


@dataclass(frozen=True)
class Choice:
    """The backend of a component, with the reasons and the badge to show.

    Attributes:
        engines: the engines; empty for PyTorch.
        offer: the offer that was chosen; `None` for PyTorch.
    """

    backend: str
    engines: tuple[EngineRef, ...]
    reasons: tuple[Fact, ...]
    badge: Fact
    offer: EngineOffer | None = None

    @property
    def in_blocks(self) -> bool:
        """Whether the engines compute parts of each block of a transformer."""
        return self.offer is not None and self.offer.in_blocks


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


# Compares the engines of an offer with what PyTorch would run instead.
Compare = Callable[[EngineOffer], Comparison]


@dataclass(frozen=True)
class _PyTorchReference:
    """What engines are compared with: what PyTorch would run."""

    path: PyTorchPath
    compare: Compare


def on_offer(offer: EngineOffer) -> Choice:
    """Return the choice of existing engines, without a reason, to forecast a plan with them."""
    return Choice(offer.backend, offer.engines, (), Fact("planner.badge_ready"), offer)


def choose(
    backend: str,
    build: str,
    offers: Iterable[EngineOffer],
    in_pytorch: Fact,
    excluded: Conflict | None = None,
    path: PyTorchPath = EAGER_PATH,
    compare: Compare | None = None,
) -> Choice:
    """Choose a component's backend.

    Args:
        backend: its name, or "auto".
        build: "auto", "missing", "never" or "always".
        offers: see `admit`.
        in_pytorch: the device and precision in PyTorch, and why; a reason of the choice if PyTorch is chosen.
        excluded: the conflict that removed the preferred offer, from `admit`.
        path: what PyTorch would run.
        compare: compares engines with it; by default as they were measured when they were built. Only engines that are
            faster are chosen for "auto".
    """
    reference = _PyTorchReference(path, compare or (lambda offer: offer.compared(path)))
    if backend == PYTORCH:
        return _use_pytorch(Fact("planner.badge_as_asked"), in_pytorch, Fact("planner.as_asked"))
    if backend == AUTO:
        return _choose_fastest(build, list(offers), in_pytorch, excluded, reference)
    return _choose_requested(backend, build, [offer for offer in offers if offer.backend == backend], reference)


def _use_pytorch(badge: Fact, *reasons: Fact) -> Choice:
    return Choice(PYTORCH, (), reasons, badge)


def _use_engines(offer: EngineOffer, build: str, reason: Fact) -> Choice:
    uses = tuple(use.replace(build=True) for use in offer.engines) if build == "always" else offer.engines
    if not any(use.build for use in uses):
        badge = Fact("planner.badge_ready")
    elif offer.build_seconds:
        badge = Fact("planner.badge_builds", {"seconds": offer.build_seconds})
    else:
        badge = Fact("planner.badge_builds_unknown")
    reasons = (reason, Fact("planner.in_blocks")) if offer.in_blocks else (reason,)
    return Choice(offer.backend, uses, reasons, badge, offer)


def _choose_fastest(
    build: str, offers: list[EngineOffer], in_pytorch: Fact, excluded: Conflict | None, reference: _PyTorchReference
) -> Choice:
    if build in {"missing", "always"}:
        buildable = [offer for offer in offers if offer.problem is None and not offer.on_request]
        if buildable and (build == "always" or not any(offer.ready for offer in offers)):
            first = buildable[0]
            how = _build_note(first, build, reference)
            return _use_engines(first, build, Fact("planner.likely_fastest", {"backend": first.backend, "how": how}))
    measured = [offer for offer in offers if reference.compare(offer).speedup]
    best = max(measured, key=lambda offer: reference.compare(offer).speedup, default=None)
    if best is None:
        ready = [offer for offer in offers if offer.ready]
        if ready:
            cause = _not_compared(ready, reference.path)
            return _use_pytorch(cause, in_pytorch, cause)
        if excluded is not None:
            return _use_pytorch(excluded.fact, in_pytorch, excluded.fact)
        missing = next((offer.missing for offer in offers if offer.misfit), None)
        reasons = [] if missing is None else [Fact("planner.no_engine_fits", {"cause": missing})]
        return _use_pytorch(_badge_without_engine(offers), in_pytorch, *reasons)
    note = {"backend": best.backend, "how": _speed_note(best, reference)}
    if reference.compare(best).speedup < _MIN_SPEEDUP:
        return _use_pytorch(Fact("planner.badge_none_faster"), in_pytorch, Fact("planner.none_faster", note))
    code = "planner.fastest_measured" if len(measured) > 1 else "planner.faster_measured"
    return _use_engines(best, "never", Fact(code, note))


def _not_compared(ready: list[EngineOffer], path: PyTorchPath) -> Fact:
    """Return why none of the engines that exist could be compared with what PyTorch would run."""
    measured = next((offer for offer in ready if offer.seconds and path.kind in offer.baselines), None)
    if measured is not None and not measured.is_compared(path):
        return Fact("planner.compared_in_other_precision", {"backend": measured.backend})
    return Fact("planner.not_compared", {"path": path.title})


def _badge_without_engine(offers: list[EngineOffer]) -> Fact:
    """Return the badge if no engine is ready: why there is none."""
    misfit = next((offer.misfit for offer in offers if offer.misfit), None)
    problem = offers[0].problem if offers and all(offer.problem is not None for offer in offers) else None
    return misfit or problem or Fact("planner.badge_no_engine")


def _choose_requested(backend: str, build: str, offers: list[EngineOffer], reference: _PyTorchReference) -> Choice:
    # The fastest; the preferred one if they were not measured.
    ready = min(
        (offer for offer in offers if offer.ready),
        key=lambda offer: reference.compare(offer).engine or inf,
        default=None,
    )
    if ready is not None and build != "always":
        note = {"backend": backend, "how": _speed_note(ready, reference)}
        return _use_engines(ready, build, Fact("planner.asked_engine", note))
    buildable = next((offer for offer in offers if offer.problem is None), None)
    if buildable is None:
        problem = offers[0].problem if offers else None
        if problem is None:
            unsupported = Fact("planner.not_supported", {"backend": backend})
            return _use_pytorch(unsupported, unsupported)
        return _use_pytorch(problem, Fact("planner.asked_unavailable", {"backend": backend, "cause": problem}))
    if build == "never":
        badge = buildable.misfit or Fact("planner.badge_not_built", {"backend": backend})
        return _use_pytorch(badge, Fact("planner.asked_not_built", {"backend": backend, "cause": buildable.missing}))
    how = _build_note(buildable, build, reference)
    return _use_engines(buildable, build, Fact("planner.asked_engine", {"backend": backend, "how": how}))


def _build_note(offer: EngineOffer, build: str, reference: _PyTorchReference) -> Fact:
    if offer.ready:
        return Fact("planner.built_again") if build == "always" else _speed_note(offer, reference)
    if offer.build_seconds:
        return Fact("planner.built_first", {"seconds": offer.build_seconds, "cause": offer.missing})
    return Fact("planner.built_first_unknown", {"cause": offer.missing})


def _speed_note(offer: EngineOffer, reference: _PyTorchReference) -> Fact:
    precision = offer.engines[-1].precision
    compared = reference.compare(offer)
    if not compared.speedup:
        return Fact("planner.speed_unknown", {"precision": precision})
    data = {
        "precision": precision,
        "seconds": compared.engine,
        "pytorch": compared.pytorch,
        "path": reference.path.title,
        "times": compared.speedup,
    }
    if compared.attention:
        return Fact("planner.speed_in_blocks", {**data, "attention": compared.attention})
    return Fact("planner.speed", data)
