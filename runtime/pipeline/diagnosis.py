"""Why a clip shows nothing, most likely, and what to do about it. Pure: from what was seen and how it was made."""

from runtime.core.plan import BACKEND_TITLES, PYTORCH, ExecutionPlan
from runtime.models.spec import is_transformer
from runtime.planner import vae_precision
from runtime.video.degenerate_clip import Fault

_SEEN: dict[Fault, str] = {
    "black": "The clip is black from beginning to end",
    "blank": "The clip shows one flat colour and nothing else",
    "frozen": "The clip stands still: all its frames are alike",
}
# Beyond this, colours burn out and latents run away.
_HIGH_GUIDANCE = 15.0
_FEW_STEPS = 4


def shown(fault: Fault) -> str:
    """Return what was seen, as a sentence."""
    return f"{_SEEN[fault]}."


def remedy(fault: Fault, plan: ExecutionPlan) -> str:
    """Return the likely cause and what to do, as sentences."""
    vae = plan.components["vae"]
    if fault != "frozen" and vae.backend != PYTORCH:
        precision = vae.engines[-1].precision if vae.engines else vae.dtype
        how = f"in {precision} on {BACKEND_TITLES[vae.backend]}"
        return f"Most likely its decoder goes wrong {how}: take --backend vae=pytorch."
    scale = max(plan.guidance_scale, plan.guidance_scale_2 or 0.0)
    if scale > _HIGH_GUIDANCE:
        return f"Most likely a guidance scale of {scale:g} is too high: take one below 10."
    for name, part in plan.components.items():
        if is_transformer(name) and part.backend != PYTORCH:
            title = BACKEND_TITLES[part.backend]
            return f"Most likely the {name} goes wrong on {title}: take --backend {name}=pytorch."
        if is_transformer(name) and part.quantization != "none":
            return f"Most likely the transformers lose too much in {part.quantization}: take --quantization none."
    rounded = fault != "frozen" and vae_precision.doubtful(vae)
    full = f"Most likely the VAE loses too much in {vae.dtype}: take --vae-precision float32."
    if "float16" in {part.dtype for part in plan.components.values()}:
        if rounded and vae.dtype == "float16":
            return full
        return "Most likely float16 overflows here. Another prompt or seed may do, or a GPU with bfloat16."
    if plan.steps < _FEW_STEPS:
        return f"Most likely {plan.steps} steps are too few: take the model's own number of steps."
    again = "the model's weights are damaged: copy or download the model again."
    return f"{full} Or {again}" if rounded else f"Most likely {again} Or try another seed."
