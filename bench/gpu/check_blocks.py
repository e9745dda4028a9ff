"""Check block engines in the execution layer: passes of a transformer in every way a job runs them, and failures."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import torch

from bench.gpu.check_common import HOME, Checks
from runtime.core.errors import EngineError
from runtime.core.plan import EngineRef, ExecutionPlan, Speed
from runtime.core.request import GenerationRequest
from runtime.engines.block_reference import times_of
from runtime.engines.builders import BUILDERS
from runtime.engines.service import EngineService, OpenEngines
from runtime.execution.components import Denoiser
from runtime.execution.residency import Residency
from runtime.models.spec import ModelSpec, is_transformer
from runtime.planner.choice.engine_index import EngineRecord, ShapeProfile
from runtime.planner.resolve import PlanningContext, resolve
from tests.gpu.errors import relative_error
from tests.plans import Alone

ANY_SIZE = ShapeProfile.fixed((1, 1, 1))
TIMES = (900.0, 880.0, 860.0)
# Calls of engines before one fails: within a block of the second pass.
FAILING_CALL = 5
Write = Callable[[OpenEngines, str, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], None]


def blocks(checks: Checks) -> None:
    """Passes on block engines, compared with PyTorch in the same precision: results, time, memory, failures."""
    spec = checks.model()
    records = []
    for program in spec.block_programs:
        key = checks.key(spec, "transformer", program, (ANY_SIZE,), checks.arguments.precision)
        records.append(checks.engine(spec, "transformer", key))
        checks.say(
            "block engine",
            program=program,
            precision=key.precision,
            error=records[-1].error,
            verified=records[-1].verified,
            detail=records[-1].detail,
            build_seconds=records[-1].build_seconds,
            file_bytes=records[-1].file_bytes,
            context_bytes=records[-1].context_bytes,
        )
    pytorch, in_blocks = plans(checks, spec, records)
    service = EngineService(checks.store, checks.machine, None)
    reference = passes(checks, spec, pytorch, service)[-1].cpu()
    report(checks, "pytorch", spec, pytorch, service, reference)
    if checks.device.startswith("cuda"):
        compiled = pytorch.replace(speed=pytorch.speed.replace(compiled=True))
        report(checks, "pytorch compiled", spec, compiled, service, reference)
    report(checks, "blocks", spec, in_blocks, service, reference)
    kept = in_blocks.replace(speed=in_blocks.speed.replace(text_kept=True))
    report(checks, "text kept", spec, kept, service, reference)
    if checks.device.startswith("cuda"):
        graphed = kept.replace(speed=kept.speed.replace(graphed=True))
        report(checks, "graphed", spec, graphed, service, reference)
    for offload in ("model", "group"):
        offloaded = in_blocks.replace(strategy=in_blocks.strategy.replace(offload=offload))
        report(checks, f"offload {offload}", spec, offloaded, service, reference)
    cached = in_blocks.replace(step_cache="first-block:1e-9")
    report(checks, "step cache", spec, cached, service, reference)
    for what, end in (("engine error", broken), ("out of memory", starving), ("NaN", not_numbers)):
        with mock.patch.object(OpenEngines, "write", going_wrong(end)):
            report(checks, what, spec, in_blocks, service, reference)
    endurance(checks, spec, in_blocks, service)


def plans(checks: Checks, spec: ModelSpec, records: list[EngineRecord]) -> tuple[ExecutionPlan, ExecutionPlan]:
    """Return plans of the requested size in the engines' precision: in PyTorch, and on the engines."""
    precision = records[0].key.precision
    request = {"prompt": "a red boat", "model": spec.name, "seed": 1, "offload": "none", "backends": {"all": "pytorch"}}
    if checks.arguments.latent:
        frames, height, width = checks.arguments.latent
        scale = spec.vae.scale_factor_spatial
        request |= {"frames": 4 * frames - 3, "height": scale * height, "width": scale * width}
    plan = resolve(GenerationRequest.from_mapping(request), spec, PlanningContext(checks.machine, HOME / "x.mp4"))
    uses = tuple(
        EngineRef(
            id=record.id,
            program=record.key.program,
            builder=record.key.builder,
            precision=precision,
            profile=(ANY_SIZE.min, ANY_SIZE.opt, ANY_SIZE.max),
        )
        for record in records
    )
    pytorch = plan.replace(speed=Speed(attention=plan.speed.attention), step_cache="none", split=None)
    in_blocks = pytorch
    for name in filter(is_transformer, plan.components):
        part = plan.components[name].replace(dtype=precision, quantization="none", device=checks.device)
        pytorch = pytorch.with_component(name, part)
        backend = BUILDERS[records[0].key.builder].backend
        in_blocks = in_blocks.with_component(name, part.replace(backend=backend, engines=uses))
    return pytorch, in_blocks


@contextmanager
def opened(
    checks: Checks, spec: ModelSpec, plan: ExecutionPlan, service: EngineService
) -> Iterator[tuple[Callable[[float], torch.Tensor], Denoiser, Alone]]:
    """Yield a function that computes one pass at a timestep, always on the same latents and text."""
    random = torch.Generator().manual_seed(0)
    latents = torch.randn(plan.latent_shape, generator=random).to(checks.device)
    text = torch.randn(1, spec.max_sequence_length, spec.transformer.text_dim, generator=random).to(checks.device)
    job = Alone(plan)
    with Residency(service) as residency, residency.denoiser(spec, job, "transformer") as denoiser:
        yield lambda time: denoiser(latents, times_of(spec, time).to(checks.device), text), denoiser, job


def passes(checks: Checks, spec: ModelSpec, plan: ExecutionPlan, service: EngineService) -> list[torch.Tensor]:
    """Return the results of a few passes."""
    with opened(checks, spec, plan, service) as (call, _, __):
        return [call(time).float().clone() for time in TIMES]


def report(
    checks: Checks, what: str, spec: ModelSpec, plan: ExecutionPlan, service: EngineService, reference: torch.Tensor
) -> None:
    """Report the error of the last pass, the time and memory of a pass, and what fell back."""
    cuda = checks.device.startswith("cuda")
    with checks.going_on(what), opened(checks, spec, plan, service) as (call, _, job):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        made = [call(time).float().clone() for time in TIMES][-1]
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        held = torch.cuda.memory_allocated() if cuda else 0
        checks.say(
            what,
            tokens=plan.tokens,
            error=relative_error(made, reference),
            milliseconds=checks.milliseconds(lambda: call(TIMES[-1]), 5),
            peak_bytes=peak,
            held_bytes=held,
            used_bytes=checks.used_bytes()[0],
            fallen=[(name, str(reason)) for name, reason in job.fallen],
            warnings=list(map(str, job.warnings)),
        )


def going_wrong(end: Callable[[Mapping[str, torch.Tensor]], None]) -> Write:
    """Return a function that runs engines, and calls `end` with the outputs of one call."""
    write, seen = OpenEngines.write, 0

    def failing(
        self: OpenEngines, program: str, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        nonlocal seen
        seen += 1
        write(self, program, inputs, outputs)
        if seen == FAILING_CALL:
            end(outputs)

    return failing


def broken(_: Mapping[str, torch.Tensor]) -> None:
    """Fail as an engine does."""
    raise EngineError("engine.failed", error="on purpose")


def starving(_: Mapping[str, torch.Tensor]) -> None:
    """Run out of memory."""
    raise torch.OutOfMemoryError("on purpose")


def not_numbers(outputs: Mapping[str, torch.Tensor]) -> None:
    """Return NaN."""
    for output in outputs.values():
        output.fill_(float("nan"))


def endurance(checks: Checks, spec: ModelSpec, plan: ExecutionPlan, service: EngineService) -> None:
    """Report how much memory grows over many passes."""
    with opened(checks, spec, plan, service) as (call, _, job):
        first = call(TIMES[0]).clone()
        before = (0, 0)
        for index in range(checks.arguments.calls):
            last = call(TIMES[0])
            if index == checks.arguments.calls // 10:
                checks.synchronize()
                before = checks.used_bytes()
        checks.synchronize()
        after = checks.used_bytes()
        checks.say(
            "many passes",
            passes=checks.arguments.calls,
            gpu_growth_bytes=after[0] - before[0],
            host_growth_bytes=after[1] - before[1],
            last_equals_first=bool(torch.equal(first, last)),
            fallen=job.fallen,
        )
