"""Configurations that a benchmark compares: parsing, defaults, and comparison of their plans. Pure functions."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.core.errors import InvalidRequestError
from runtime.core.facts import shortened
from runtime.core.plan import BACKEND_TITLES, PYTORCH, ExecutionPlan
from runtime.core.request import ALL, GenerationRequest
from runtime.planner.choice.engine_offers import EngineOffer, Offers

_LONGEST_NAME = 40
# Share of the free memory that configurations may use together: allocators keep some of the memory they free.
_USABLE_SHARE = 0.85


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One configuration of a benchmark.

    Attributes:
        name: its name in the tables.
        flags: the flags that it adds to the common ones, as the user gave them.
        request: the complete request.
        float32: whether all components compute in float32, if there is enough memory.
        only_if_new: whether it is skipped if its plan equals that of another configuration.
    """

    name: str
    flags: str
    request: GenerationRequest
    float32: bool = False
    only_if_new: bool = False


def named_flags(text: str) -> tuple[str, str]:
    """Return name and flags of "NAME: FLAGS".

    Raises:
        InvalidRequestError: if the text has another form.
    """
    name, colon, flags = text.partition(":")
    name = name.strip()
    if not colon or not name or len(name) > _LONGEST_NAME or not name.isprintable():
        raise InvalidRequestError("config", "bench.configuration_unnamed", value=shortened(text), longest=_LONGEST_NAME)
    return name, flags.strip()


def check_names(names: Sequence[str]) -> None:
    """Check that names are unique.

    Raises:
        InvalidRequestError: for a repeated name.
    """
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InvalidRequestError("config", "bench.configuration_repeated", configuration=repeated)


def standard(request: GenerationRequest, plan: ExecutionPlan, offers: Offers) -> list[Configuration]:
    """Return the default configurations: PyTorch, each backend that supports all components, and the planner's choice.

    Args:
        plan: the plan with PyTorch for every component.
        offers: existing and buildable engines.
    """
    in_pytorch = request.replace(backends={ALL: PYTORCH})
    configurations = [Configuration(name=PYTORCH, flags=f"--backend {ALL}={PYTORCH}", request=in_pytorch)]
    if any(part.dtype != "float32" for part in plan.components.values()):
        configurations.insert(
            0, Configuration(name="float32", flags=configurations[0].flags, request=in_pytorch, float32=True)
        )
    for backend in BACKEND_TITLES:
        on_backend = request.replace(backends={ALL: backend})
        if backend != PYTORCH and _runs_everywhere(backend, request, plan, offers):
            configurations.append(Configuration(name=backend, flags=f"--backend {ALL}={backend}", request=on_backend))
    return [
        *configurations,
        Configuration(name="auto", flags="", request=request.replace(backends={}), only_if_new=True),
    ]


def _runs_everywhere(backend: str, request: GenerationRequest, plan: ExecutionPlan, offers: Offers) -> bool:
    def runs(offer: EngineOffer) -> bool:
        buildable = offer.problem is None and request.build != "never"
        return offer.backend == backend and (offer.ready or buildable)

    return all(
        any(runs(offer) for offer in offers(name, plan.engine_size(name), part.device))
        for name, part in plan.components.items()
    )


def in_float32(plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan with every component in float32; unchanged if less than twice its memory is free."""
    lower_precision = [name for name, part in plan.components.items() if part.dtype != "float32"]
    if not lower_precision or 2 * plan.memory_bytes > plan.free_bytes:
        return plan
    parts = {
        name: part.replace(dtype="float32", weights_bytes=2 * part.weights_bytes) if name in lower_precision else part
        for name, part in plan.components.items()
    }
    doubled = ("weights_bytes", "working_bytes", "overhead_bytes")
    memory = tuple(stage.replace(**{name: 2 * getattr(stage, name) for name in doubled}) for stage in plan.memory)
    return plan.replace(components=parts, memory=memory)


def fit_together(plans: Sequence[ExecutionPlan]) -> bool:
    """Return whether all configurations fit in memory together, so that none is reloaded between runs."""
    free = min((plan.free_bytes for plan in plans), default=0)
    return sum(plan.memory_bytes for plan in plans) <= _USABLE_SHARE * free


def plan_key(plan: ExecutionPlan) -> tuple[Any, ...]:
    """Return what determines how a plan computes its clip; plans with equal keys are the same configuration."""
    parts = [
        (name, part.backend, part.device, part.dtype, part.quantization, tuple(use.id for use in part.engines))
        for name, part in plan.components.items()
    ]
    request = {key: value for key, value in plan.request_json().items() if key not in _RESOLVED_FIELDS}
    return parts, request, plan.strategy


# Request fields whose effect is contained in the components of a plan.
_RESOLVED_FIELDS: Collection[str] = frozenset({"backends", "build", "on_out_of_memory", "vae_precision"})


def backend_text(plan: ExecutionPlan) -> str:
    """Return backend and precision: "PyTorch, float32", with the names of components if they differ."""
    groups: dict[str, list[str]] = {}
    for name, part in plan.components.items():
        precision = part.engines[-1].precision if part.engines else part.dtype
        if part.quantization != "none":
            precision = part.quantization
        title = f"{BACKEND_TITLES[part.backend]} for blocks" if part.in_blocks else BACKEND_TITLES[part.backend]
        groups.setdefault(f"{title}, {precision}", []).append(name)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{how} ({', '.join(names)})" for how, names in groups.items())


def fallback_text(plan: ExecutionPlan) -> str | None:
    """Return why PyTorch runs a component for which another backend was requested; `None` if that is not so."""
    replaced = [(name, part) for name, part in plan.components.items() if plan.fell_back(name)]
    if not replaced:
        return None
    name, part = replaced[0]
    reasons = " ".join(map(str, part.reasons))
    return f"{plan.title(name)}: PyTorch instead of {BACKEND_TITLES[plan.request.backend(name)]}. {reasons}"


def without_builds(plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan for the runs after the first, which build no engines."""
    parts = {
        name: part.replace(engines=tuple(use.replace(build=False) for use in part.engines))
        for name, part in plan.components.items()
    }
    request = plan.request.replace(build="missing") if plan.request.build == "always" else plan.request
    return plan.replace(components=parts, request=request)


def clip_difference(plan: ExecutionPlan, reference: ExecutionPlan) -> str | None:
    """Return what prevents a comparison with the reference's clip frame by frame; `None` if nothing does."""
    if (plan.width, plan.height, plan.frames) != (reference.width, reference.height, reference.frames):
        return "another size"
    if plan.seed != reference.seed:
        return "another seed"
    if (plan.prompt, plan.negative_prompt) != (reference.prompt, reference.negative_prompt):
        return "another prompt"
    return None if plan.model_directory == reference.model_directory else "another model"
