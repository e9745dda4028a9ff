"""What a clip takes with its weights held in one strategy: memory and seconds, by earlier runs too. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from runtime.core.estimates import MemoryStrategy, Seconds, StageMemory
from runtime.core.plan import EAGER, PYTORCH, Speed
from runtime.core.step_cache import NONE
from runtime.machine.probe import Machine
from runtime.models.spec import is_transformer
from runtime.planner import execution_options, history, latency_model, memory_model, parallelism
from runtime.planner.history import History
from runtime.planner.latency_model import Work
from runtime.planner.memory_model import Load


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is reckoned for.

    Attributes:
        backends: by component.
        asked: the backends that were asked for, or "auto", by component.
        whole: bytes of the components that pass through system memory whole on their strategy to the device.
        free_bytes: on the device, `ram_free_bytes` in system memory.
        chunk: latent frames that the VAE decodes in one call, where memory allows.
        step_cache: as it is used.
        speed: what is decided on of how PyTorch computes, and `base` what of that does not depend on the strategy.
    """

    load: Load
    work: Work
    machine: Machine
    history: History
    backends: Mapping[str, str]
    asked: Mapping[str, str]
    whole: Mapping[str, int]
    free_bytes: int
    ram_free_bytes: int
    chunk: int
    speed: execution_options.Case
    base: Speed = EAGER
    step_cache: str = NONE


def _kind(case: Case, strategy: MemoryStrategy, name: str, computed: Speed) -> history.Kind:
    transformer = is_transformer(name)
    return history.Kind(
        device=parallelism.name_of(history.device_name(case.machine, case.load.device), case.load.split, name),
        model=history.architecture(case.load.spec),
        component="transformer" if transformer else name,
        backend=case.backends[name],
        dtype=case.load.dtypes[name],
        quantization=strategy.quantization if transformer else "none",
        offload=strategy.offload,
        tile=history.tile_of(strategy, name),
        step_cache=history.cache_of(case.step_cache, name),
        speed=execution_options.tag(computed, name) if case.backends[name] == PYTORCH else "",
    )


def memory(case: Case, strategy: MemoryStrategy, computed: Speed) -> tuple[StageMemory, ...]:
    """Return what each stage takes, by what earlier runs took more or less than reckoned."""
    stages = memory_model.stages(case.load, strategy)
    if not case.history:
        return tuple(stages)
    return tuple(
        history.remembered(
            case.history,
            _kind(case, strategy, stage.component, computed),
            latency_model.flops(case.load, case.work, stage.component, strategy.decode_tile),
            stage,
        )
        for stage in stages
    )


def seconds(case: Case, strategy: MemoryStrategy, computed: Speed) -> dict[str, Seconds]:
    """Return what each stage takes, their "total", and "load", which the total leaves out."""
    found = dict.fromkeys(("encode", "denoise", "decode"), Seconds(0, 0, 0, measured=True))
    for name in case.load.spec.component_names:
        stage = memory_model.stage_of(name)
        found[stage] += _component_seconds(case, strategy, name, computed)
    total = found["encode"] + found["denoise"] + found["decode"]
    return found | {"total": total, "load": latency_model.load_seconds(case.load)}


def _component_seconds(case: Case, strategy: MemoryStrategy, name: str, computed: Speed) -> Seconds:
    calls = case.work.calls[name]
    if case.history:
        operations = latency_model.flops(case.load, case.work, name, strategy.decode_tile)
        whole = history.seconds_per_call(case.history, _kind(case, strategy, name, computed), operations)
        if whole is not None:
            return whole * calls
    one = call(case, strategy, name, computed)
    if history.cache_of(case.step_cache, name):
        one = latency_model.with_cache(one)
    return latency_model.stage_seconds(
        one * calls, latency_model.transfer_seconds(case.load, strategy, name, calls), strategy
    )


def call(case: Case, strategy: MemoryStrategy, name: str, computed: Speed) -> Seconds:
    """Return what one call takes with all weights at hand; what was not measured so rests on the next nearest."""
    measured = _measured_call(case, strategy, name, computed) if case.history else None
    if measured is not None:
        like, found = measured
    else:
        like, alone = EAGER, latency_model.compute_seconds(case.load, case.work, name, case.machine, strategy)
        whole_frames = name != "vae" or strategy.decode_tile is None
        found = parallelism.faster(alone, case.load.split, name) if whole_frames else alone
    times = 1.0
    if case.backends[name] == PYTORCH:
        if computed.compiled and not like.compiled:
            times *= _faster_compiled(case, strategy, name)
        if is_transformer(name) and computed.attention != like.attention:
            times *= execution_options.faster_by_attention(computed.attention, case.load.spec, case.load.tokens)
    return found if times == 1.0 else replace(found * (1 / times), measured=False)


def _measured_call(case: Case, strategy: MemoryStrategy, name: str, computed: Speed) -> tuple[Speed, Seconds] | None:
    """Return the most similar options of PyTorch with which earlier runs measured a call, and its seconds."""
    operations = latency_model.flops(case.load, case.work, name, strategy.decode_tile)
    loaded = strategy.replace(offload="none")
    for like in dict.fromkeys((computed, computed.replace(compiled=False), EAGER)):
        # The callers account for a step cache.
        kind = _kind(case, loaded, name, like).replace(step_cache="")
        found = history.seconds_per_call(case.history, kind, operations)
        if found is not None:
            return like, found
    return None


def _faster_compiled(case: Case, strategy: MemoryStrategy, name: str) -> float:
    """Return how many times as fast a component is compiled."""
    if is_transformer(name):
        return execution_options.faster_when_compiled(strategy.quantization)
    if name != "vae" or not case.load.cuda:
        return 1.0
    vae, gpu = case.load.spec.vae, case.machine.gpu_of(case.load.device)
    return execution_options.faster_by_kernels(case.load.dtypes[name], vae.last_channels, gpu.capability)
