"""Places a job: the device and each component's precision in PyTorch, and how several GPUs share it. No torch.

The passes of a step with guidance are independent, so they go to different GPUs first, the same number to each; only
their results are exchanged. The remaining GPUs share the tokens of a pass, which requires that their number divides the
attention heads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from runtime.core.errors import InvalidRequestError, MachineError
from runtime.core.estimates import Seconds
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, ComponentPlan, Split
from runtime.core.request import AUTO, SOUND_DECODERS, GenerationRequest
from runtime.machine.compatibility import cuda_problem
from runtime.machine.probe import Machine, seen_from
from runtime.models.spec import IMAGE_ENCODER, VAE_ENCODER, ModelSpec, is_transformer
from runtime.planner import constraints
from runtime.planner.choice.engine_offers import EngineOffer, refused

# PSNR of the shipped model's frames against those decoded in float32, in dB, both rounded to 8 bits.
VAE_PSNR: Mapping[str, int] = {"bfloat16": 56, "float16": 67}
_FULL = "float32"
# Efficiency of each GPU when tokens of a pass are shared, and speedup of decoding in strips, which overlap, by number
# of GPUs (the nearest below counts). Measured on 2 and 4 H200s with NVLink: speedup 1.75 and 3.44 by tokens, 1.97 and
# 2.75 by strips, 1.98 to 2.0 by guidance passes; other numbers are estimates.
_TOKENS_EFFICIENCY: Mapping[int, float] = {1: 1.0, 2: 0.88, 3: 0.87, 4: 0.86, 5: 0.82, 8: 0.75}
_GUIDANCE_EFFICIENCY = 0.99
_STRIPS_SPEED: Mapping[int, float] = {1: 1.0, 2: 1.9, 3: 2.4, 4: 2.75, 8: 4.0}
# Range of the speedup, as factors.
_HIGH_SPEEDUP, _LOW_SPEEDUP = 1.1, 0.6

# Exclusions of several GPUs, in addition to `constraints.RULES`.
RULES = (
    constraints.Rule(
        "planner.gpus_offloaded",
        lambda case, _: case.gpus > 1 and case.offload in {"model", "group", "sequential"},
        "gpus",
    ),
    constraints.Rule(
        "planner.gpus_quantized",
        lambda case, _: case.gpus > 1 and case.quantization in {"bnb-8bit", "bnb-4bit"},
        "gpus",
    ),
)


class Placement(NamedTuple):
    """A torch device, each component's dtype, the reason, and the device's free bytes."""

    device: str
    dtypes: dict[str, str]
    reason: Fact
    free_bytes: int


def place(spec: ModelSpec, machine: Machine, index: int, vae: str = AUTO) -> Placement:
    """Return the device and precision of a model in PyTorch.

    Args:
        index: of the GPU.
        vae: the requested precision of the VAE, one of `request.VAE_PRECISIONS`.

    Raises:
        InvalidRequestError: if the device cannot decode in that precision.
    """
    names = spec.component_names
    problem = cuda_problem(machine)
    device = f"cuda:{index}" if problem is None else "cpu"
    check_vae_precision(vae, device, machine)
    if problem is not None:
        reason = Fact("planner.on_cpu", {"cause": problem})
        return Placement(device, dict.fromkeys(names, _FULL), reason, machine.ram_free_bytes)
    gpu = machine.gpus[index]
    if spec.small:
        dtypes, code = dict.fromkeys(names, _FULL), "planner.small_on_gpu"
    elif gpu.capability >= constraints.BF16_CAPABILITY:
        dtypes, code = dict.fromkeys(names, "bfloat16"), "planner.bfloat16_on_gpu"
    else:
        # UMT5 overflows in float16; VAEs were not tested.
        dtypes = {name: "float16" if is_transformer(name) else _FULL for name in names}
        code = "planner.float16_on_gpu"
    # As their authors run them.
    dtypes |= dict.fromkeys({IMAGE_ENCODER, *SOUND_DECODERS} & {*names}, _FULL)
    uniform = vae == AUTO and dtypes["vae"] == dtypes["transformer"] == _FULL
    if vae != AUTO:
        dtypes |= dict.fromkeys({"vae", VAE_ENCODER} & {*names}, vae)
    details = [] if uniform else [_about_vae(dtypes["vae"], requested=vae != AUTO)]
    return Placement(device, dtypes, Fact(code, {"gpu": gpu.name, "details": details}), gpu.free_bytes)


def _about_vae(dtype: str, *, requested: bool) -> Fact:
    data = {"dtype": dtype, "psnr": VAE_PSNR.get(dtype)}
    if dtype in VAE_PSNR:
        return Fact("planner.vae_rounded_asked" if requested else "planner.vae_rounded", data)
    return Fact("planner.vae_exact_asked" if requested else "planner.vae_exact", data)


def check_vae_precision(precision: str, device: str, machine: Machine) -> None:
    """Check that the device supports a precision of the VAE at a usable speed; also for a VAE on an engine.

    Args:
        precision: one of `request.VAE_PRECISIONS`.
        machine: see `probe.seen_from`.

    Raises:
        InvalidRequestError: if it does not.
    """
    case = constraints.ComponentSettings(
        component="vae", backend=PYTORCH, device=device, precision="" if precision == AUTO else precision
    )
    conflict = constraints.conflict(case, machine)
    if conflict is not None:
        raise conflict.refusal


def may_overflow(part: ComponentPlan) -> bool:
    """Return whether a VAE decodes in PyTorch in less than float32."""
    return part.backend == PYTORCH and part.dtype != _FULL


def usable_gpus(machine: Machine) -> list[int]:
    """Return the indices of usable GPUs; empty if everything runs on the CPU."""
    return [index for index in range(len(machine.gpus)) if cuda_problem(seen_from(machine, index)) is None]


def decide(
    request: GenerationRequest,
    spec: ModelSpec,
    machine: Machine,
    gpu: int,
    more_gpus: Sequence[int] | None = None,
    *,
    passes: int,
    offered: Callable[[str], Sequence[EngineOffer]] = lambda _: (),
) -> tuple[Split | None, list[Fact]]:
    """Return how several GPUs share the job, `None` for one GPU, and warnings.

    Args:
        offered: the engines for a component.
        machine: with all GPUs.
        gpu: the index of the first GPU.
        more_gpus: indices of more GPUs that it may use, in order of preference; `None` for all usable ones.
        passes: of every step, that may run on different GPUs; 1 if they may not.

    Raises:
        InvalidRequestError: if the requested number of GPUs cannot share it, with the numbers that can.
        MachineError: if GPUs of this machine cannot work together.
    """
    if request.gpus == 1:
        return None, []
    usable = usable_gpus(machine)
    more_gpus = [index for index in (usable if more_gpus is None else more_gpus) if index in usable and index != gpu]
    if request.gpus == AUTO:
        alike = [index for index in more_gpus if machine.gpus[index].name == machine.gpus[gpu].name]
        return _most(request, spec, machine, gpu, alike, offered, passes=passes)
    count, there = int(request.gpus), 1 + len(more_gpus) if usable else 0
    if there < count:
        if there == 0:
            raise InvalidRequestError("gpus", "planner.no_usable_gpus", wanted=count, cause=_unusable(machine))
        raise InvalidRequestError("gpus", "planner.too_few_gpus", wanted=count, usable=there)
    if not _has_nccl(machine):
        raise MachineError("planner.gpus_need_linux")
    able = counts(spec, there, passes=passes)
    if count not in able:
        heads = spec.shared_heads
        raise InvalidRequestError(
            "gpus", "planner.heads_not_divisible", wanted=count, model=spec.title, heads=heads, able=able
        )
    against_it = excluded(request, spec, machine, count, offered)
    if against_it is not None:
        raise against_it.refusal
    chosen = [gpu, *more_gpus[: count - 1]]
    _check_alike(machine, chosen)
    return _split(spec, chosen, passes=passes), _unlike(machine, chosen)


def excluded(
    request: GenerationRequest,
    spec: ModelSpec,
    machine: Machine,
    gpus: int,
    offered: Callable[[str], Sequence[EngineOffer]],
) -> constraints.Conflict | None:
    """Return which of a request's settings a number of GPUs excludes, `None` if none."""
    for name in filter(is_transformer, spec.component_names):
        backend = request.backend(name)
        case = constraints.ComponentSettings(
            component=name,
            backend=PYTORCH if backend == AUTO else backend,
            offload=request.offload,
            quantization=request.quantization,
            gpus=gpus,
            step_cache=request.step_cache,
        )
        against = next((rule.conflict(case) for rule in RULES if rule.excludes(case, machine)), None)
        if against is None and case.backend != PYTORCH:
            against = refused(backend, offered(name), case, machine)
        if against is not None and against.setting == "gpus":
            return against
    return None


def free_bytes_of_fullest(split: Split | None, machine: Machine, free_bytes: int) -> int:
    """Return the free bytes of the fullest of the GPUs; `free_bytes` without a split."""
    devices = () if split is None else split.devices
    return min([free_bytes, *(machine.gpu_of(device).free_bytes for device in devices)])


def counts(spec: ModelSpec, most: int, *, passes: int) -> list[int]:
    """Return the numbers of GPUs that can share a job, up to `most`; 1 always can."""
    return [count for count in range(1, most + 1) if count == 1 or _degrees(spec, count, passes=passes) is not None]


def _has_nccl(machine: Machine) -> bool:
    """Return whether GPUs can exchange data: NCCL requires Linux."""
    return machine.system.startswith("Linux")


def faster_by_split(seconds: Seconds, split: Split | None, component: str) -> Seconds:
    """Return the seconds of a call that `split` shares, from those on one GPU."""
    if split is None or not split.shares(component):
        return seconds
    if component == "vae":
        times = _nearest(_STRIPS_SPEED, len(split.devices))
    else:
        times = split.sequence * _nearest(_TOKENS_EFFICIENCY, split.sequence)
        times *= split.guidance * (_GUIDANCE_EFFICIENCY if split.guidance > 1 else 1.0)
    return Seconds(
        seconds.likely / times, seconds.low / (times * _HIGH_SPEEDUP), seconds.high / max(times * _LOW_SPEEDUP, 1.0)
    )


def reasons(split: Split | None, component: str) -> tuple[Fact, ...]:
    """Return how several GPUs share a component; nothing if one runs it."""
    if split is None or not split.shares(component):
        return ()
    how = Fact("planner.strips_shared") if component == "vae" else split.reason
    return Fact("planner.on_gpus", {"gpus": len(split.devices)}), how


def devices_name(device: str, split: Split | None, component: str) -> str:
    """Return the name in the history of the devices that run a component; a group has another name than one device."""
    if split is None or not split.shares(component):
        return device
    how = "strips" if component == "vae" else f"guidance {split.guidance}, tokens {split.sequence}"
    return f"{len(split.devices)} x {device}, {how}"


def _most(
    request: GenerationRequest,
    spec: ModelSpec,
    machine: Machine,
    gpu: int,
    more_gpus: Sequence[int],
    offered: Callable[[str], Sequence[EngineOffer]],
    *,
    passes: int,
) -> tuple[Split | None, list[Fact]]:
    """Return the split with the most GPUs; `None` if it gains nothing or excludes a requested setting."""
    if not more_gpus or not _has_nccl(machine):
        return None, []
    if spec.small:
        return None, [Fact("planner.one_gpu_small_model")]
    against = excluded(request, spec, machine, 2, offered)
    if against is not None:
        return None, [Fact("planner.one_gpu", {"cause": against.fact})]
    count = counts(spec, 1 + len(more_gpus), passes=passes)[-1]
    return (_split(spec, [gpu, *more_gpus[: count - 1]], passes=passes) if count > 1 else None), []


def _degrees(spec: ModelSpec, count: int, *, passes: int) -> tuple[int, int] | None:
    """Return how many passes run at the same time and how many GPUs share the tokens of each, `None` if they cannot."""
    heads = spec.shared_heads
    able = (guidance for guidance in range(passes, 0, -1) if passes % guidance == count % guidance == 0)
    return next(((guidance, count // guidance) for guidance in able if heads % (count // guidance) == 0), None)


def _split(spec: ModelSpec, gpus: Sequence[int], *, passes: int) -> Split:
    degrees = _degrees(spec, len(gpus), passes=passes)
    assert degrees is not None
    guidance, sequence = degrees
    devices = tuple(f"cuda:{index}" for index in gpus)
    return Split(devices=devices, guidance=guidance, sequence=sequence, decode="strips" not in spec.lacks)


def _check_alike(machine: Machine, gpus: Sequence[int]) -> None:
    """Check that GPUs can compute in the same precision."""
    first, *rest = (machine.gpus[index] for index in gpus)
    for gpu in rest:
        if first.capability >= constraints.BF16_CAPABILITY > gpu.capability:
            raise MachineError("planner.gpus_without_bfloat16", first=first.name, second=gpu.name)


def _unlike(machine: Machine, gpus: Sequence[int]) -> list[Fact]:
    names = dict.fromkeys(machine.gpus[index].name for index in gpus)
    if len(names) == 1:
        return []
    return [Fact("planner.gpus_differ", {"names": list(names)})]


def _unusable(machine: Machine) -> Fact:
    problem = cuda_problem(machine)
    assert problem is not None
    return problem


def _nearest(values: Mapping[int, float], count: int) -> float:
    return values[max(key for key in values if key <= count)]
