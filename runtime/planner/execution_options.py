"""Chooses PyTorch's execution options: attention kernel, compilation, caching of the text, CUDA graphs. Pure.

Each choice has its reason. Measurements on this machine take precedence over rules, which rest on an H200
(bench/h200.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from runtime.core.errors import InvalidRequestError, MachineError
from runtime.core.estimates import MemoryStrategy, Seconds
from runtime.core.facts import Fact
from runtime.core.plan import PYTORCH, Speed
from runtime.core.request import AUTO
from runtime.machine.probe import Gpu, Machine
from runtime.models.spec import ModelSpec, attention_flops
from runtime.planner import constraints
from runtime.planner.constraints import ATTENTION_KERNELS, Conflict
from runtime.planner.memory_model import DTYPE_BYTES, Workload

# Share of free memory for cached keys and values of the text. They save 0.1 % of the time of a large model, 10 % of a
# small one's.
_TEXT_SHARE = 0.02
# Up to this many tokens leave a large GPU partly idle, so that one call with both passes is faster than two calls.
_PAIRED_TOKENS = 4096
# Kernels that diffusers launches per block, and seconds per launch: a call of the embedded model (8 blocks) takes 8 ms
# on an H200, mostly for launches.
_KERNELS_PER_BLOCK, _LAUNCH_SECONDS = 60, 5e-6
# A measured call includes launches, so it is launch-bound up to this multiple of their time.
_MEASURED_CALL_RATIO = 4.0
# Speedups on an H200, used where nothing was measured on this machine. Fitted to the rows of
# tests/planner/measured_h200_speedups.jsonl that are marked so; tests hold estimates to the others.
# Compiled transformer blocks, by quantization; FP8 against uncompiled FP8, which takes 1.1 times as long as 16 bits.
_COMPILED_SPEEDUP: Mapping[str, float] = {"none": 1.17, "fp8": 1.515}
# Attention kernels against PyTorch's own.
_ATTENTION_SPEEDUP: Mapping[str, float] = {"flash4": 1.215, "fp8": 1.477}
# The VAE's Triton kernels in 16 bits, for all convolutions or only between cuDNN's, and in float32.
_DECODER_SPEEDUP_ALL, _DECODER_SPEEDUP_BETWEEN, _DECODER_SPEEDUP_FLOAT32 = 2.13, 1.505, 1.36
# Compilation time if it was not measured on this machine. The host of an H200 with 16 cores took 2 to 9 s for a block
# and 2 to 8 s for the VAE's kernels; the first step of A14B in FP8 took 11 to 13 s longer than the next.
COMPILE_SECONDS = 20.0
_NOTHING = Seconds(0, 0, 0, measured=True)

# Seconds of one call of the transformer with all weights on the device, by options.
CallSeconds = Callable[[Speed], Seconds]


@dataclass(frozen=True, kw_only=True)
class OptionInputs:
    """What the decisions on PyTorch's execution depend on besides the strategy.

    Attributes:
        attention, compile: as in the request.
        calls: number of calls of all transformers.
        guided: whether a step has two passes.
        attention_seconds: measured seconds of one attention of this size, by kernel.
        compile_seconds: measured compilation time by quantization; `None` if not measured.
        free_bytes: of the device.
        in_pytorch: whether any transformer runs in PyTorch.
        passes_apart: whether guidance passes must be separate calls: with a step cache and on several GPUs.
    """

    workload: Workload
    machine: Machine
    attention: str
    compile: str
    calls: float
    guided: bool
    attention_seconds: Mapping[str, float]
    compile_seconds: Callable[[str], float | None]
    free_bytes: int
    in_pytorch: bool
    passes_apart: bool = False


def shared_options(inputs: OptionInputs) -> Speed:
    """Return the options that all memory strategies share: the attention kernel and options that take memory.

    Raises:
        InvalidRequestError, MachineError: if a requested option is not possible.
    """
    if not inputs.in_pytorch:
        reason = Fact("planner.engines_compute")
        return Speed(attention_reason=reason, compiled_reason=reason)
    workload = inputs.workload
    attention, reason = choose_attention(inputs)
    size = text_bytes(workload.spec, workload.dtypes["transformer"], texts=2 if inputs.guided else 1)
    kept = size <= _TEXT_SHARE * inputs.free_bytes
    return Speed(
        attention=attention,
        attention_reason=reason,
        text_kept=kept,
        text_bytes=size if kept else 0,
        paired=workload.cuda and inputs.guided and workload.tokens <= _PAIRED_TOKENS and not inputs.passes_apart,
        channels_last=workload.cuda,
    )


def text_bytes(spec: ModelSpec, dtype: str, texts: int) -> int:
    """Return the bytes of the texts' keys and values in all blocks of one transformer."""
    transformer = spec.transformer
    values = 2 * transformer.num_layers * spec.max_sequence_length * transformer.width
    return texts * values * DTYPE_BYTES[dtype]


def for_strategy(
    inputs: OptionInputs, strategy: MemoryStrategy, base: Speed, seconds: CallSeconds
) -> tuple[Speed, Seconds, Conflict | None]:
    """Complete the options for a memory strategy.

    Args:
        base: from `shared_options`.
        seconds: of one call.

    Returns:
        The options, the compilation time before the first step, and why the request's options exclude the strategy.
    """
    if not inputs.in_pytorch:
        return base, _NOTHING, None
    on_device = strategy.offload in {"none", "model"}
    stays = strategy.offload == "none" and strategy.quantization == "none"
    base = base.replace(
        text_kept=base.text_kept and on_device,
        text_bytes=base.text_bytes if on_device else 0,
        fused=inputs.workload.cuda and stays,
    )
    graphed = inputs.workload.cuda and stays and not inputs.passes_apart and _launch_bound(inputs, seconds(base))
    base = base.replace(graphed=graphed)
    compiled, reason, takes, against = _compiled(inputs, strategy, base, seconds)
    return base.replace(compiled=compiled, compiled_reason=reason), takes if compiled else _NOTHING, against


def choose_attention(inputs: OptionInputs) -> tuple[str, Fact]:
    """Return the attention kernel and the reason.

    Raises:
        InvalidRequestError, MachineError: if the requested kernel cannot run on this machine.
    """
    asked, dtype = inputs.attention, inputs.workload.dtypes["transformer"]
    if asked == "native":
        return asked, Fact("planner.attention_native_asked")
    if asked != AUTO:
        against = constraints.attention_conflict(asked, inputs.machine)
        if against is not None:
            usable = against.fact.code != "machine.no_gpu"
            code = "planner.attention_unavailable" if usable else "planner.attention_needs_gpu"
            raise MachineError(code, attention=asked, cause=against.fact)
        if DTYPE_BYTES[dtype] > DTYPE_BYTES["float16"]:
            raise InvalidRequestError(
                "attention",
                "planner.attention_needs_16bit",
                attention=asked,
                model=inputs.workload.spec.title,
                dtype=dtype,
            )
        return asked, Fact("planner.attention_asked", {"attention": asked})
    if not inputs.workload.cuda:
        return "native", Fact("planner.attention_on_cpu")
    if DTYPE_BYTES[dtype] > DTYPE_BYTES["float16"]:
        return "native", Fact("planner.attention_dtype", {"dtype": dtype})
    able = exact_attentions(inputs.machine)
    measured = {kind: taken for kind, taken in inputs.attention_seconds.items() if kind in able}
    if measured:
        best = min(measured, key=lambda kind: measured[kind])
        return best, Fact("planner.attention_measured", {"attention": best, "seconds": measured})
    return _by_rule(inputs.machine.gpus[0], able)


def exact_attentions(machine: Machine) -> list[str]:
    """Return the exact attention kernels that run on this machine's GPU; only these are chosen automatically."""
    return [
        name
        for name, kernel in ATTENTION_KERNELS.items()
        if kernel.exact and constraints.attention_conflict(name, machine) is None
    ]


def _by_rule(gpu: Gpu, able: Sequence[str]) -> tuple[str, Fact]:
    # Newer architectures than Hopper were not measured.
    if gpu.capability[:1] == constraints.HOPPER[:1] and "flash4" in able:
        chosen = "flash4"
    elif gpu.capability >= constraints.HOPPER:
        chosen = "cudnn"
    elif gpu.capability >= constraints.BF16_CAPABILITY:
        chosen = "flash"
    else:
        return "native", Fact("planner.attention_old_gpu", {"gpu": gpu.name})
    return chosen, Fact("planner.attention_by_rule", {"attention": chosen, "gpu": gpu.name})


def _launch_bound(inputs: OptionInputs, call: Seconds) -> bool:
    """Return whether launching kernels takes longer than running them."""
    starting = _KERNELS_PER_BLOCK * inputs.workload.spec.transformer.num_layers * _LAUNCH_SECONDS
    return call.likely < (_MEASURED_CALL_RATIO if call.measured else 1.0) * starting


def _compiled(
    inputs: OptionInputs, strategy: MemoryStrategy, base: Speed, seconds: CallSeconds
) -> tuple[bool, Fact, Seconds, Conflict | None]:
    took = inputs.compile_seconds(strategy.quantization)
    likely = COMPILE_SECONDS if took is None else took
    takes = Seconds(likely, likely / 4, likely * 2, measured=took is not None)
    asked = inputs.compile
    if asked == "never":
        return False, Fact("planner.not_compiled_asked"), takes, None
    part = constraints.ComponentSettings(
        component="transformer", backend=PYTORCH, offload=strategy.offload, quantization=strategy.quantization
    )
    against = constraints.compile_conflict(part, inputs.machine)
    if asked == "always":
        return against is None, Fact("planner.compiled_asked"), takes, against
    if against is not None:
        return False, Fact("planner.not_compiled", {"cause": against.fact}), takes, None
    if not inputs.workload.cuda:
        return False, Fact("planner.not_compiled_on_cpu"), takes, None
    before, after = seconds(base), seconds(base.replace(compiled=True))
    faster = after.likely if after.measured else before.likely / compiled_speedup(strategy.quantization)
    saved = (before.likely - faster) * inputs.calls
    data = {"seconds": likely, "saved": max(saved, 0.0), "measured": took is not None}
    if saved > likely:
        return True, Fact("planner.compiled_pays_off", data), takes, None
    return False, Fact("planner.not_compiled_pays_off", data), takes, None


def with_less_memory(speed: Speed, offload: str, quantization: str) -> Speed:
    """Return the options for a lower-memory strategy: without those that take memory or that it excludes."""
    stays = offload == "none" and quantization == "none"
    excluded = offload in {"group", "sequential"} or quantization.startswith("bnb-")
    return speed.replace(
        compiled=speed.compiled and not excluded,
        text_kept=False,
        text_bytes=0,
        paired=False,
        graphed=False,
        fused=speed.fused and stays,
    )


def check_compile(asked: str, offload: str, quantization: str, machine: Machine) -> None:
    """Check that requested compilation is possible on this machine and with the other settings.

    Raises:
        InvalidRequestError, MachineError: if it is not.
    """
    if asked != "always":
        return
    part = constraints.ComponentSettings(
        component="transformer", backend=PYTORCH, offload=offload, quantization=quantization
    )
    against = constraints.compile_conflict(part, machine)
    if against is not None and against.setting:
        raise against.refusal
    if against is not None:
        raise MachineError("planner.compile_unavailable", cause=against.fact)


def compiled_speedup(quantization: str) -> float:
    """Return the estimated speedup of compiled blocks."""
    return _COMPILED_SPEEDUP.get(quantization, 1.0)


def attention_speedup(kind: str, spec: ModelSpec, tokens: int) -> float:
    """Return the estimated speedup of a transformer by an attention kernel, against PyTorch's own attention."""
    transformer = spec.transformer
    whole = transformer.forward_flops(tokens, spec.max_sequence_length)
    share = transformer.num_layers * attention_flops(spec, tokens) / whole
    return 1 / (1 - share + share / _ATTENTION_SPEEDUP.get(kind, 1.0))


def decoder_speedup(dtype: str, outputs: int, capability: tuple[int, int]) -> float:
    """Return the estimated speedup of decoding by Triton kernels.

    Args:
        outputs: channels of the last block's convolutions.
    """
    if dtype == "float32":
        return _DECODER_SPEEDUP_FLOAT32
    all_convolutions = outputs == constraints.OUTPUTS_BY_KERNEL and capability == constraints.HOPPER
    return _DECODER_SPEEDUP_ALL if all_convolutions else _DECODER_SPEEDUP_BETWEEN


def history_tag(speed: Speed, component: str) -> str:
    """Return `history.Kind.speed`: the options that change a component's speed; empty for none."""
    if component == "text_encoder":
        return ""
    if component == "vae":
        options = {"compiled": speed.compiled, "channels last": speed.channels_last}
    else:
        kernel = {} if speed.attention == "native" else {speed.attention: True}
        options = {"compiled": speed.compiled, **kernel, "paired": speed.paired, "graphed": speed.graphed}
    return " ".join(name for name, used in options.items() if used)
