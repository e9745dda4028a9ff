"""The upscaler as a component of a video's plan, how it is called, and how long that takes. Pure."""

from runtime.core.errors import InvalidRequestError
from runtime.core.plan import ExecutionPlan, Upscaling, default_crf
from runtime.core.request import AUTO, MAX_SIDE, UPSCALER
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_offers import Offers
from runtime.planner.frame_networks import FrameCalls, decoding_memory, speed_of, with_frame_network
from runtime.planner.history import History, Run


def check_size(width: int, height: int, scale: int, field: str) -> None:
    """Check that an upscaled video can be saved.

    Raises:
        InvalidRequestError: if it would be too large; names `field`.
    """
    if scale * max(width, height) > MAX_SIDE:
        raise InvalidRequestError(field, "upscale.too_large", width=width, height=height, scale=scale, most=MAX_SIDE)


def calls_of(plan: ExecutionPlan, spec: ModelSpec) -> FrameCalls:
    """Return how the upscaler of a plan is called; `spec` is its model's."""
    assert plan.upscaling is not None
    assert spec.upscaler is not None
    part, upscaling = plan.components[UPSCALER], plan.upscaling
    return FrameCalls(spec.upscaler, plan.height, plan.width, part.device, part.dtype, upscaling.tile, upscaling.batch)


def run_of(plan: ExecutionPlan, spec: ModelSpec, machine: Machine, seconds: float, *, loaded: bool) -> Run:
    """Return the run that records how long the upscaler of a finished job took; see `FrameCalls.run`."""
    calls, part = calls_of(plan, spec), plan.components[UPSCALER]
    return calls.run(calls.kind(machine, part.backend, speed_of(part)), seconds, plan.video_frames, loaded=loaded)


def with_upscaler(
    plan: ExecutionPlan, spec: ModelSpec, machine: Machine, offers: Offers, history: History
) -> ExecutionPlan:
    """Return a plan with the upscaler as its last component; without one, the plan unchanged.

    The upscaler takes what memory is left, in tiles if necessary.

    Raises:
        InvalidRequestError: if the video would be too large.
    """
    upscaler = spec.upscaler
    if upscaler is None:
        return plan
    scale = upscaler.vae.scale_factor_spatial
    check_size(plan.width, plan.height, scale, "upscale")
    device, decoding = plan.components["vae"].device, decoding_memory(plan)
    used = decoding.working_bytes if device == "cpu" else decoding.peak_bytes
    calls = FrameCalls.of(upscaler, plan.height, plan.width, device, machine, used)
    plan = plan.replace(
        upscale=str(calls.architecture.output_scale),
        upscaler=upscaler.name.removesuffix(f" {scale}x"),
        upscaling=Upscaling(width=calls.width, height=calls.height, tile=calls.tile, batch=calls.batch),
        crf=default_crf(calls.width, calls.height) if plan.request.crf == AUTO else plan.crf,
    )
    return with_frame_network(plan, calls, plan.video_frames, "upscale", machine, offers, history)
