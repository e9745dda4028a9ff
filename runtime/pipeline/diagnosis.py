"""The most likely cause of a degenerate clip, and its remedy."""

from runtime.core.errors import BadResultError
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, ExecutionPlan
from runtime.models.spec import is_transformer
from runtime.planner.placement import may_overflow
from runtime.video.degenerate_clip import Fault

_CODES: dict[Fault, str] = {
    "black": "pipeline.clip_black",
    "blank": "pipeline.clip_blank",
    "frozen": "pipeline.clip_frozen",
}
# Beyond this, colours saturate and latents diverge.
_HIGH_GUIDANCE = 15.0
_FEW_STEPS = 4


def degenerate_clip(fault: Fault, plan: ExecutionPlan) -> BadResultError:
    """Return the error for a degenerate clip, with its likely cause."""
    return BadResultError(_CODES[fault], cause=likely_cause(fault, plan))


def likely_cause(fault: Fault, plan: ExecutionPlan) -> Fact:
    """Return the likely cause as a fact, which names the setting that helps."""
    vae = plan.components["vae"]
    if fault != "frozen" and vae.backend != PYTORCH:
        precision = vae.engines[-1].precision if vae.engines else vae.dtype
        return Fact("cause.vae_engine", {"backend": vae.backend, "precision": precision})
    scale = max(plan.guidance_scale, plan.guidance_scale_2 or 0.0)
    if scale > _HIGH_GUIDANCE:
        return Fact("cause.guidance_scale", {"scale": scale})
    for name, part in plan.components.items():
        if is_transformer(name) and part.backend != PYTORCH:
            return Fact("cause.transformer_engine", {"component": name, "backend": part.backend})
        if is_transformer(name) and part.quantization != "none":
            return Fact("cause.quantization", {"quantization": part.quantization})
    imprecise = fault != "frozen" and may_overflow(vae)
    if "float16" in {part.dtype for part in plan.components.values()}:
        if imprecise and vae.dtype == "float16":
            return Fact("cause.vae_precision", {"dtype": vae.dtype})
        return Fact("cause.float16")
    if plan.steps < _FEW_STEPS:
        return Fact("cause.few_steps", {"steps": plan.steps})
    return Fact("cause.vae_precision_or_weights", {"dtype": vae.dtype}) if imprecise else Fact("cause.weights")
