"""Which configurations run side by side, and how: all held in memory at once, or one after the other. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.core.errors import InvalidRequestError
from runtime.core.facts import shortened
from runtime.core.plan import BACKEND_TITLES, PYTORCH, ExecutionPlan
from runtime.core.request import ALL, GenerationRequest
from runtime.planner.engine_offers import EngineOffer, Offers

_LONGEST_NAME = 40
# Of the memory that is free, this much may be planned for: allocators keep some of what they give back.
_SHARE = 0.85


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One of those that are measured.

    Attributes:
        name: as the table has it.
        flags: in which it differs from the others, as they were given.
        request: what it asks for.
        float32: whether all parts compute in float32, where a plan would take less and memory suffices.
        only_if_new: whether it is left out where it comes to what another one does.
    """

    name: str
    flags: str
    request: GenerationRequest
    float32: bool = False
    only_if_new: bool = False


def named_flags(text: str) -> tuple[str, str]:
    """Return name and flags of "NAME: FLAGS".

    Raises:
        InvalidRequestError: if it is anything else.
    """
    name, colon, flags = text.partition(":")
    name = name.strip()
    if not colon or not name or len(name) > _LONGEST_NAME or not name.isprintable():
        raise InvalidRequestError("config", "bench.configuration_unnamed", value=shortened(text), longest=_LONGEST_NAME)
    return name, flags.strip()


def check_names(names: Sequence[str]) -> None:
    """Check that every name is there once.

    Raises:
        InvalidRequestError: if one is not.
    """
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequestError("config", "bench.configuration_repeated", configuration=twice)


def standard(request: GenerationRequest, plan: ExecutionPlan, offers: Offers) -> list[Configuration]:
    """Return what is measured where nobody says: PyTorch, each backend that can run every part, and the planner's own.

    Args:
        plan: what PyTorch alone would do.
        offers: the engines there are or could be.
    """
    in_pytorch = request.replace(backends={ALL: PYTORCH})
    found = [Configuration(name=PYTORCH, flags=f"--backend {ALL}={PYTORCH}", request=in_pytorch)]
    if any(part.dtype != "float32" for part in plan.components.values()):
        found.insert(0, Configuration(name="float32", flags=found[0].flags, request=in_pytorch, float32=True))
    for backend in BACKEND_TITLES:
        asked = request.replace(backends={ALL: backend})
        if backend != PYTORCH and _runs_everywhere(backend, request, plan, offers):
            found.append(Configuration(name=backend, flags=f"--backend {ALL}={backend}", request=asked))
    return [*found, Configuration(name="auto", flags="", request=request.replace(backends={}), only_if_new=True)]


def _runs_everywhere(backend: str, request: GenerationRequest, plan: ExecutionPlan, offers: Offers) -> bool:
    def runs(offer: EngineOffer) -> bool:
        buildable = offer.problem is None and request.build != "never"
        return offer.backend == backend and (offer.ready or buildable)

    return all(
        any(runs(offer) for offer in offers(name, plan.latent_size, part.device))
        for name, part in plan.components.items()
    )


def in_float32(plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan with every part in float32, if twice its memory is free; else as it is."""
    unlike = [name for name, part in plan.components.items() if part.dtype != "float32"]
    if not unlike or 2 * plan.memory_bytes > plan.free_bytes:
        return plan
    parts = {
        name: part.replace(dtype="float32", weights_bytes=2 * part.weights_bytes) if name in unlike else part
        for name, part in plan.components.items()
    }
    doubled = ("weights_bytes", "working_bytes", "overhead_bytes")
    memory = tuple(stage.replace(**{name: 2 * getattr(stage, name) for name in doubled}) for stage in plan.memory)
    return plan.replace(components=parts, memory=memory)


def held_together(plans: Sequence[ExecutionPlan]) -> bool:
    """Whether all configurations fit into memory at once, so that nothing is loaded again between their runs."""
    free = min((plan.free_bytes for plan in plans), default=0)
    return sum(plan.memory_bytes for plan in plans) <= _SHARE * free


def decided(plan: ExecutionPlan) -> tuple[Any, ...]:
    """Return how a plan computes its clip: two that agree in it are the same configuration."""
    parts = [
        (name, part.backend, part.device, part.dtype, part.quantization, tuple(use.id for use in part.engines))
        for name, part in plan.components.items()
    ]
    asked = {key: value for key, value in plan.request_json().items() if key not in _DECIDED_SINCE}
    return parts, asked, plan.strategy


# What a plan has answered by its parts.
_DECIDED_SINCE: Collection[str] = frozenset({"backends", "build", "on_out_of_memory", "vae_precision"})


def in_words(plan: ExecutionPlan) -> str:
    """Return what runs the parts: "PyTorch, float32", or each backend with its parts where they differ."""
    groups: dict[str, list[str]] = {}
    for name, part in plan.components.items():
        precision = part.engines[-1].precision if part.engines else part.dtype
        if part.quantization != "none":
            precision = part.quantization
        groups.setdefault(f"{BACKEND_TITLES[part.backend]}, {precision}", []).append(name)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{how} ({', '.join(names)})" for how, names in groups.items())


def why_not(plan: ExecutionPlan) -> str | None:
    """Say why a plan is not what was asked for: PyTorch would run a part for which another backend was named."""
    fallen = [(name, part) for name, part in plan.components.items() if plan.fell_back(name)]
    if not fallen:
        return None
    name, part = fallen[0]
    reasons = " ".join(map(str, part.reasons))
    return f"{plan.title(name)}: PyTorch instead of {BACKEND_TITLES[plan.asked.backend(name)]}. {reasons}"


def without_builds(plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan once its engines were built: they are not built again for the next run."""
    parts = {
        name: part.replace(engines=tuple(use.replace(build=False) for use in part.engines))
        for name, part in plan.components.items()
    }
    asked = plan.asked.replace(build="missing") if plan.asked.build == "always" else plan.asked
    return plan.replace(components=parts, asked=asked)


def same_clip(plan: ExecutionPlan, reference: ExecutionPlan) -> str | None:
    """Say why a plan's clip cannot be compared with the reference's, frame by frame; `None` if it can."""
    if (plan.width, plan.height, plan.frames) != (reference.width, reference.height, reference.frames):
        return "another size"
    if plan.seed != reference.seed:
        return "another seed"
    if (plan.prompt, plan.negative_prompt) != (reference.prompt, reference.negative_prompt):
        return "another prompt"
    return None if plan.model_directory == reference.model_directory else "another model"
