"""How far a clip's noise levels are moved towards noise, why, and how many steps each expert then takes. Pure."""

from collections.abc import Mapping

from runtime.core.errors import InvalidRequestError
from runtime.core.loras import LoraUse
from runtime.core.request import GenerationRequest
from runtime.models.known import published
from runtime.models.registry import family_of
from runtime.models.spec import ModelSpec


def check(request: GenerationRequest, spec: ModelSpec) -> None:
    """Refuse a shift that the model's scheduler would not follow.

    Raises:
        InvalidRequestError: if one is asked for, with the reason.
    """
    if request.shift is not None and spec.noise.setting is None:
        raise InvalidRequestError(
            "shift",
            "scheduler.shift_fixed",
            model=spec.title,
            scheduler=spec.scheduler,
            cause=spec.noise.fixed,
        )


def as_used(request: GenerationRequest, spec: ModelSpec) -> float | None:
    """Return the shift that counts instead of the model's own; `None` where that counts, or is the same."""
    return None if request.shift == spec.noise.shift else request.shift


def reason(shift: float | None, spec: ModelSpec) -> str:
    """Return why the shift is not the model's own, a sentence; empty where it is."""
    if shift is None:
        return ""
    known = published(spec)
    others = [f"the model's own scheduler has {spec.noise.shift:g}"] if spec.here else []
    if known is not None and known.flow_shift not in {shift, spec.noise.shift}:
        others.append(f"the model authors' code has {known.flow_shift:g}")
    return f"Shift {shift:g}, as asked{'; ' if others else ''}{', '.join(others)}."


def expert_steps(spec: ModelSpec, steps: int, shift: float | None) -> dict[str, int]:
    """Return how many of the steps each transformer takes, by component; empty where that is not known.

    The boundary between both experts is a timestep, so the shift says how many steps lie on either side of it.
    """
    if spec.boundary_ratio is None or spec.experts == 1:
        return {"transformer": steps}
    timesteps = spec.noise.timesteps(steps, shift)
    if timesteps is None:
        return {}
    boundary = spec.boundary_ratio * spec.noise.training_steps
    low = sum(timestep < boundary for timestep in timesteps)
    return {"transformer": len(timesteps) - low, "transformer_2": low}


def warnings(spec: ModelSpec, steps: int, shift: float | None, taken: Mapping[str, int]) -> list[str]:
    """Say what is odd about where the steps lie.

    Args:
        taken: the steps of each transformer, as `expert_steps` returns them.
    """
    by = spec.noise.shift if shift is None else shift
    said = [_other_than_made_for(spec, use, by) for use in spec.loras] if spec.here and spec.noise.setting else []
    if shift is not None and not all(taken.values()):
        which = "low" if taken["transformer"] else "high"
        counted = f"{steps} step{'' if steps == 1 else 's'}"
        said.append(f"With {counted} and shift {by:g} the {which}-noise transformer takes none: expect less quality.")
    return [sentence for sentence in said if sentence]


def _other_than_made_for(spec: ModelSpec, use: LoraUse, shift: float) -> str:
    wanted = None if use.steps is None else family_of(spec.family).distilled_shift(use.path)
    if wanted in {None, shift}:
        return ""
    return (
        f"The LoRA {use.name} was distilled with shift {wanted:g}; this takes {shift:g}: --shift {wanted:g} is what it "
        "is made for."
    )
