"""Memory strategies, fastest first, each with its forecast: the choice of one, and the fallback after out-of-memory.

Pure. Weights are quantized without a request only if no other strategy fits. Frames are decoded in tiles only if whole
frames do not fit with only the VAE on the device.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from runtime.core.errors import InvalidRequestError, MemoryShortError
from runtime.core.estimates import MemoryStrategy, Seconds, StageMemory, StrategyForecast
from runtime.core.events import OutOfMemory, Stage
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, ExecutionPlan, Speed
from runtime.core.preprocessors import PREPROCESSOR
from runtime.core.request import AUTO, FINISHERS
from runtime.core.tiles import times_decoded
from runtime.models.quantization import FP8
from runtime.models.spec import CONNECTORS, VAE_ENCODER, ModelSpec, is_transformer
from runtime.planner import constraints, execution_options, forecast, memory_model
from runtime.planner.choice.engine_offers import refused
from runtime.planner.execution_options import with_less_memory
from runtime.planner.forecast import ForecastInputs
from runtime.planner.memory_model import Workload

Memory = Literal["VRAM", "RAM"]

# Share of free memory for components that stay loaded, possibly for hours.
_KEEP_SHARE = {"cpu": 0.6, "cuda": 0.9}

# A strategy is replaced by one that was measured to be faster if it takes this many times as long. Less is noise.
_SLOWER = 1.03

# Stands for the backend of existing engines: rules that hold on any machine do not depend on it.
_ANY_ENGINE = "engine"

_KEEP = ("strategy.keep", MemoryStrategy(keep_loaded=True))
_ONE = ("strategy.one_at_a_time", MemoryStrategy())
_MODEL = ("strategy.offload_model", MemoryStrategy(offload="model"))
_GROUP = ("strategy.offload_group", MemoryStrategy(offload="group"))
_SEQUENTIAL = ("strategy.offload_sequential", MemoryStrategy(offload="sequential"))


@dataclass(frozen=True, kw_only=True)
class StrategyCandidate:
    """A strategy with its consequences.

    Attributes:
        seconds: by stage, their "total", and what the total excludes: "load", and its part "compile".
        tight: whether it fits only without the allocator's slack.
        against: why it is not possible with any amount of memory.
        speed: execution options of PyTorch.
    """

    forecast: StrategyForecast
    memory: tuple[StageMemory, ...]
    seconds: Mapping[str, Seconds]
    tight: bool
    against: constraints.Conflict | None
    speed: Speed

    @property
    def strategy(self) -> MemoryStrategy:
        """The strategy of the forecast."""
        return self.forecast.strategy

    @property
    def settings(self) -> tuple[str, str]:
        """The values of offload and quantization that request it."""
        return self.strategy.offload, self.strategy.quantization


@dataclass(frozen=True)
class Decision:
    """The chosen option, the forecasts of all, and warnings."""

    chosen: StrategyCandidate
    forecasts: tuple[StrategyForecast, ...]
    warnings: tuple[Fact, ...]


def _free_text(inputs: ForecastInputs) -> tuple[str, MemoryStrategy]:
    freed = inputs.workload.spec.text_encoders
    return "strategy.free_text_encoder", MemoryStrategy(keep_loaded=True, freed=freed)


def options(inputs: ForecastInputs) -> list[StrategyCandidate]:
    """Return the strategies for the device, fastest first, including those that are not possible on this machine."""
    if not inputs.workload.cuda:
        return [_option(inputs, Fact(code), strategy) for code, strategy in (_KEEP, _ONE)]
    kinds = _kinds(inputs)
    if inputs.workload.split is not None:
        # With several GPUs weights are not offloaded.
        plain = [_option(inputs, Fact(code), strategy) for code, strategy in (_KEEP, _free_text(inputs), _ONE)]
        return [*plain, *(_first_that_fits(_quantized(inputs, kind)) for kind in kinds if kind == FP8)]
    one_at_a_time = (_ONE, _MODEL) if inputs.workload.sections == 1 else (_MODEL, _ONE)
    pairs = (_KEEP, _free_text(inputs), *one_at_a_time, _GROUP)
    plain = [_option(inputs, Fact(code), strategy) for code, strategy in pairs]
    quantized = [_first_that_fits(islice(_quantized(inputs, kind), 3)) for kind in kinds]
    return [*plain, *quantized, _option(inputs, Fact(_SEQUENTIAL[0]), _SEQUENTIAL[1])]


def _with_text_alone(inputs: ForecastInputs, every: list[StrategyCandidate]) -> list[StrategyCandidate]:
    """Return the strategies with one more, where RAM is short: the text encoder is not there with the transformers.

    It is for clips that nothing else fits. Each job loads the transformers again; sections would in each.
    """
    workload = inputs.workload
    group = next((option for option in every if option.settings == (_GROUP[1].offload, "none")), None)
    if group is None or group.forecast.fits_ram or workload.sections > 1:
        return every
    spec = workload.spec
    freed = tuple(name for name in spec.component_names if name in {*spec.text_encoders, CONNECTORS})
    option = _option(inputs, Fact("strategy.offload_group_free_text"), _GROUP[1].replace(freed=freed))
    return [*every, option]


def _kinds(inputs: ForecastInputs) -> list[str]:
    """Return how the transformers' weights may be quantized.

    bitsandbytes quantizes no weights of single files. What is quantized in files is quantized again on request only.
    """
    spec = inputs.workload.spec
    if not spec.transformer_files:
        return list(constraints.QUANTIZATIONS)
    return [FP8] if not spec.is_packed or inputs.request.quantization == FP8 else []


def decide(inputs: ForecastInputs, offload: str, quantization: str, clip: Fact) -> Decision:
    """Choose a strategy.

    Args:
        offload, quantization: as requested, or "auto".
        clip: the clip as a fact, for the error.

    Raises:
        InvalidRequestError: if offload and quantization exclude each other.
        MemoryShortError: if no requested strategy fits, with the first one that does.
    """
    every = options(inputs)
    candidates = _asked(inputs, every, offload, quantization)
    chosen = _first(candidates)
    if chosen is None:
        every = _with_text_alone(inputs, every)
        candidates = _asked(inputs, every, offload, quantization)
        chosen = _first(candidates)
    if chosen is None:
        raise _refusal(inputs, every, candidates, clip)
    if chosen not in every:
        # After the faster ones of the same quantization.
        place = 1 + max(place for place, option in enumerate(every) if option.strategy.quantization == quantization)
        every = [*every[:place], chosen, *every[place:]]
    warnings = []
    if chosen.strategy.decode_tile is not None:
        warnings.append(Fact("planner.decoded_in_tiles", {"side": _tile_pixels(inputs, chosen.strategy.decode_tile)}))
    if quantization == AUTO and _is_quantized(chosen):
        warnings.append(Fact("planner.quantized", {"quantization": chosen.strategy.quantization}))
    if chosen.tight:
        warnings.append(Fact("planner.memory_tight", {"peak": chosen.forecast.peak_bytes, "free": inputs.free_bytes}))
    return Decision(chosen, _forecasts(inputs, every, chosen), tuple(warnings))


def _first(options: list[StrategyCandidate]) -> StrategyCandidate | None:
    """Return the option to use: unquantized first, and the least tight one only if all are tight.

    Of those that give the same video, the order is from fast to slow. One that was measured here to be faster than the
    first comes before it.
    """
    fitting = sorted(filter(_fits, options), key=_is_quantized)
    roomy = next((option for option in fitting if not option.tight), None)
    if roomy is None:
        return min(fitting, key=lambda option: _needs(option.memory), default=None)
    measured = [option for option in fitting if not option.tight and _same_video(option, roomy)]
    fastest = min((option for option in measured if _total(option).measured), key=_seconds, default=roomy)
    return fastest if _total(roomy).measured and _seconds(roomy) > _SLOWER * _seconds(fastest) else roomy


def _same_video(one: StrategyCandidate, other: StrategyCandidate) -> bool:
    """Return whether two strategies differ in nothing that changes the video."""
    first, second = one.strategy, other.strategy
    return (first.quantization, first.decode_tile) == (second.quantization, second.decode_tile)


def _total(option: StrategyCandidate) -> Seconds:
    return option.seconds["total"]


def _seconds(option: StrategyCandidate) -> float:
    return _total(option).likely


def _forecasts(
    inputs: ForecastInputs, every: list[StrategyCandidate], chosen: StrategyCandidate | None
) -> tuple[StrategyForecast, ...]:
    """Return all forecasts, with whether a request for its settings selects each."""
    forecasts = []
    for option in every:
        excluded = _excluded(inputs, *option.settings)
        first = _first([candidate for candidate in every if candidate.settings == option.settings])
        forecasts.append(
            option.forecast.replace(
                offered=option == first and not excluded,
                lacks=None if option == chosen else option.forecast.lacks or excluded,
            )
        )
    return tuple(forecasts)


def _excluded(inputs: ForecastInputs, offload: str, quantization: str) -> Fact | None:
    """Return why a strategy excludes a requested backend, `None` if it does not."""
    for name in filter(is_transformer, inputs.backends):
        backend = inputs.request.backend(name)
        if backend not in {AUTO, PYTORCH}:
            case = constraints.ComponentSettings(
                component=name, backend=backend, offload=offload, quantization=quantization
            )
            against = refused(backend, inputs.offers.get(name, ()), case, inputs.machine)
            if against is not None:
                return against.fact
    return None


def _suits_engines(workload: Workload, strategy: MemoryStrategy) -> bool:
    """Return whether the engines of the transformers work with a strategy."""
    for name, uses in workload.engines.items():
        case = constraints.ComponentSettings(
            component=name,
            backend=_ANY_ENGINE,
            precision=uses[-1].precision,
            offload=strategy.offload,
            quantization=strategy.quantization,
            in_blocks=workload.in_blocks(name),
        )
        if is_transformer(name) and constraints.conflict(case, None) is not None:
            return False
    return True


def _asked(
    inputs: ForecastInputs, every: list[StrategyCandidate], offload: str, quantization: str
) -> list[StrategyCandidate]:
    if quantization in {AUTO, "none"}:
        pool = [option for option in every if quantization == AUTO or not _is_quantized(option)]
    else:
        pool = list(_quantized(inputs, quantization))
    pool = [option for option in pool if _suits_engines(inputs.workload, option.strategy)]
    candidates = [option for option in pool if offload in {AUTO, option.strategy.offload}]
    if not candidates:
        against = constraints.offload_conflict(_in_pytorch(quantization, offload))
        if against is not None:
            raise against.refusal
        raise InvalidRequestError(
            "offload", "planner.quantized_offload", chosen={"quantization": quantization, "offload": offload}
        )
    return candidates


def _quantized(inputs: ForecastInputs, kind: str) -> Iterator[StrategyCandidate]:
    """Yield the strategies with quantized transformers, most memory first."""
    for code, strategy in (_KEEP, _free_text(inputs), _ONE, _MODEL)[: 4 if inputs.workload.split is None else 3]:
        if constraints.offload_conflict(_in_pytorch(kind, strategy.offload)) is None:
            title = Fact("strategy.quantized", {"quantization": kind, "how": Fact(code)})
            yield _option(inputs, title, strategy.replace(quantization=kind))


def _in_pytorch(quantization: str, offload: str) -> constraints.ComponentSettings:
    return constraints.ComponentSettings(
        component="transformer", backend=PYTORCH, offload=offload, quantization=quantization
    )


def _first_that_fits(candidates: Iterator[StrategyCandidate]) -> StrategyCandidate:
    """Return the first option that fits, or the last; options after it are not computed."""
    for option in candidates:
        if _has_room(option) and not option.tight:
            break
    return option


def _is_quantized(option: StrategyCandidate) -> bool:
    return option.strategy.quantization != "none"


def _has_room(option: StrategyCandidate) -> bool:
    return option.forecast.fits and option.forecast.fits_ram


def _fits(option: StrategyCandidate) -> bool:
    return _has_room(option) and option.against is None


def _option(inputs: ForecastInputs, title: Fact, strategy: MemoryStrategy) -> StrategyCandidate:
    usable = inputs.free_bytes * (
        _KEEP_SHARE["cuda" if inputs.workload.cuda else "cpu"] if strategy.keep_loaded else 1.0
    )
    strategy = strategy.replace(decode_chunk=inputs.chunk)
    computed, compiling, excluded = execution_options.for_strategy(inputs, strategy)
    # Decoding fewer frames per call costs little time, so it comes before other savings. Tiles cost more than freeing
    # components, so they are used only without `keep_loaded`.
    tiles = [] if strategy.keep_loaded else memory_model.tile_sides(inputs.workload)
    fitted, chunk = strategy, memory_model.smallest_chunk(inputs.workload)
    memory = forecast.memory(inputs, fitted, computed)
    for tile in (None, *tiles):
        if _needs(tuple(stage for stage in memory if stage.component in {"vae", VAE_ENCODER})) <= usable:
            break
        fitted = strategy.replace(decode_chunk=chunk, decode_tile=tile)
        memory = forecast.memory(inputs, fitted, computed)
    if fitted.decode_tile is not None:
        title = Fact("strategy.tiles", {"how": title, "side": _tile_pixels(inputs, fitted.decode_tile)})
    elif fitted.decode_chunk != inputs.chunk:
        title = Fact("strategy.frame_by_frame", {"how": title})
    peak = max(stage.peak_bytes for stage in memory)
    ram = memory_model.ram_bytes(inputs.workload, fitted) if inputs.workload.cuda else 0
    seconds = forecast.seconds(inputs, fitted, computed)
    if computed.compiled or computed.vae_kernels:
        seconds |= {"load": seconds["load"] + compiling, "compile": compiling}
    elif computed.compiled_later:
        compiled = forecast.seconds(inputs, fitted, computed.replace(compiled=True, vae_kernels=True))
        seconds["later"] = compiled["total"]
    roomy = _needs(memory) <= usable
    against = (
        constraints.step_cache_conflict(inputs.step_cache, fitted.offload, inputs.machine)
        or constraints.lacking(fitted.quantization, inputs.machine)
        or _unloadable(inputs, fitted)
        or excluded
    )
    predicted = StrategyForecast(
        strategy=fitted,
        title=title,
        peak_bytes=peak,
        ram_bytes=ram,
        seconds=seconds["total"],
        # Components that stay loaded must leave memory for others, so a tight fit does not count.
        fits=roomy or (not fitted.keep_loaded and peak <= inputs.free_bytes),
        fits_ram=ram <= inputs.machine.ram_free_bytes,
        lacks=against.fact if against else None,
    )
    return StrategyCandidate(
        forecast=predicted, memory=memory, seconds=seconds, tight=not roomy, against=against, speed=computed
    )


def _unloadable(inputs: ForecastInputs, strategy: MemoryStrategy) -> constraints.Conflict | None:
    """Return why a component does not fit into RAM on its way to the GPU; quantized weights are read singly."""
    workload = inputs.workload
    if not workload.cuda:
        return None
    quantized = strategy.quantization != "none"
    weights = {
        name: size
        for name, size in memory_model.weights_bytes(workload.spec, workload.dtypes).items()
        if name not in workload.engine_bytes and not (quantized and is_transformer(name))
    }
    return constraints.load_conflict(workload.spec, weights, inputs.machine)


def _tile_pixels(inputs: ForecastInputs, tile: int) -> int:
    return tile * inputs.workload.spec.vae.scale_factor_spatial


def _needs(memory: tuple[StageMemory, ...]) -> int:
    return max(stage.peak_bytes + stage.allocator_slack_bytes for stage in memory)


def _refusal(
    inputs: ForecastInputs, every: list[StrategyCandidate], candidates: list[StrategyCandidate], clip: Fact
) -> MemoryShortError:
    where = "video memory" if inputs.workload.cuda else "memory"
    forecasts = _forecasts(inputs, every, None)
    alternative = next((option for option in every if _fits(option)), None)
    able = [option for option in candidates if option.against is None]
    unable = next((option.against for option in candidates if option.against), None)
    if not able and unable is not None:
        code = "planner.strategy_unavailable" if alternative is None else "planner.strategy_unavailable_other"
        remedy = None if alternative is None else _instead(every[0], alternative)
        return MemoryShortError(code, cause=unable.fact, remedy=remedy, strategies=forecasts, where=where)
    least = min(able, key=lambda option: (not option.forecast.fits_ram, option.forecast.peak_bytes)).forecast
    offloaded = min((o.forecast for o in able if o.forecast.fits), key=lambda item: item.ram_bytes, default=None)
    needs = {
        "clip": clip,
        "peak": least.peak_bytes,
        "free": inputs.free_bytes,
        "ram_free": inputs.machine.ram_free_bytes,
    }
    if offloaded is None:
        code, remedy = "planner.memory_short", Fact("planner.ask_for_less")
    else:
        needs["ram"] = offloaded.ram_bytes
        code = "planner.memory_and_ram_short" if least.fits_ram else "planner.ram_short"
        remedy = Fact("planner.more_ram")
    remedy = remedy if alternative is None else _instead(every[0], alternative)
    return MemoryShortError(code, **needs, remedy=remedy, strategies=forecasts, where=where)


def _instead(fastest: StrategyCandidate, alternative: StrategyCandidate) -> Fact:
    strategy, forecast = alternative.strategy, alternative.forecast
    changes = {"offload": strategy.offload, "quantization": strategy.quantization}
    changes = {name: value for name, value in changes.items() if value != "none"} or {"offload": "none"}
    times = forecast.seconds.likely / fastest.forecast.seconds.likely
    return Fact("planner.use_strategy", {"changes": changes, "peak": forecast.peak_bytes, "times": times})


@dataclass(frozen=True)
class FallbackStrategy:
    """A lower-memory strategy after out-of-memory.

    Attributes:
        plan: the plan with it.
        forecast: of the strategy.
        slowdown: duration of the clip as a multiple of the previous strategy's.
    """

    plan: ExecutionPlan
    forecast: StrategyForecast
    slowdown: float

    @property
    def permitted(self) -> bool:
        """Whether the request allows a job to continue with it."""
        allowed = self.plan.request.on_out_of_memory
        return allowed == "any" or (allowed == "retry" and self.forecast.strategy.lossless)

    @property
    def changes(self) -> dict[str, str]:
        """The request fields that select it; a strategy without settings of its own is permitted by a field."""
        strategy = self.forecast.strategy
        changes = {"offload": strategy.offload, "quantization": strategy.quantization}
        changes = {name: value for name, value in changes.items() if value != "none"}
        return changes or {"on_out_of_memory": "retry" if strategy.lossless else "any"}

    def event(self, stage: Stage, component: str, memory: Memory, lost_seconds: float) -> OutOfMemory:
        """Return the event that memory ran out: the job continues with this strategy if that is permitted."""
        return OutOfMemory(
            stage=stage,
            component=component,
            memory=memory,
            retried=self.permitted,
            strategy=self.forecast.title,
            changes=self.changes,
            slowdown=round(self.slowdown, 2),
            lossless=self.forecast.strategy.lossless,
            lost_seconds=lost_seconds,
            plan=self.plan if self.permitted else None,
        )


def next_strategy(
    plan: ExecutionPlan, spec: ModelSpec, component: str, memory: Memory, *, lossy: bool
) -> FallbackStrategy | None:
    """Return the first strategy that takes less of `memory` while `component` runs, or `None`.

    The forecast of the plan's strategy was wrong, or another program took memory. Free memory therefore does not count,
    only that the component that ran out takes less.

    Args:
        lossy: include strategies that change the video slightly, after the lossless ones.
    """
    workload = Workload.of(plan, spec)
    if component in FINISHERS:
        # An upscaler has the smallest tiles by then, but the VAE, which decodes meanwhile, may take less.
        component = "vae"
    # On a GPU, offloaded weights are in system memory, which has a forecast of its own.
    offloaded = memory == "RAM" and workload.cuda

    def needed(strategy: MemoryStrategy) -> int:
        if offloaded:
            return memory_model.ram_bytes(workload, strategy)
        stages = memory_model.stages(workload, strategy)
        return next(stage.peak_bytes for stage in stages if stage.component == component)

    current, now = plan.forecast, needed(plan.strategy)
    alternatives = [
        alternative
        for alternative in (*plan.strategies, *_smaller_decodes(plan, workload, component))
        if _possible(workload, alternative)
        and needed(alternative.strategy) < now
        and (alternative.strategy.lossless or lossy)
    ]
    chosen = min(alternatives, key=lambda alternative: not alternative.strategy.lossless, default=None)
    if chosen is None:
        return None
    slowdown = chosen.seconds.likely / current.seconds.likely if current.seconds.likely else 1.0
    return FallbackStrategy(_with(plan, spec, workload, chosen, slowdown), chosen, slowdown)


def _possible(workload: Workload, candidate: StrategyForecast) -> bool:
    return (
        not candidate.lacks and candidate.fits and candidate.fits_ram and _suits_engines(workload, candidate.strategy)
    )


def _smaller_decodes(plan: ExecutionPlan, workload: Workload, component: str) -> list[StrategyForecast]:
    """Return the plan's strategy with smaller calls of the VAE: fewer frames to decode, then tiles."""
    if component not in {"vae", VAE_ENCODER} or plan.components[component].backend != PYTORCH:
        return []
    forecasts = []
    current, strategy = plan.forecast, plan.strategy
    title = current.title
    if title.code in {"strategy.tiles", "strategy.frame_by_frame"}:
        title = title.data["how"]
    chunk = memory_model.smallest_chunk(workload)
    if component == "vae" and strategy.decode_chunk > chunk:
        single = strategy.replace(decode_chunk=chunk)
        forecasts.append(current.replace(strategy=single, title=Fact("strategy.frame_by_frame", {"how": title})))
    scale = workload.spec.vae.scale_factor_spatial
    for tile in memory_model.tile_sides(workload):
        if strategy.decode_tile is None or tile < strategy.decode_tile:
            tiled = strategy.replace(decode_chunk=chunk, decode_tile=tile)
            tiled_title = Fact("strategy.tiles", {"how": title, "side": tile * scale})
            forecasts.append(current.replace(strategy=tiled, title=tiled_title))
    return forecasts


def _with(
    plan: ExecutionPlan, spec: ModelSpec, workload: Workload, chosen: StrategyForecast, slowdown: float
) -> ExecutionPlan:
    strategy = chosen.strategy
    dtypes = {name: part.dtype for name, part in plan.components.items()}
    weights = memory_model.weights_bytes(workload.spec, dtypes, strategy.quantization)
    components = {
        name: part.replace(quantization=strategy.quantization, weights_bytes=weights[name])
        if is_transformer(name) and not part.on_engine
        else part
        for name, part in plan.components.items()
    }
    finishing = [stage for stage in plan.memory if stage.component in FINISHERS]
    preprocessing = [stage for stage in plan.memory if stage.component == PREPROCESSOR]
    speed = with_less_memory(plan.speed, strategy.offload, strategy.quantization)
    workload = replace(workload, text_bytes=speed.text_bytes, working_sets=memory_model.working_sets(speed))
    return plan.replace(
        components=components,
        strategy=strategy,
        # One GPU decodes tiles.
        split=plan.split if plan.split is None or strategy.decode_tile is None else plan.split.replace(decode=False),
        speed=speed,
        decode_flops=plan.decode_flops
        * times_decoded(*plan.latent_shape[3:], strategy.decode_tile)
        / times_decoded(*plan.latent_shape[3:], plan.strategy.decode_tile),
        memory=(*preprocessing, *memory_model.stages(workload, strategy), *finishing),
        seconds={
            name: seconds if name in {"load", "compile"} else seconds * slowdown
            for name, seconds in plan.seconds.items()
        },
        strategies=plan.strategies if chosen in plan.strategies else (chosen, *plan.strategies),
    )
