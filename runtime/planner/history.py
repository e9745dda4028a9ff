"""Measurements of earlier jobs on this machine, and forecasts from the run of the same kind that is nearest in size.

Pure: `pipeline.history_file` reads and writes the history file.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from pydantic import Field

from runtime.core.estimates import MemoryStrategy, Seconds, StageMemory
from runtime.core.frozen import FrozenModel
from runtime.core.plan import PYTORCH, ComponentPlan, EngineRef, ExecutionPlan, Speed
from runtime.core.request import NO_NAG, OFF, SOUND_DECODERS
from runtime.core.sparse_attention import SOL
from runtime.core.step_cache import NONE, computed_steps, is_scheduled
from runtime.machine.probe import Machine
from runtime.models.spec import (
    CONNECTORS,
    IMAGE_ENCODER,
    LATENT_UPSAMPLER,
    VAE_ENCODER,
    ModelSpec,
    is_transformer,
)
from runtime.planner import placement
from runtime.planner.memory_model import Workload, baseline_bytes, corrected, stages

# Runs are comparable up to this ratio of operations. Beyond it, caches and kernel launches weigh differently.
_MAX_RATIO = 16.0
# Below this ratio, two runs have the same size.
_SAME_RATIO = 1.001
# Range of a forecast latency, as factors (low, high) of a latency that was measured at the same size, or scaled from
# another size. Other programs may have run at the same time.
_MEASURED = (0.75, 1.4)
_SCALED = (0.6, 1.7)
# Pixels of the first of two stages, as a share of those of the second: an image is encoded for both.
_FIRST_STAGE_PIXELS = 0.25
# `Kind.component` of an attention kernel measured by itself.
ATTENTION = "attention"
# `Kind.component` of compilations: of all components, and of the VAE if engines compute the transformers.
_COMPILING, _COMPILING_VAE = "compiling", "compiling vae"
# `Run.flops` of a compilation without the cache, whose time does not depend on the size.
_ANY_SIZE = 1.0
# `Kind.speed` of a compilation from the cache on the disk begins with this.
_CACHED = "cached"


class Kind(FrozenModel):
    """What two runs must have in common to be comparable; names are those of `ComponentPlan`.

    Attributes:
        model: digest of the architecture, see `architecture`.
        component: "transformer" for both transformers; also "attention", "compiling" and "compiling vae".
        tile: side of the decoder's tiles in latents; empty for whole frames.
        step_cache: with the guidance cache, see `cache_of`; empty for none.
        speed: see `history_tag`.
    """

    device: str
    model: str
    component: str
    backend: str
    dtype: str
    quantization: str
    offload: str
    tile: str = ""
    step_cache: str = ""
    speed: str = ""


class Run(FrozenModel):
    """Measurements of one stage of a successful job.

    Attributes:
        flops: operations of one call (VAE: of the whole clip, or of a section's window).
        seconds: duration of one call; 0 if not measured.
        working_bytes: the forecast working set.
        excess_bytes: the measured peak minus the forecast peak; `None` if not measured.
        loaded: whether other programs used much of the processor meanwhile; such runs count only where there is no
            other, and are never called measured.
        jobs: how many jobs of this kind and size there were.
    """

    kind: Kind
    flops: float = Field(gt=0, allow_inf_nan=False)
    seconds: float = Field(ge=0, allow_inf_nan=False)
    working_bytes: int = Field(gt=0)
    excess_bytes: int | None
    loaded: bool = False
    jobs: int = Field(default=1, ge=1)

    @property
    def cached_code(self) -> str:
        """The name of the compiled code on the disk that this run shows to exist; empty for other runs."""
        if not self.kind.speed.startswith(_CACHED):
            return ""
        return hashlib.sha256(f"{self.kind!r} {self.flops!r}".encode()).hexdigest()[:16]


History = Sequence[Run]


def runs_of(
    planned: ExecutionPlan,
    final: ExecutionPlan,
    spec: ModelSpec,
    machine: Machine,
    timings: Mapping[str, float],
    peaks: Mapping[str, int],
    *,
    loaded: bool = False,
) -> list[Run]:
    """Return a job's measurements by component, without components that fell back.

    Args:
        planned: the plan at the start of the job.
        final: the plan at its end, fallbacks included.
        timings: seconds without loading, by stage; of components of the encode stage, by component.
        peaks: peak bytes by the same names, minus what was allocated before the job; only those without other jobs'
            memory.
        loaded: see `Run`.
    """
    workload, strategy = Workload.of(planned, spec), planned.strategy
    calls, uncorrected, runs = calls_of_plan(planned), stages(workload, strategy), []
    components = planned.model_components  # of the upscaler: `planner.upscaling.run_of`
    for name in dict.fromkeys("transformer" if is_transformer(part) else part for part in components):
        alike = [stage for stage in uncorrected if stage.component == name or _both_experts(stage.component, name)]
        parts = [planned.components[stage.component] for stage in alike]
        speed = engine_tag(parts[0], planned.speed, name)
        degraded = history_tag(planned.speed, name) != history_tag(final.speed, name)
        mixed = len({(part.backend, part.in_blocks, part.dtype, part.quantization) for part in parts}) > 1
        fell_back = any(final.components[s.component].backend != planned.components[s.component].backend for s in alike)
        if degraded or mixed or fell_back:
            continue
        largest = max(alike, key=lambda stage: stage.peak_bytes)
        # With several GPUs, memory that each process had allocated before the job is unknown.
        alone = largest.stage == "encode" or name in {LATENT_UPSAMPLER, *SOUND_DECODERS}
        measured = name if alone else largest.stage
        peak = peaks.get(measured) if planned.split is None else None
        kind = Kind(
            device=placement.devices_name(device_name(machine, parts[0].device), planned.split, name),
            model=architecture(spec),
            component=name,
            backend=parts[0].backend,
            dtype=parts[0].dtype,
            quantization=parts[0].quantization,
            offload=strategy.offload,
            tile=tile_of(strategy, name),
            step_cache=cache_of(planned.step_cache, planned.guidance_cache, name),
            speed=speed,
        )
        runs.append(
            Run(
                kind=kind,
                flops=workload.flops(name, strategy.decode_tile),
                seconds=timings.get(measured, 0.0) / sum(calls[stage.component] for stage in alike),
                # Offloaded by layer, a text encoder needs no more than its embedding.
                working_bytes=max(largest.working_bytes, 1),
                excess_bytes=None if peak is None else baseline_bytes(workload.device) + peak - largest.peak_bytes,
                loaded=loaded and not workload.cuda,
            )
        )
    return runs


def _both_experts(first: str, second: str) -> bool:
    """Return whether both components are transformers; they have the same architecture."""
    return is_transformer(first) and is_transformer(second)


def calls_of(
    steps: int,
    guidance_scale: float,
    guidance_scale_2: float | None,
    expert_steps: Mapping[str, int],
    sections: int = 1,
    prompts: int = 1,
    guidance_passes: int = 2,
    refining: tuple[int, float] | None = None,
    encoded: int = 1,
    *,
    suppresses: bool = False,
) -> dict[str, float]:
    """Return the number of calls of each component for one clip.

    Args:
        steps: of each section, those that run.
        prompts: different ones of all sections.
        expert_steps: steps of each transformer that are computed; if empty, all are, divided evenly.
        guidance_passes: passes of a step with guidance.
        refining: of a video in two stages, the steps of the second one, and the operations of a pass in the first as a
            share of those in the second; calls of the transformer are those in the second that take as long.
        encoded: how often what steers a clip is encoded: once for each segment.
        suppresses: whether passes without guidance attend to the negative prompt.
    """
    scales = {"transformer": guidance_scale}
    if guidance_scale_2 is not None:
        scales["transformer_2"] = guidance_scale_2
    guided = [name for name, scale in scales.items() if scale > 1]
    passes = {name: guidance_passes if name in guided else 1 for name in scales}
    experts = {name: sections * count * expert_steps.get(name, steps / len(scales)) for name, count in passes.items()}
    images = float(encoded)
    if refining is not None:
        steps_after, share = refining
        experts = {name: share * count + steps_after for name, count in experts.items()}
        images += _FIRST_STAGE_PIXELS
    texts = dict.fromkeys(("text_encoder", "text_encoder_2", CONNECTORS), prompts + (bool(guided) or suppresses))
    once = dict.fromkeys((LATENT_UPSAMPLER, *SOUND_DECODERS), 1)
    return {**texts, IMAGE_ENCODER: 1, VAE_ENCODER: images, **experts, "vae": sections, **once}


def calls_of_plan(plan: ExecutionPlan) -> dict[str, float]:
    """Return `calls_of` a plan."""
    computed = computed_steps(plan.step_cache, plan.expert_steps, plan.mag_ratios)
    return calls_of(
        plan.denoising_steps,
        plan.guidance_scale,
        plan.guidance_scale_2,
        computed,
        plan.sections,
        plan.prompts,
        plan.guidance_passes,
        None if plan.refinement is None else (len(plan.refinement.levels), plan.refinement.cost),
        plan.sections if plan.face is not None else 1,
        suppresses=plan.nag > NO_NAG,
    )


def history_tag(speed: Speed, component: str) -> str:
    """Return `Kind.speed`: the options of `Speed` that change a component's latency, as text; empty for none."""
    if component == "vae":
        options = {"compiled": speed.vae_kernels, "channels last": speed.channels_last}
    elif not is_transformer(component):
        return ""
    else:
        kernel = {} if speed.attention == "native" else {speed.attention: True}
        if speed.sparse_tau is not None:
            kernel[f"{SOL}:{speed.sparse_tau:g}"] = True
        if speed.nag > NO_NAG:
            kernel["nag"] = True
        options = {"compiled": speed.compiled, **kernel, "paired": speed.paired, "graphed": speed.graphed}
        options["int8"] = speed.int8_kernels
    return " ".join(name for name, used in options.items() if used)


def engine_tag(part: ComponentPlan, speed: Speed, component: str) -> str:
    """Return `Kind.speed` of a component as planned: the options apply to what PyTorch computes."""
    if part.on_engine:
        return whole_tag(part.engines)
    return blocks_tag(speed) if part.in_blocks else history_tag(speed, component)


def whole_tag(uses: Sequence[EngineRef]) -> str:
    """Return `Kind.speed` of a component on engines of its own: engines of another builder or precision differ."""
    return f"{uses[-1].builder} {uses[-1].precision}"


def blocks_tag(speed: Speed) -> str:
    """Return `Kind.speed` of a transformer on block engines, between which PyTorch computes the attention."""
    return f"blocks {history_tag(speed.replace(compiled=False, paired=False), 'transformer')}".strip()


def device_name(machine: Machine, device: str) -> str:
    """Return the name of a device in the history."""
    if device.startswith("cuda"):
        return machine.gpu_of(device).name
    return f"{machine.cpu}, {machine.cores} cores"


def tile_of(strategy: MemoryStrategy, component: str) -> str:
    """Return `Kind.tile`; empty for all components but the VAE's."""
    tiled = component in {"vae", VAE_ENCODER} and strategy.decode_tile is not None
    return str(strategy.decode_tile) if tiled else ""


def cache_of(step_cache: str, guidance_cache: str, component: str) -> str:
    """Return `Kind.step_cache`; empty for all components but the transformers.

    A step cache whose calls are known is left out: only computed passes count, see `calls_of`.
    """
    if not is_transformer(component):
        return ""
    steps = "" if step_cache == NONE or is_scheduled(step_cache) else step_cache
    return f"{steps} {'' if guidance_cache == OFF else f'guidance:{guidance_cache}'}".strip()


def architecture(spec: ModelSpec) -> str:
    """Return a short digest of the properties that determine a model's memory and operations."""
    # Without the encoder that only videos from videos use: it changes nothing for others.
    parts = [item for item in sorted(spec.parameters.items()) if item[0] != VAE_ENCODER or spec.image_input is not None]
    return _digest((spec.transformer, spec.vae, tuple(parts), spec.expand_timesteps))


@lru_cache(maxsize=256)  # a plan asks for the same one hundreds of times
def _digest(properties: Hashable) -> str:
    return hashlib.sha256(repr(properties).encode()).hexdigest()[:16]


def seconds_per_call(history: History, kind: Kind, flops: float) -> Seconds | None:
    """Return the seconds of one call, scaled by operations from the run nearest in size; `None` if there is none.

    They are measured if the run had the same size and was not loaded, else inferred.
    """
    timed = [run for run in history if run.seconds]
    run = _nearest([run for run in timed if not run.loaded], kind, flops) or _nearest(timed, kind, flops)
    if run is None:
        return None
    seconds = run.seconds * flops / run.flops
    measured = not run.loaded and _distance(run, flops) < _SAME_RATIO
    low, high = _MEASURED if measured else _SCALED
    return Seconds(seconds, low * seconds, high * seconds, measured, inferred=not measured)


def newer(before: Run | None, run: Run) -> Run:
    """Return what to keep of two runs of the same kind and size; without a measured peak, memory is that of `before`.

    A loaded run does not replace the seconds of one that was not, unless it was faster all the same.
    """
    if before is None:
        return run
    run = run.replace(jobs=before.jobs + run.jobs)
    if not run.seconds:
        run = run.replace(seconds=before.seconds, loaded=before.loaded)
    if run.excess_bytes is None:
        run = run.replace(working_bytes=before.working_bytes, excess_bytes=before.excess_bytes)
    if run.loaded and before.seconds and not run.seconds < before.seconds:
        run = run.replace(seconds=before.seconds, loaded=before.loaded)
    return run


def attention_seconds(history: History, device: str, dtype: str, flops: float) -> dict[str, Seconds]:
    """Return the seconds of one attention call of `flops` operations, for each kernel measured on a device."""
    kernels = {run.kind.backend for run in history if run.kind.component == ATTENTION}
    calls = {name: seconds_per_call(history, attention_kind(device, dtype, name), flops) for name in kernels}
    return {name: seconds for name, seconds in calls.items() if seconds is not None}


def attention_kind(device: str, dtype: str, name: str) -> Kind:
    """Return the kind of a measured attention kernel, one of `request.ATTENTIONS`."""
    return Kind(
        device=device, model="", component=ATTENTION, backend=name, dtype=dtype, quantization="none", offload="none"
    )


class CompileSeconds(NamedTuple):
    """How long compiling takes on this machine.

    Attributes:
        fresh: measured without the cache on the disk; `None` if it was not.
        cached: measured with it; `None` if it was not.
        on_disk: whether the cache has the code of this clip.
    """

    fresh: float | None
    cached: float | None
    on_disk: bool


class CompiledCode(NamedTuple):
    """What the time of compiling depends on; see `compiled_code`."""

    kind: Kind
    flops: float
    options: str

    @property
    def in_cache(self) -> Kind:
        """The kind of compilations from the cache."""
        return self.kind.replace(speed=f"{_CACHED} {self.options}".rstrip())


def compiled_code(
    workload: Workload, machine: Machine, backends: Mapping[str, str], quantization: str, speed: Speed
) -> CompiledCode:
    """Return what is compiled for a clip: blocks of transformers that PyTorch alone computes, and the VAE's kernels.

    Args:
        backends: by component, without transformers whose blocks are not compiled; those of block engines count as
            engines.
        quantization: of the transformers.
        speed: with these options. They change the code, as the size does.
    """
    in_pytorch = [name for name, backend in backends.items() if is_transformer(name) and backend == PYTORCH]
    name = in_pytorch[0] if in_pytorch else "vae"
    device = device_name(machine, workload.device)
    options = {"text": speed.text_kept and bool(in_pytorch), "fused": speed.fused and bool(in_pytorch)}
    kind = Kind(
        device=device if not workload.cuda else f"{device}, {machine.cores} cores",
        model=architecture(workload.spec),
        component=_COMPILING if in_pytorch else _COMPILING_VAE,
        backend=f"{PYTORCH} {machine.torch_version}",
        dtype=workload.dtypes[name],
        quantization=quantization if in_pytorch else "none",
        offload="none",
    )
    tags = [
        history_tag(speed.replace(compiled=True, vae_kernels=True), name),
        *(option for option, used in options.items() if used),
    ]
    return CompiledCode(kind, workload.flops(name), " ".join(tags))


def compilation_runs(
    plan: ExecutionPlan, spec: ModelSpec, machine: Machine, seconds: float, *, cached: bool
) -> list[Run]:
    """Return the runs that record how long a job's code took to compile, and that it is in the cache now.

    Args:
        cached: whether it came from the cache.
    """
    parts = plan.components.items()
    backends = {name: part.backend for name, part in parts if plan.speed.compiled or not is_transformer(name)}
    code = compiled_code(Workload.of(plan, spec), machine, backends, plan.strategy.quantization, plan.speed)
    run = Run(kind=code.in_cache, flops=code.flops, seconds=seconds, working_bytes=1, excess_bytes=None)
    if cached:
        return [run]
    return [run.replace(kind=code.kind, flops=_ANY_SIZE), run.replace(seconds=0.0)]


def compile_seconds(history: History, code: CompiledCode) -> CompileSeconds:
    """Return how long compiling takes: in the last job without the cache, of any size, and in the last one with it."""
    fresh = [run.seconds for run in history if run.kind == code.kind]
    from_cache = [run for run in history if run.kind == code.in_cache]
    here = [run for run in from_cache if _distance(run, code.flops) < _SAME_RATIO]
    timed = [run.seconds for run in (*from_cache, *here) if run.seconds]
    return CompileSeconds(fresh[-1] if fresh else None, timed[-1] if timed else None, bool(here))


def clips_made(history: History, workload: Workload) -> int:
    """Return how many clips of a model's architecture and of a size this machine has made, with any settings."""
    model, flops = architecture(workload.spec), workload.flops("transformer")
    return sum(
        run.jobs
        for run in history
        if (run.kind.component, run.kind.model) == ("transformer", model) and _distance(run, flops) < _SAME_RATIO
    )


def corrected_by_history(history: History, kind: Kind, flops: float, stage: StageMemory) -> StageMemory:
    """Return a stage's memory, corrected by the excess of the run nearest in size.

    A positive excess scales with the working set.
    """
    run = _nearest([run for run in history if run.excess_bytes is not None], kind, flops)
    if run is None or run.excess_bytes is None:
        return stage
    scale = max(stage.working_bytes, 1) / run.working_bytes if run.excess_bytes > 0 else 1.0
    return corrected(stage, int(run.excess_bytes * scale))


def _nearest(history: History, kind: Kind, flops: float) -> Run | None:
    alike = [run for run in history if run.kind == kind and _distance(run, flops) <= _MAX_RATIO]
    return min(alike, key=lambda run: _distance(run, flops), default=None)


def _distance(run: Run, flops: float) -> float:
    return max(run.flops / flops, flops / run.flops)
