"""How PyTorch computes a clip: which attention, compiled or not, and what is computed once. Pure, each with its reason.

Measured here counts for more than a rule; the rules rest on what an H200 showed (bench/h200.md).
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

# Of the free memory, for keys and values of the text: they save a thousandth of the time at true size, and a tenth of a
# small model's.
_TEXT_SHARE = 0.02
# Fewer tokens than this leave a large GPU partly idle, so that two passes in one call take less than two calls.
_PAIRED_TOKENS = 4096
# Kernels that diffusers' order of work starts for a block, and how long starting one takes: diorama's call of 8
# blocks takes 8 ms on an H200, most of it so.
_KERNELS_OF_A_BLOCK, _START_SECONDS = 60, 5e-6
_MEASURED_TIMES = 4.0
# Speedups on an H200, used where nothing was measured on this machine. Fitted to the rows of
# tests/planner/measured_h200_speedups.jsonl that are marked so; tests hold estimates to the others.
# Compiled transformer blocks, by quantization; FP8 against uncompiled FP8, which takes 1.1 times as long as 16 bits.
_COMPILED_SPEEDUP: Mapping[str, float] = {"none": 1.17, "fp8": 1.515}
# Attention kernels against PyTorch's own.
_ATTENTION_SPEEDUP: Mapping[str, float] = {"flash4": 1.215, "fp8": 1.477}
# The VAE's Triton kernels in 16 bits, for all convolutions or only between cuDNN's, and in float32.
_DECODER_SPEEDUP_ALL, _DECODER_SPEEDUP_BETWEEN, _DECODER_SPEEDUP_FLOAT32 = 2.13, 1.505, 1.36
# What compiling takes where it was not measured. An H200's host with 16 cores took 2 to 9 s for a block, and 2 to 8 for
# the VAE's kernels; the first step of A14B in FP8 took 11 to 13 s longer than the next. Fewer cores were not measured.
COMPILE_SECONDS = 20.0
_NOTHING = Seconds(0, 0, 0, measured=True)

# Seconds of one call of the transformer with all weights at hand, by how it is computed.
CallSeconds = Callable[[Speed], Seconds]


@dataclass(frozen=True, kw_only=True)
class OptionInputs:
    """What the decisions on PyTorch's execution depend on besides the strategy.

    Attributes:
        attention, compile: as in the request.
        calls: of the transformers, both together.
        guided: whether there are two passes a step.
        attention_seconds: what one attention of this size takes by its kind, where it was measured.
        compile_seconds: what compiling took here, by quantization; `None` where it was not measured.
        free_bytes: of the device.
        in_pytorch: whether any transformer runs in PyTorch.
        passes_apart: whether each pass of guidance is a call of its own in any case, which is not the same each time:
            with a step cache, and on several GPUs.
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


def held(inputs: OptionInputs) -> Speed:
    """Return what does not depend on how the weights are held: the attention, and what takes memory of its own.

    Raises:
        InvalidRequestError, MachineError: if what was asked for cannot be.
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
    """Return what the keys and values of texts take in all blocks of one transformer."""
    transformer = spec.transformer
    values = 2 * transformer.num_layers * spec.max_sequence_length * transformer.width
    return texts * values * DTYPE_BYTES[dtype]


def for_strategy(
    inputs: OptionInputs, strategy: MemoryStrategy, base: Speed, seconds: CallSeconds
) -> tuple[Speed, Seconds, Conflict | None]:
    """Return how a clip is computed with weights held in one way, what compiling takes first, and why it cannot be.

    Args:
        base: from `held`.
        seconds: of one call.
    """
    if not inputs.in_pytorch:
        return base, _NOTHING, None
    at_hand = strategy.offload in {"none", "model"}
    stays = strategy.offload == "none" and strategy.quantization == "none"
    base = base.replace(
        text_kept=base.text_kept and at_hand,
        text_bytes=base.text_bytes if at_hand else 0,
        fused=inputs.workload.cuda and stays,
    )
    graphed = inputs.workload.cuda and stays and not inputs.passes_apart and _launch_bound(inputs, seconds(base))
    base = base.replace(graphed=graphed)
    compiled, reason, takes, against = _compiled(inputs, strategy, base, seconds)
    return base.replace(compiled=compiled, compiled_reason=reason), takes if compiled else _NOTHING, against


def choose_attention(inputs: OptionInputs) -> tuple[str, Fact]:
    """Return the attention and why.

    Raises:
        InvalidRequestError, MachineError: if the one that was asked for cannot run here.
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
    """Return the kinds of attention that may be taken unasked on this machine's GPU: what is worth measuring."""
    return [
        name
        for name, kernel in ATTENTION_KERNELS.items()
        if kernel.exact and constraints.attention_conflict(name, machine) is None
    ]


def _by_rule(gpu: Gpu, able: Sequence[str]) -> tuple[str, Fact]:
    # Of newer ones than Hopper nothing was measured.
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
    """Whether starting kernels takes longer than running them."""
    starting = _KERNELS_OF_A_BLOCK * inputs.workload.spec.transformer.num_layers * _START_SECONDS
    # What was measured has the starting in it, so it cannot be much less than that.
    return call.likely < (_MEASURED_TIMES if call.measured else 1.0) * starting


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


def relieved(speed: Speed, offload: str, quantization: str) -> Speed:
    """Return how a clip goes on in a more frugal way: without what takes memory of its own, or is excluded there."""
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
    """Refuse compiling with what excludes it, where both were asked for, and where this machine cannot.

    Raises:
        InvalidRequestError, MachineError: with what to do about it.
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
    """Return how many times as fast compiled blocks are, where nothing was measured."""
    return _COMPILED_SPEEDUP.get(quantization, 1.0)


def attention_speedup(kind: str, spec: ModelSpec, tokens: int) -> float:
    """Return how many times as fast a transformer is than with PyTorch's own attention, where nothing was measured."""
    transformer = spec.transformer
    whole = transformer.forward_flops(tokens, spec.max_sequence_length)
    share = transformer.num_layers * attention_flops(spec, tokens) / whole
    return 1 / (1 - share + share / _ATTENTION_SPEEDUP.get(kind, 1.0))


def decoder_speedup(dtype: str, outputs: int, capability: tuple[int, int]) -> float:
    """Return how many times as fast the VAE's kernels make decoding, where nothing was measured.

    Args:
        outputs: of the last block's convolutions.
    """
    if dtype == "float32":
        return _DECODER_SPEEDUP_FLOAT32
    all_of_it = outputs == constraints.OUTPUTS_BY_KERNEL and capability == constraints.HOPPER
    return _DECODER_SPEEDUP_ALL if all_of_it else _DECODER_SPEEDUP_BETWEEN


def tag(speed: Speed, component: str) -> str:
    """Return what two runs of a component must share in this to tell of each other; empty is diffusers' strategy."""
    if component == "vae":
        told: tuple[str, ...] = (
            "compiled" if speed.compiled else "",
            "channels last" if speed.channels_last else "",
        )
    elif component == "text_encoder":
        return ""
    else:
        told = (
            "compiled" if speed.compiled else "",
            "" if speed.attention == "native" else speed.attention,
            "paired" if speed.paired else "",
            "graphed" if speed.graphed else "",
        )
    return " ".join(word for word in told if word)
