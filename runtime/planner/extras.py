"""What a step cache and LoRAs change in a plan: what it excludes, reasons, warnings. Pure."""

from runtime.core.request import AUTO, GenerationRequest
from runtime.core.step_cache import NONE
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec, is_transformer
from runtime.planner import constraints


def check_step_cache(request: GenerationRequest, machine: Machine, offload: str) -> None:
    """Refuse a way to hold the weights that a step cache excludes: it is not left out in silence.

    Args:
        offload: as it counts here.

    Raises:
        InvalidRequestError: naming the setting.
    """
    against = constraints.excluded_by_step_cache(request.step_cache, offload, machine)
    if against is not None:
        raise against.refusal


def reason(runs: str, component: str, step_cache: str) -> str:
    """Return why a component runs as it does, its step cache included.

    Args:
        runs: the reason without, a sentence.
    """
    if step_cache == NONE or not is_transformer(component):
        return runs
    return f"{runs} What its blocks add is reused across steps ({step_cache}), as asked."


def warnings(request: GenerationRequest, spec: ModelSpec, steps: int, guidance: float) -> list[str]:
    """Say what LoRAs that were distilled for few steps change, or want."""
    warnings = []
    for use in spec.loras:
        if use.steps is None:
            continue
        wants = f"The LoRA {use.name} was distilled for {use.steps} steps without guidance"
        if steps > use.steps or guidance > 1:
            said = f"{steps} steps with guidance {guidance:g}" if guidance > 1 else f"{steps} steps"
            warnings.append(f"{wants}; this takes {said}: --steps {use.steps} --guidance 1 is what it is made for.")
        elif AUTO in {request.steps, request.guidance_scale}:
            warnings.append(f"{wants}: that is what is taken here.")
    return warnings
