"""Resolves a request into a plan without "auto" values, with a reason for every decision.

A pure function of request, model, machine, engines and history: no torch, no disk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from runtime.core.errors import InvalidRequestError, MachineError, MemoryShortError
from runtime.core.facts import Fact
from runtime.core.images import MIDDLE
from runtime.core.plan import PYTORCH, ComponentPlan, ExecutionPlan, Refinement, Split, default_crf, skipped_steps
from runtime.core.request import (
    ALL,
    AUTO,
    CONTROL_VIDEOS,
    FINISHERS,
    IDLE,
    NO_NAG,
    OFF,
    SOUND_DECODERS,
    STRENGTH,
    Auto,
    GenerationRequest,
    random_seed,
)
from runtime.core.step_cache import (
    MAGCACHE,
    NONE,
    computed_steps,
    interpolated,
    is_scheduled,
    kind_of,
    with_strength,
)
from runtime.machine.compatibility import cuda_problem
from runtime.machine.probe import Machine, seen_from
from runtime.models.spec import VAE_ENCODER, ModelSpec, is_transformer
from runtime.planner import clip, constraints, execution_options, memory_model, placement
from runtime.planner.choice.component_choice import Choice
from runtime.planner.choice.engine_offers import ComponentOffers, EngineOffer, Offers, PyTorchPath, no_offers
from runtime.planner.choice.idle_builds import plan_without_waiting
from runtime.planner.choice.plan_choice import PlanForecast, choose_engines
from runtime.planner.forecast import ForecastInputs, component_seconds, level, reading_seconds
from runtime.planner.history import History, calls_of
from runtime.planner.interpolation import with_interpolation
from runtime.planner.memory_model import DTYPE_BYTES
from runtime.planner.placement import place
from runtime.planner.preprocessing import with_preprocessor
from runtime.planner.strategies import decide
from runtime.planner.upscaling import with_upscaler

Number = TypeVar("Number", int, float)


class PlanningContext(NamedTuple):
    """Where and with what a request is planned.

    Attributes:
        output: the MP4 to write.
        offers: existing engines and those that can be built, see `engines.service`.
        history: measurements of earlier jobs, which correct the forecast.
        gpu: index of the GPU to use, if the machine has GPUs.
        others: indices of more GPUs that it may use; `None` for all usable ones.
        compares: whether engines are looked up for what is requested in PyTorch too, so that its forecast is comparable
            with theirs. It needs the digest of the component's weights.
        long_lived: whether one process makes the clip and later ones, as in the web app: compiled code is loaded once.
        idle_builds: whether a process that makes later clips prepares them when no video waits, although the request
            does not say so: it builds engines of small models on a CPU, where all that were measured are faster than
            PyTorch, and compiles code for a GPU.
    """

    machine: Machine
    output: Path
    offers: Offers = no_offers
    history: History = ()
    gpu: int = 0
    others: Sequence[int] | None = None
    compares: bool = False
    long_lived: bool = False
    idle_builds: bool = False


def resolve(
    request: GenerationRequest, spec: ModelSpec, context: PlanningContext, *, builds_later: bool = False
) -> ExecutionPlan:
    """Return the plan of a request.

    Args:
        builds_later: whether engines are built when no video waits instead of first, as with `build="idle"`. Processes
            that do this are long-lived.

    Raises:
        InvalidRequestError: for an unsupported size or length, with the nearest that is supported.
        MachineError: if this machine does not support a requested setting.
        MemoryShortError: if memory does not suffice for any strategy that the request allows.
    """
    if builds_later or request.build == IDLE:
        builds_missing = request.build == IDLE or _builds_by_default(request, spec, context)
        context = context._replace(long_lived=context.long_lived or builds_later)
        return plan_without_waiting(
            request, lambda changed: resolve(changed, spec, context), builds_missing=builds_missing
        )
    _check_supported(request, spec)
    assert request.upscale == AUTO or (request.upscale == OFF) == (spec.upscaler is None), "not the request's upscaler"
    interpolates = spec.interpolates and request.interpolate != OFF
    assert interpolates == (spec.interpolator is not None), "not the request's interpolator: see `models.requested`"
    if "gpus" in spec.unsupported:
        context = context._replace(others=())
    machine = seen_from(context.machine, context.gpu)
    plan = with_interpolation(_on_most_gpus(request, spec, context), spec, machine, context.offers, context.history)
    plan = with_upscaler(plan, spec, machine, context.offers, context.history)
    return plan if plan.preprocessor is None else with_preprocessor(plan, machine, context.history)


def _builds_by_default(request: GenerationRequest, spec: ModelSpec, context: PlanningContext) -> bool:
    """Return whether all missing engines are built when no video waits, although the request does not say so."""
    on_cpu = cuda_problem(seen_from(context.machine, context.gpu)) is not None
    return context.idle_builds and request.build == AUTO and spec.small and on_cpu


def _on_most_gpus(request: GenerationRequest, spec: ModelSpec, context: PlanningContext) -> ExecutionPlan:
    """Return the plan for the GPUs that the request may use, or for one GPU if memory or quality requires it."""
    plan: ExecutionPlan | None = None
    short: MemoryShortError | None = None
    try:
        plan = _resolved(request, spec, context)
        if request.gpus != AUTO or plan.split is None or plan.strategy.quantization in {"none", request.quantization}:
            return plan
    except MemoryShortError as error:
        if request.gpus == 1:
            raise
        short = error
    # With several GPUs weights are never offloaded; with one they may be.
    try:
        alone = _resolved(request.replace(gpus=1), spec, context)
    except MemoryShortError:
        if plan is not None:
            return plan
        assert short is not None
        raise short from None
    if request.gpus == AUTO:
        return alone.replace(warnings=(*alone.warnings, Fact("planner.one_gpu_memory")))
    assert short is not None
    raise MemoryShortError(
        "planner.use_one_gpu",
        cause=short.fact,
        title=alone.forecast.title,
        strategies=short.strategies,
        where=short.where,
    )


def _check_supported(request: GenerationRequest, spec: ModelSpec) -> None:
    """Check that a request has no option that the model's family does not support, and no unknown component.

    Raises:
        InvalidRequestError: naming the first such field.
    """
    for field, off in (("gpus", 1), ("step_cache", NONE), ("guidance_cache", OFF), ("nag", NO_NAG)):
        if field in spec.unsupported and getattr(request, field) not in {AUTO, off}:
            raise InvalidRequestError(field, "family.option_unsupported", option=[field], model=spec.title)
    if request.stages != "1" and spec.refinement is None:
        raise InvalidRequestError("stages", "planner.one_stage_only", model=spec.title)
    if spec.stages > 1 and spec.refinement and not (spec.refinement.distilled or spec.of_stage(1).loras):
        raise InvalidRequestError("stages", "planner.refinement_without_lora", model=spec.title)
    if request.compile == "always" and "compiled" in spec.lacks:
        raise InvalidRequestError("compile", "family.option_unsupported", option=["compile"], model=spec.title)
    # A component that the model has, but not this job, may be named: it needs no backend.
    for name in request.backends:
        components = (*spec.component_names, *sorted(FINISHERS))
        if name != ALL and name not in components:
            raise InvalidRequestError(
                "backends", "planner.no_such_component", model=spec.title, component=name, known=components
            )


@dataclass(frozen=True)
class _Settings:
    """The values of a request's fields without "auto", and what follows from them alone. Names as in `ExecutionPlan`.

    Attributes:
        strength: of the video that this one is made from.
        skipped: the first steps that do not run, because of the strength.
        lora_loads: by transformer, how often its weights are loaded while its steps run, if its LoRAs change meanwhile.
        computed: by expert, the steps that are computed; the others reuse results of earlier ones.
        calls: by component, how often it runs.
        refinement: of a video in two stages.
    """

    width: int
    height: int
    fps: int
    frames: int
    steps: int
    guidance: float
    guidance_2: float | None
    embedded_guidance: float | None
    nag: float
    seed: int
    shift: float | None
    strength: float
    skipped: int
    expert_steps: Mapping[str, int]
    lora_loads: Mapping[str, int]
    prompts: int
    step_cache: str
    mag_ratios: Mapping[str, tuple[float, ...]]
    computed: Mapping[str, int]
    calls: Mapping[str, float]
    refinement: Refinement | None

    @classmethod
    def of(cls, request: GenerationRequest, spec: ModelSpec) -> "_Settings":
        """Return the settings of a request.

        Raises:
            InvalidRequestError: for a size, a length or a shift that the model does not support.
        """
        width, height = clip.size_for(request, spec)
        fps = clip.fps_for(request, spec)
        frames = clip.frames_for(request, spec, fps)
        clip.check_size(spec, width, height, frames)
        clip.check_keyframes(request, spec, frames, fps)
        steps = _or(request.steps, spec.defaults.steps)
        clip.check_steps(spec, steps)
        guidance, guidance_2, embedded_guidance = _guidance(request, spec)
        if request.guidance_cache != OFF and max(guidance, guidance_2 or 0) <= 1:
            code = "planner.one_pass_only" if spec.embedded_guidance else "planner.no_guidance_to_cache"
            raise InvalidRequestError("guidance_cache", code, model=spec.title)
        nag = _or(request.nag, NO_NAG)
        clip.check_nag(spec, nag, min(guidance, guidance if guidance_2 is None else guidance_2))
        clip.check_shift(request, spec)
        shift = clip.shift_override(request, spec)
        strength = _or(request.strength, STRENGTH)
        skipped = 0 if spec.video is None else skipped_steps(steps, strength)
        clip.check_strength(steps, skipped, strength)
        every_step = clip.expert_steps(spec, steps, shift)
        expert_steps = clip.without_first(every_step, skipped)
        clip.check_weights(request, spec)
        prompts = clip.count_prompts(request, spec, frames, fps)
        step_cache, mag_ratios, computed = _cached_steps(request, spec, every_step, expert_steps)
        refinement = _refinement(spec, frames, height, width)
        ran = expert_steps or {"transformer": steps - skipped}
        lora_loads = clip.lora_loads(spec, ran, spec.sections(frames), step_cache)
        return cls(
            width=width,
            height=height,
            fps=fps,
            frames=frames,
            steps=steps,
            guidance=guidance,
            guidance_2=guidance_2,
            embedded_guidance=embedded_guidance,
            nag=nag,
            seed=random_seed() if request.seed == AUTO else request.seed,
            shift=shift,
            strength=strength,
            skipped=skipped,
            expert_steps=expert_steps,
            lora_loads=lora_loads,
            prompts=prompts,
            step_cache=step_cache,
            mag_ratios=mag_ratios,
            computed=computed,
            calls=calls_of(
                steps - skipped,
                guidance,
                guidance_2,
                computed,
                spec.sections(frames),
                prompts,
                spec.guidance_passes,
                None if refinement is None else (len(refinement.levels), refinement.cost),
                1 if spec.segment_frames is None else spec.sections(frames),
                suppresses=nag > NO_NAG,
            ),
            refinement=refinement,
        )

    @property
    def denoising_steps(self) -> int:
        """The steps that run."""
        return self.steps - self.skipped


@dataclass(frozen=True, kw_only=True)
class _Placed:
    """A request on its devices, before engines and a strategy are chosen.

    Attributes:
        dtypes: by component, of what PyTorch computes.
        free_bytes: of the device with the least.
        offered: returns the engines for a component.
        long_lived: see `PlanningContext`.
        compiles_when_idle: see `ForecastInputs`.
    """

    request: GenerationRequest
    spec: ModelSpec
    settings: _Settings
    machine: Machine
    history: History
    device: str
    dtypes: Mapping[str, str]
    free_bytes: int
    split: Split | None
    offload: str
    offered: ComponentOffers
    long_lived: bool
    compiles_when_idle: bool

    def decide(self, choices: Mapping[str, Choice], paths: Mapping[str, PyTorchPath]) -> PlanForecast:
        """Return the forecasts and the strategy with these engines."""
        settings = self.settings
        decodes = self.split is not None and self.split.decode and not choices["vae"].engines
        workload = replace(
            _workload(self.spec, self.device, _with_precisions(self.dtypes, choices), choices, settings),
            split=None if self.split is None else self.split.replace(decode=decodes),
            cached_tensors=memory_model.cached_tensors(
                self.spec, settings.step_cache, settings.guidance, settings.guidance_2
            ),
        )
        inputs = ForecastInputs(
            request=self.request,
            workload=workload,
            calls=settings.calls,
            machine=self.machine,
            history=self.history,
            backends={name: choice.backend for name, choice in choices.items()},
            free_bytes=self.free_bytes,
            chunk=_decode_chunk(workload, choices["vae"], self.free_bytes),
            guided=max(settings.guidance, settings.guidance_2 or 0) > 1,
            nag=settings.nag,
            loads=settings.lora_loads,
            step_cache=settings.step_cache,
            long_lived=self.long_lived,
            compiles_when_idle=self.compiles_when_idle,
            offers={name: self.offered(name) for name in choices},
            levels={
                name: level(choice.offer, paths[name])
                for name, choice in choices.items()
                if choice.offer is not None and name in paths
            },
            scaled=frozenset(
                name for name, choice in choices.items() if choice.offer is not None and choice.offer.scaled
            ),
        )
        base = execution_options.shared_options(inputs)
        workload = replace(workload, text_bytes=base.text_bytes, working_sets=memory_model.working_sets(base))
        inputs = replace(inputs, workload=workload, base=base)
        clip_data = {"width": settings.width, "height": settings.height, "frames": settings.frames}
        described = Fact("planner.clip", {"model": self.spec.title, **clip_data})
        return PlanForecast(inputs, decide(inputs, self.offload, self.request.quantization, described))


def _resolved(request: GenerationRequest, spec: ModelSpec, context: PlanningContext) -> ExecutionPlan:
    assert spec.stages == int(request.stages), "a spec in another number of stages: see `models.requested`"
    own_loras = 0 if spec.variant is None else len(spec.variant.loras)
    assert 0 <= len(spec.loras) - len(request.loras) <= own_loras, "a spec without its LoRAs: see `models.requested`"
    assert len(request.references) == len(spec.references), "a spec without its request's reference images"
    assert len(request.keyframes) == len(spec.keyframes), "a spec without its request's keyframes"
    for field in ("image", "last_image", "extend", "join", "video", *CONTROL_VIDEOS):
        # An extended video's last frame is the image, and a loop's image is the last one.
        follows = (field == "image" and request.extend is not None) or (field == "last_image" and request.loop != OFF)
        missing = not follows and (getattr(request, field) is None) != (getattr(spec, field) is None)
        assert not missing, "a spec without its request's images and video: see `models.requested`"
    if not spec.inputs and not (spec.image_input is not None and spec.image_input.required):
        spec = spec.for_text()
    machine = seen_from(context.machine, context.gpu)
    settings = _Settings.of(request, spec)
    device, dtypes, reason, free = place(spec, machine, context.gpu, request.vae_precision)
    latent_size = spec.latent_shape(settings.frames, settings.height, settings.width)[2:]
    sound = spec.sound_latents
    sound_size = None if sound is None else (sound.shape(settings.frames, settings.fps)[2], 1, 1)

    @cache
    def offered(component: str) -> Sequence[EngineOffer]:
        left_out = request.backend(component) == PYTORCH and not context.compares
        size = sound_size if component in SOUND_DECODERS and sound_size is not None else latent_size
        if component == "vae":
            size = (size[0] - spec.leading_latents, *size[1:])
        return () if left_out else context.offers(component, size, device)

    guided = settings.guidance > 1 and (settings.guidance_2 is None or settings.guidance_2 > 1)
    # GPUs for further passes would be idle in steps without these, so all share each pass: where passes are left out,
    # and with a second stage, which has no guidance.
    guided = guided and request.guidance_cache == OFF and settings.refinement is None
    passes = spec.guidance_passes if guided else 1
    split, split_warnings = placement.decide(
        request, spec, context.machine, context.gpu, context.others, passes=passes, offered=offered
    )
    offload, offload_warnings = _offload(request, machine)
    _check_step_cache(request, machine, offload)
    _check_quantization(request, machine, spec)
    execution_options.check_compile(request.compile, offload, request.quantization, machine)
    placed = _Placed(
        request=request,
        spec=spec,
        settings=settings,
        machine=machine,
        history=context.history,
        device=device,
        dtypes=dtypes,
        free_bytes=placement.free_bytes_of_fullest(split, context.machine, free),
        split=split,
        offload=offload,
        offered=offered,
        long_lived=context.long_lived,
        # Sections and several GPUs run in loops and processes of their own.
        compiles_when_idle=context.long_lived and context.idle_builds and split is None and spec.section is None,
    )
    component_settings = constraints.ComponentSettings(
        component="",
        backend=PYTORCH,
        device=device,
        offload=offload,
        gpus=1 if split is None else len(split.devices),
        step_cache=request.step_cache,
        attention=request.attention,
        nag=settings.nag > NO_NAG,
        ranges=frozenset(name for use in spec.loras if use.has_range for name in spec.changed_by(use)),
    )
    choices, planned = choose_engines(request, spec, machine, component_settings, reason, offered, placed.decide)
    return _plan(settings, choices, planned, context.output, (*split_warnings, *offload_warnings))


def _plan(
    settings: _Settings, choices: Mapping[str, Choice], planned: PlanForecast, output: Path, warnings: tuple[Fact, ...]
) -> ExecutionPlan:
    """Return the plan with the chosen engines and strategy.

    Args:
        warnings: of the placement on devices.
    """
    inputs, decision = planned
    request, workload = inputs.request, inputs.workload
    spec, split = workload.spec, workload.split
    chosen, strategy = decision.chosen, decision.chosen.strategy
    if split is not None and strategy.decode_tile is not None:
        split = split.replace(decode=False)
    return ExecutionPlan(
        prompt=request.prompt,
        negative_prompt=(spec.defaults.negative_prompt if request.negative_prompt is None else request.negative_prompt),
        model=request.model,
        width=settings.width,
        height=settings.height,
        frames=settings.frames,
        fps=settings.fps,
        steps=settings.steps,
        guidance_scale=settings.guidance,
        guidance_scale_2=settings.guidance_2,
        embedded_guidance=settings.embedded_guidance,
        seed=settings.seed,
        shift=settings.shift,
        step_cache=settings.step_cache,
        mag_ratios=settings.mag_ratios,
        guidance_cache=request.guidance_cache,
        nag=settings.nag,
        loras=spec.loras,
        crf=default_crf(settings.width, settings.height) if request.crf == AUTO else int(request.crf),
        image=spec.image,
        last_image=spec.last_image,
        keyframes=spec.keyframes,
        keyframe_seconds=request.keyframe_seconds,
        image_fit=request.image_fit,
        image_position=_or(request.image_position, MIDDLE),
        loop=request.loop,
        sound=spec.sound is not None and request.sound != OFF,
        extend=spec.extend,
        extend_frames=spec.extend_frames,
        join=spec.join,
        video=spec.video,
        strength=settings.strength,
        control=spec.control,
        face=spec.face,
        background=spec.background,
        mask=spec.mask,
        outpaint=spec.outpaint,
        control_start=request.control_second,
        references=spec.references,
        control_scale=request.control_scale,
        preprocess=request.preprocess,
        preprocessor=spec.preprocessor,
        stages=request.stages,
        request=request,
        model_directory=spec.location,
        model_version=spec.version,
        output=output,
        latent_shape=workload.latent_shape,
        leading_latents=spec.leading_latents,
        tokens=workload.tokens,
        sections=workload.sections,
        prompts=settings.prompts,
        components=_components(settings, choices, planned, split),
        strategy=strategy,
        split=split,
        speed=chosen.speed,
        expert_steps=settings.expert_steps,
        shift_reason=clip.shift_reason(settings.shift, spec),
        guidance_reason=clip.guidance_reason(request, spec),
        step_flops=_step_flops(settings, workload),
        decode_flops=workload.sections * workload.flops("vae", strategy.decode_tile),
        free_bytes=inputs.free_bytes,
        memory=chosen.memory,
        seconds=chosen.seconds,
        strategies=decision.forecasts,
        warnings=(*_warnings(settings, request, spec), *warnings, *decision.warnings),
        sound_shape=workload.sound_shape,
        guidance_passes=spec.guidance_passes,
        refinement=settings.refinement,
    )


def _refinement(spec: ModelSpec, frames: int, height: int, width: int) -> Refinement | None:
    """Return the first stage of a clip in two stages, and the levels of the second; `None` for one stage."""
    if spec.stages == 1:
        return None
    assert spec.refinement is not None
    half = frames, height // 2, width // 2
    tokens, text = spec.tokens(*half), spec.max_sequence_length
    flops = spec.transformer.forward_flops
    return Refinement(
        width=width // 2,
        height=height // 2,
        latent_shape=spec.latent_shape(*half),
        tokens=tokens,
        levels=spec.refinement.levels,
        cost=flops(tokens, text) / flops(spec.tokens(frames, height, width), text),
    )


def _step_flops(settings: _Settings, workload: memory_model.Workload) -> float:
    """Return the operations of one step, on average."""
    passes = sum(calls for name, calls in settings.calls.items() if is_transformer(name))
    forward = workload.spec.transformer.forward_flops(workload.tokens, workload.spec.max_sequence_length)
    more = 0 if settings.refinement is None else len(settings.refinement.levels)
    return forward * passes / (settings.denoising_steps * workload.sections + more)


def _warnings(settings: _Settings, request: GenerationRequest, spec: ModelSpec) -> list[Fact]:
    """Return the warnings about the clip and its settings."""
    width, height, steps = settings.width, settings.height, settings.steps
    return [
        *clip.size_warnings(request, spec, width, height, settings.frames),
        *clip.image_warnings(request, spec, width, height),
        *clip.video_warnings(request, spec, settings.frames, settings.fps),
        *clip.lora_warnings(request, spec, steps, max(settings.guidance, settings.guidance_2 or 0)),
        *clip.shift_warnings(spec, steps, settings.shift, clip.expert_steps(spec, steps, settings.shift)),
        *clip.unused_warnings(request, spec, max(settings.guidance, settings.guidance_2 or 0)),
    ]


def _components(
    settings: _Settings,
    choices: Mapping[str, Choice],
    planned: PlanForecast,
    split: Split | None,
) -> dict[str, ComponentPlan]:
    inputs, chosen = planned.inputs, planned.decision.chosen
    workload, strategy = inputs.workload, chosen.strategy
    spec, dtypes, quantization = workload.spec, workload.dtypes, strategy.quantization
    weights = memory_model.weights_bytes(spec, dtypes, quantization) | dict(workload.engine_bytes)
    quantized = {name for name in choices if is_transformer(name) and name not in workload.engine_bytes}
    return {
        name: ComponentPlan(
            backend=choices[name].backend,
            device=workload.device,
            dtype=dtypes[name],
            weights_bytes=weights[name],
            reasons=(
                *choices[name].reasons,
                *_video_reason(name, settings, inputs.request, spec),
                *_cache_reason(name, settings.step_cache, settings.expert_steps, settings.computed),
                *_guidance_cache_reason(name, settings, inputs.request),
                *_nag_reason(name, settings),
                *_ranges_reason(name, settings, inputs),
                *placement.reasons(split, name),
            ),
            engines=choices[name].engines,
            badge=choices[name].badge,
            quantization=quantization if name in quantized else "none",
            seconds=component_seconds(inputs, strategy, name, chosen.speed),
            compared=choices[name].compared,
        )
        for name in spec.component_names
    }


def _or(value: Number | Auto, default: Number) -> Number:
    return default if isinstance(value, str) else value


def _with_precisions(dtypes: Mapping[str, str], choices: Mapping[str, Choice]) -> dict[str, str]:
    """Return the dtypes of what PyTorch computes: between block engines it is their precision."""
    precisions = {name: choice.engines[0].precision for name, choice in choices.items() if choice.in_blocks}
    return {name: precisions[name] if precisions.get(name) in DTYPE_BYTES else dtype for name, dtype in dtypes.items()}


def _workload(
    spec: ModelSpec, device: str, dtypes: Mapping[str, str], choices: Mapping[str, Choice], settings: _Settings
) -> memory_model.Workload:
    width, height, frames = settings.width, settings.height, settings.frames
    offers = {name: choice.offer for name, choice in choices.items() if choice.offer is not None}
    whole = {name: offer for name, offer in offers.items() if not offer.in_blocks}
    precisions = {name: offer.engines[-1].precision for name, offer in whole.items()}
    weights = memory_model.weights_bytes(spec, {**dtypes, **precisions})
    return memory_model.Workload(
        spec=spec,
        device=device,
        dtypes=dtypes,
        # An engine to be built will have about the size of its weights; Inductor's files do not contain them.
        engine_bytes={name: max(offer.file_bytes, weights[name]) for name, offer in whole.items()},
        engine_seconds={name: offer.seconds for name, offer in offers.items() if offer.ready and offer.seconds},
        engines={name: offer.engines for name, offer in offers.items()},
        tokens=spec.tokens(frames, height, width),
        latent_shape=spec.latent_shape(frames, height, width),
        sound_shape=None if spec.sound_latents is None else spec.sound_latents.shape(frames, settings.fps),
        sections=spec.sections(frames),
        height=height,
        width=width,
    )


def _decode_chunk(workload: memory_model.Workload, vae: Choice, free_bytes: int) -> int:
    if vae.engines:
        # An engine decodes one latent frame per call, so that it serves clips of any length.
        return 1
    return memory_model.decode_chunk(
        workload.spec,
        workload.decoded,
        workload.height,
        workload.width,
        workload.dtypes["vae"],
        workload.device,
        free_bytes,
    )


def _offload(request: GenerationRequest, machine: Machine) -> tuple[str, list[Fact]]:
    """Return the offload and warnings: offload has no effect on the CPU."""
    against = constraints.lacking(request.offload, machine)
    if against is None:
        return request.offload, []
    return "none", [Fact("planner.offload_on_cpu", {"chosen": {"offload": request.offload}, "cause": against.fact})]


def _check_quantization(request: GenerationRequest, machine: Machine, spec: ModelSpec) -> None:
    """Check that this machine and model support the requested quantization; the request may rely on its memory."""
    if request.quantization.startswith("bnb-") and spec.transformer_files:
        title = next(iter(spec.transformer_files.values())).title
        raise InvalidRequestError("quantization", "planner.quantization_of_files", model=spec.title, format=title)
    against = constraints.lacking(request.quantization, machine)
    if against is not None:
        usable = against.fact.code != "machine.no_gpu"
        code = "planner.quantization_unavailable" if usable else "planner.quantization_needs_gpu"
        raise MachineError(code, quantization=request.quantization, cause=against.fact)


def _check_step_cache(request: GenerationRequest, machine: Machine, offload: str) -> None:
    """Check that the offload works with the requested step cache, which is never dropped silently."""
    against = constraints.step_cache_conflict(request.step_cache, offload, machine)
    if against is not None:
        raise against.refusal


def _cached_steps(
    request: GenerationRequest, spec: ModelSpec, every_step: Mapping[str, int], expert_steps: Mapping[str, int]
) -> tuple[str, dict[str, tuple[float, ...]], dict[str, int]]:
    """Return the step cache with its strength, the magnitude ratios that it needs, and `computed_steps`.

    Args:
        every_step: steps of each expert with those that do not run.
        expert_steps: those that run.

    Raises:
        InvalidRequestError: if it needs ratios, and the model has none.
    """
    step_cache, ratios = with_strength(request.step_cache), dict(spec.mag_ratios)
    for name, steps in expert_steps.items():
        if name in ratios and steps < every_step[name]:
            ratios[name] = tuple(interpolated(ratios[name], every_step[name])[every_step[name] - steps :])
    if kind_of(step_cache) != MAGCACHE:
        ratios = {}
    elif not ratios:
        raise InvalidRequestError("step_cache", "planner.no_mag_ratios", model=spec.title, name=spec.name)
    return step_cache, ratios, computed_steps(step_cache, expert_steps, ratios)


def _video_reason(component: str, settings: _Settings, request: GenerationRequest, spec: ModelSpec) -> tuple[Fact, ...]:
    """Return why the encoder has no engine, and why a transformer does not run all steps."""
    if component == VAE_ENCODER and (spec.video is not None or spec.control_input is not None):
        # An engine that was asked for is refused with the same reason.
        return (Fact("planner.no_video_engines"),) if request.backend(component) in {AUTO, PYTORCH} else ()
    if spec.video is None or not is_transformer(component):
        return ()
    data = {"strength": settings.strength, "run": settings.denoising_steps, "steps": settings.steps}
    return (Fact("planner.steps_of_strength", data),)


def _cache_reason(
    component: str, step_cache: str, steps: Mapping[str, int], computed: Mapping[str, int]
) -> tuple[Fact, ...]:
    if step_cache == NONE or not is_transformer(component):
        return ()
    if not is_scheduled(step_cache) or component not in steps:
        return (Fact("planner.step_cached", {"step_cache": step_cache}),)
    data = {"step_cache": step_cache, "computed": computed[component], "steps": steps[component]}
    return (Fact("planner.steps_computed", data),)


def _guidance_cache_reason(component: str, settings: _Settings, request: GenerationRequest) -> tuple[Fact, ...]:
    """Return that passes of a transformer are left out; nothing if it has no guidance."""
    scales = {"transformer": settings.guidance, "transformer_2": settings.guidance_2 or 0}
    if request.guidance_cache == OFF or scales.get(component, 0) <= 1:
        return ()
    return (Fact("planner.guidance_cached", {"strength": float(request.guidance_cache)}),)


def _ranges_reason(component: str, settings: _Settings, inputs: ForecastInputs) -> tuple[Fact, ...]:
    """Return how often a transformer is loaded because its LoRAs change between steps; nothing if they do not."""
    loads = settings.lora_loads.get(component)
    if loads is None:
        return ()
    seconds = reading_seconds(inputs.workload, {component}).likely
    return (Fact("planner.lora_ranges", {"loads": loads, "seconds": seconds}),)


def _nag_reason(component: str, settings: _Settings) -> tuple[Fact, ...]:
    """Return that a transformer's attention to the text is guided; nothing if it is not, or its steps have guidance."""
    scales = {"transformer": settings.guidance, "transformer_2": settings.guidance_2}
    scale = scales.get(component)
    if settings.nag == NO_NAG or scale is None or scale > 1:
        return ()
    return (Fact("planner.nag", {"scale": settings.nag}),)


def _guidance(request: GenerationRequest, spec: ModelSpec) -> tuple[float, float | None, float | None]:
    """Return the fields of the plan: the guidance scale of each transformer, and the embedded one."""
    own_scale, own_second = spec.defaults.guidance(from_image=spec.image is not None)
    scale = _or(request.guidance_scale, own_scale)
    second = _second_guidance(request, spec, scale, own_second)
    return (1.0, second, scale) if spec.embedded_guidance else (scale, second, None)


def _second_guidance(
    request: GenerationRequest, spec: ModelSpec, guidance: float, own_second: float | None
) -> float | None:
    if spec.experts == 1:
        if request.guidance_scale_2 != AUTO:
            raise InvalidRequestError("guidance_scale_2", "planner.no_second_guidance", model=spec.title)
        return None
    if request.guidance_scale_2 != AUTO:
        return float(request.guidance_scale_2)
    # One requested scale applies to both experts; without a request the model's pair applies.
    if request.guidance_scale != AUTO or own_second is None:
        return guidance
    return own_second
