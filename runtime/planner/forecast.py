"""Forecast of a clip, pure: memory and latency by stage, and build times of engines.

What was measured on this machine counts first: by earlier jobs (`planner.history`), then for latency when engines were
built, on engines and in PyTorch. Otherwise memory is that of `planner.memory_model`, and latency is the number of
operations over the device's rate, with a range. Engines are chosen by the same latency (`planner.choice`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import erfc, isclose, sqrt

from runtime.core.estimates import MemoryStrategy, Seconds, StageMemory
from runtime.core.plan import EAGER, PYTORCH, LatentSize, Speed, is_block_program
from runtime.core.request import AUTO, NO_NAG, OFF, SOUND_DECODERS, GenerationRequest
from runtime.core.sparse_attention import BLOCK, TAU, exact_share
from runtime.core.step_cache import NONE
from runtime.machine.probe import Gpu, Machine
from runtime.models.quantization import FP8
from runtime.models.spec import (
    CONNECTORS,
    IMAGE_ENCODER,
    LATENT_UPSAMPLER,
    ROW_KERNELS,
    VAE_ENCODER,
    ModelSpec,
    attention_flops,
    is_text_encoder,
    is_transformer,
)
from runtime.planner import constraints, history, memory_model, placement
from runtime.planner.choice.engine_index import EngineRecord
from runtime.planner.choice.engine_offers import EngineOffer, PyTorchPath
from runtime.planner.history import History
from runtime.planner.memory_model import DTYPE_BYTES, Workload, call_flops, weights_bytes

_TERA = 1e12
_GIGA = 1e9

# From data sheets: dense 16-bit tensor operations per second (10¹²) with float32 accumulation, and memory bandwidth
# (10⁹ bytes/s). The first entry that is part of the GPU's name counts.
_GPUS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2250, 8000),
    ("H200", 989, 4800),
    ("H100 PCIe", 756, 2000),
    ("H100", 989, 3350),
    ("A100", 312, 1750),
    ("L40S", 362, 864),
    ("L40", 181, 864),
    ("L4", 121, 300),
    ("A10", 70, 600),
    ("RTX 6000 Ada", 182, 960),
    ("RTX A6000", 77, 768),
    ("5090", 209, 1792),
    ("5080", 113, 960),
    ("5070", 62, 672),
    ("4090", 165, 1008),
    ("4080", 97, 717),
    ("4070", 58, 504),
    ("4060", 30, 272),
    ("3090", 71, 936),
    ("3080", 60, 760),
    ("3070", 40, 448),
    ("3060", 25, 360),
    ("V100", 112, 900),
    ("T4", 25, 320),
)
# Other GPUs, by compute capability: low values of that generation.
_BY_CAPABILITY: tuple[tuple[tuple[int, int], float, float], ...] = (
    ((12, 0), 60, 450),
    ((10, 0), 1500, 6000),
    ((9, 0), 600, 2000),
    ((8, 9), 30, 270),
    ((8, 0), 25, 350),
    ((0, 0), 20, 300),
)
# Fitted to the rows of tests/planner/measured_h200.jsonl that are marked so, by tests/planner/test_forecast.py, which
# holds the others to the estimate: the share of a transformer's matrix products in the GPU's rate, and what its norms,
# rotations and gates read and write at full bandwidth, in bytes per block, token and channel (more where each token
# has a timestep of its own).
_MATRIX_SHARE = 0.64
_BLOCK_TRAFFIC, _BLOCK_TRAFFIC_TIME_PER_TOKEN = 495, 633
# The part of these bytes that remains with the kernels of `models.row_kernels`, by the row without compilation and
# quantization of tests/planner/measured_h200_speedups.jsonl. Small models have too few values for them.
_KERNEL_TRAFFIC = 0.18
# The share of a decoder of 256 channels in its last level; it shrinks with that number.
_DECODE_SHARE = {"float32": 0.204, "float16": 0.318, "bfloat16": 0.318}
_DECODE_CHANNELS, _DECODE_POWER = 256, 0.71
# What is left of that where diffusers' module decodes a clip in one call: LTX-2's took about 0.9 s for 121 frames of
# 768×512 on an H200.
_DECODE_CLIP = 0.35
# Pixels per second of an MP4 that is written after such a call, instead of beside decoding: of these frames, whose
# encoding took 1.4 to 1.8 s there, with 32 cores.
_SAVED_PIXELS = 30e6
_TEXT_SHARE = 0.2
# GPUs without bfloat16 have no TF32 either: float32 runs outside the tensor cores.
_TF32_CAPABILITY = (8, 0)
_NO_TF32 = 1 / 8
# Operations per second of a CPU core in float32: 48 G on an EPYC with AVX-512, about half of that with AVX2.
_CORE_RATE = 40 * _GIGA

# Ranges, (low, high) as factors of the estimate.
_KNOWN_GPU = (0.75, 1.6)
_OTHER_GPU = (0.3, 2.5)
_CPU = (0.6, 2.5)
_ENGINE = (0.8, 1.3)
_SAVING = (0.5, 3.0)
# The least seconds of a component's engine that was never measured, as factors of uncompiled PyTorch's. Measured were
# 0.21 and more for the shipped model on an H200, where starting kernels takes longer than running them, 0.31 and more
# on CPUs (docs/tested.md), and 0.93 and more for large components (bench/h200.md), which is more against transformers
# with the kernels of `models.row_kernels`; their factor is a guess.
_ENGINE_AT_BEST = {"small": 0.2, "cpu": 0.3, "cuda": 0.87}
# Slowdown of quantized arithmetic against 16 bits, (low, likely, high), on an H200: bitsandbytes with three models, FP8
# with Wan2.2-A14B at 832×480, see `_quantized`.
_QUANTIZED: Mapping[str, tuple[float, float, float]] = {
    "none": (1.0, 1.0, 1.0),
    "fp8": (0.65, 0.874, 1.3),
    "bnb-8bit": (1.2, 1.6, 2.5),
    "bnb-4bit": (0.9, 1.0, 1.5),
}
# The share that FP8 saves of the time outside attention, and the share of the GPU's rate that PyTorch's own attention
# reaches in 16 bits; fitted to tests/planner/measured_h200_speedups.jsonl like the speedups below.
_FP8_SAVED, _NATIVE_ATTENTION_SHARE = 0.284, 0.57
# Share of the transformers' time that remains with a step cache, (low, likely, high): it depends on model and clip.
_CACHED = (0.3, 0.7, 1.05)
# How much of what a guidance cache can leave out it does leave out, (most, likely, least): it leaves out all passes but
# one in every other step at most. See bench/step_cache.md.
_GUIDANCE_LEFT_OUT = (1.0, 0.52, 0.0)
# Bytes per second from RAM to the GPU over PCIe 4: pinned, likely, pageable, and layer by layer.
_PCIE_FAST, _PCIE, _PCIE_SLOW, _PCIE_BY_LAYER = 25 * _GIGA, 16 * _GIGA, 12 * _GIGA, 6 * _GIGA
# Share of the shorter of transfer and computation that does not overlap with the longer.
_NOT_HIDDEN = 0.1
# Bytes per second from disk: NVMe or page cache, likely, and a hard disk.
_DISK_FAST, _DISK, _DISK_SLOW = 4 * _GIGA, 1 * _GIGA, 0.15 * _GIGA
# PyTorch, diffusers and transformers, from the page cache, on 2 cores.
_IMPORT_SECONDS = 3.5
# Creation of a component's modules, of any size.
_MODULE_SECONDS = 0.1

# Build seconds by builder, for components of up to 10⁸, up to 3·10⁹, and more parameters. Measured: TensorRT on an H200
# with the embedded model and with a part of a model of 1.3·10⁹ parameters, the others with the embedded model on 2
# cores; the rest is a guess.
_BUILD_SIZES = (100_000_000, 3_000_000_000)
_BUILD_SECONDS: Mapping[str, tuple[float, float, float]] = {
    "onnx_tensorrt": (40, 300, 900),
    "torch_tensorrt": (60, 300, 1200),
    "tensorrt_rtx": (8, 90, 300),
    "inductor": (40, 120, 300),
    "onnxruntime": (6, 60, 300),
}
# For each of the VAE's two programs, of any size: TensorRT times many implementations of each convolution.
_VAE_BUILD_SECONDS: Mapping[str, float] = {"onnx_tensorrt": 145, "torch_tensorrt": 180}
# For each of a transformer's block programs, of any size. TensorRT took 17 to 51 s on an H200 (width 5120).
_BLOCK_BUILD_SECONDS: Mapping[str, float] = {
    "tensorrt_blocks": 40,
    "tensorrt_rtx_blocks": 5,
    "tensorrt_rtx_blocks_fp8": 8,
    "onnxruntime_blocks": 5,
}
# Start of the child process, loading, comparison with PyTorch and measurements, for each build.
_CHILD_SECONDS = 5.0


# Speedups on an H200, used where nothing was measured on this machine. Fitted to the rows of
# tests/planner/measured_h200_speedups.jsonl that are marked so; tests hold estimates to the others.
# Compiled transformer blocks, by quantization, against uncompiled ones with the kernels of `models.row_kernels`; and
# without quantization against those of families without kernels for norms and gates.
_COMPILED_SPEEDUP: Mapping[str, float] = {"none": 1.013, "fp8": 1.039}
_COMPILED_SPEEDUP_WITHOUT_KERNELS = 1.173
# Attention kernels against PyTorch's own.
_ATTENTION_SPEEDUP: Mapping[str, float] = {"flash4": 1.215, "fp8": 1.477}
# Normalized attention guidance reads and writes the results of attention to both texts several times, which takes as
# long as attention to so many more text tokens. Measured on two cores, 350 to 580; by its memory traffic, about 900 on
# a GPU, and 250 where blocks are compiled.
_NAG_KEYS = 500
# Sparse attention with a threshold of 1: its seconds as a share of those of PyTorch's own, which falls to the first
# number with more tokens. Fitted to 17.0 ms at 32,760 tokens and 80.8 ms at 75,600; FlashAttention 4 took 32.6 and
# 177 ms. Other thresholds were not measured: the first number is taken to grow with the attended share of the blocks.
_SPARSE_SHARE, _SPARSE_TOKENS = 0.348, 2670.0
# The VAE's Triton kernels in 16 bits, for all convolutions or only between cuDNN's, and in float32.
_DECODER_SPEEDUP_ALL, _DECODER_SPEEDUP_BETWEEN, _DECODER_SPEEDUP_FLOAT32 = 2.13, 1.505, 1.36


@dataclass(frozen=True, kw_only=True)
class ForecastInputs:
    """What forecasts and execution options depend on besides the memory strategy.

    Attributes:
        calls: number of calls of each component: prompts, forward passes of each expert, and 1 for the VAE.
        backends: by component.
        free_bytes: of the device.
        chunk: latent frames that the VAE decodes in one call if memory suffices.
        guided: whether any transformer runs with guidance.
        nag: see `plan.Speed`.
        loads: how often transformers are loaded whose LoRAs change between steps, by name.
        step_cache: with its strength, or "none".
        long_lived: see `resolve.PlanningContext`.
        compiles_when_idle: whether code may be compiled for later clips when no video waits.
        base: execution options that all strategies share.
        offers: all engines for each component, with those that the request's settings exclude.
        levels: factors on the measured seconds of the engines in use, see `level`.
        scaled: components whose engines were measured at another size.
    """

    request: GenerationRequest
    workload: Workload
    calls: Mapping[str, float]
    machine: Machine
    history: History
    backends: Mapping[str, str]
    free_bytes: int
    chunk: int
    guided: bool = False
    nag: float = NO_NAG
    loads: Mapping[str, int] = field(default_factory=dict)
    step_cache: str = NONE
    long_lived: bool = False
    compiles_when_idle: bool = False
    base: Speed = EAGER
    offers: Mapping[str, Sequence[EngineOffer]] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    scaled: frozenset[str] = frozenset()

    @property
    def in_pytorch(self) -> tuple[str, ...]:
        """The transformers that run in PyTorch alone."""
        return tuple(name for name, backend in self.backends.items() if is_transformer(name) and backend == PYTORCH)

    @property
    def in_blocks(self) -> tuple[str, ...]:
        """The transformers whose engines compute parts of each block."""
        return tuple(name for name in self.backends if self.workload.in_blocks(name))

    @property
    def loaded(self) -> tuple[str, ...]:
        """The transformers whose weights PyTorch loads."""
        return (*self.in_pytorch, *self.in_blocks)


def memory(inputs: ForecastInputs, strategy: MemoryStrategy, speed: Speed) -> tuple[StageMemory, ...]:
    """Return the memory of each stage, corrected by earlier runs."""
    workload = replace(inputs.workload, working_sets=memory_model.working_sets(speed))
    stages = memory_model.stages(workload, strategy)
    if not inputs.history:
        return stages
    return tuple(
        history.corrected_by_history(
            inputs.history,
            _kind(inputs, strategy, stage.component, speed),
            inputs.workload.flops(stage.component, strategy.decode_tile),
            stage,
        )
        for stage in stages
    )


def seconds(inputs: ForecastInputs, strategy: MemoryStrategy, speed: Speed) -> dict[str, Seconds]:
    """Return the latency of each stage, their "total", and "load", which the total excludes.

    There is also "mux", as in the timings of a video, if all frames are decoded before the first one is written.
    """
    by_stage = dict.fromkeys(("encode", "denoise", "decode"), Seconds(0, 0, 0, measured=True))
    for name in inputs.workload.spec.component_names:
        by_stage[memory_model.stage_of(name)] += component_seconds(inputs, strategy, name, speed)
    total = by_stage["encode"] + by_stage["denoise"] + by_stage["decode"]
    if _decodes_whole_clips(inputs.workload.spec):
        # It rests on no measurement here, but is a small part: the total has the basis of the others.
        saving = _saving_seconds(inputs.workload)
        by_stage["mux"] = saving
        total += replace(saving, measured=total.measured, inferred=total.inferred)
    load = load_seconds(inputs.workload)
    for name, loads in inputs.loads.items():
        load += reading_seconds(inputs.workload, {name}) * (loads - 1)
    return by_stage | {"total": total, "load": load}


def call_seconds(inputs: ForecastInputs, strategy: MemoryStrategy, name: str, speed: Speed) -> Seconds:
    """Return the latency of one call with all weights on the device, based on the most similar measurement."""
    exact = _known_call(inputs, strategy, name, speed)
    if exact is not None:
        return exact
    workload = inputs.workload
    if name in workload.engine_bytes and name not in workload.engine_seconds:
        return _unmeasured_engine(inputs, strategy, name, speed)
    measured = _similar_call(inputs, strategy, name, speed)
    if measured is not None:
        like, call = measured
    else:
        like, alone = EAGER, compute_seconds(workload, name, inputs.machine, strategy)
        whole_frames = name != "vae" or strategy.decode_tile is None
        call = placement.faster_by_split(alone, workload.split, name) if whole_frames else alone
    speedup = 1.0
    if inputs.backends[name] == PYTORCH and speed.compiles(name) and not like.compiles(name):
        speedup *= _compiled_speedup(inputs, strategy, name)
    if name in inputs.loaded:
        speedup *= attention_speedup(speed, workload) / attention_speedup(like, workload)
    return call if speedup == 1.0 else replace(call * (1 / speedup), measured=False, inferred=False)


def _unmeasured_engine(inputs: ForecastInputs, strategy: MemoryStrategy, name: str, speed: Speed) -> Seconds:
    """Return the latency of one call on engines of a whole component that were not measured: about PyTorch's."""
    workload = inputs.workload
    without = replace(
        workload,
        engines={other: uses for other, uses in workload.engines.items() if other != name},
        engine_bytes={other: size for other, size in workload.engine_bytes.items() if other != name},
    )
    in_pytorch = replace(inputs, backends={**inputs.backends, name: PYTORCH}, workload=without)
    plain = call_seconds(in_pytorch, strategy, name, speed.replace(compiled=False, vae_kernels=False))
    return unmeasured_engine(plain, "cpu" if not workload.cuda else "small" if workload.spec.small else "cuda")


def unmeasured_engine(in_pytorch: Seconds, kind: str) -> Seconds:
    """Return the latency of an engine of a whole component that was not measured: about that in PyTorch, uncompiled.

    Args:
        kind: of the component: "cpu", "small" or "cuda", a large one on a GPU.
    """
    return replace(in_pytorch.as_inferred(), low=_ENGINE_AT_BEST[kind] * in_pytorch.likely)


def _known_call(inputs: ForecastInputs, strategy: MemoryStrategy, name: str, speed: Speed) -> Seconds | None:
    """Return the latency of one call as it was measured with these options, `None` if it was not."""
    call = _ran_call(inputs, strategy, name, speed)
    if call is not None:
        return call
    workload = inputs.workload
    if inputs.backends[name] == PYTORCH:
        return _suppressing(_beside_engines(inputs, strategy, name, speed), speed, workload)
    if name not in workload.engine_seconds:
        return None
    if workload.in_blocks(name):
        alone = _in_blocks(inputs, name, speed)
    else:
        alone = compute_seconds(workload, name, inputs.machine, strategy)
    factor = inputs.levels.get(name, 1.0)
    call = placement.faster_by_split(alone, workload.split, name) * factor
    as_measured = factor == 1.0 and name not in inputs.scaled and not workload.in_blocks(name)
    return call if as_measured else call.as_inferred()


def _ran_call(inputs: ForecastInputs, strategy: MemoryStrategy, name: str, speed: Speed) -> Seconds | None:
    """Return the latency of one call in earlier jobs with these options; the caller accounts for a step cache."""
    if not inputs.history:
        return None
    kind = _kind(inputs, strategy.replace(offload="none"), name, speed).replace(step_cache="")
    return history.seconds_per_call(inputs.history, kind, inputs.workload.flops(name, strategy.decode_tile))


def _similar_call(
    inputs: ForecastInputs, strategy: MemoryStrategy, name: str, speed: Speed
) -> tuple[Speed, Seconds] | None:
    """Return the most similar options of PyTorch with which earlier jobs measured a call, and its seconds."""
    if not inputs.history:
        return None
    without = ({"compiled": False, "vae_kernels": False}, {"sparse_tau": None}, {"nag": EAGER.nag})
    for like in (*(speed.replace(**fields) for fields in without), EAGER):
        call = _ran_call(inputs, strategy, name, like)
        if call is not None:
            return like, call
    return None


def _beside_engines(inputs: ForecastInputs, strategy: MemoryStrategy, name: str, speed: Speed) -> Seconds | None:
    """Return the latency of one call in PyTorch as it was measured when an engine was built; `None` if it was not.

    A job takes longer than a measurement of the component alone. If jobs ran on the engine, they tell by how much.
    """
    path = pytorch_path(inputs, strategy, name, speed)
    alone: Seconds | None = None
    for offer in inputs.offers.get(name, ()):
        built = offer.compared(path)
        if not built.speedup:
            continue
        job_call = history.seconds_per_call(
            inputs.history, _kind_on(inputs, strategy, name, speed, offer), inputs.workload.flops(name)
        )
        if job_call is not None:
            return measured_alone(built.pytorch * job_call.likely / built.engine)
        if alone is None:
            likely, low, high = built.pytorch, _ENGINE[0] * built.pytorch, _ENGINE[1] * built.pytorch
            alone = Seconds(likely, low, high, built.measured, inferred=not built.measured)
    return alone


def _suppressing(call: Seconds | None, speed: Speed, workload: Workload) -> Seconds | None:
    """Return a call that was measured with a prompt alone, with a negative prompt if the options have its attention."""
    if call is None or speed.nag == NO_NAG:
        return call
    return (call * (1 / attention_speedup(EAGER.replace(nag=speed.nag), workload))).as_inferred()


def pytorch_path(inputs: ForecastInputs, strategy: MemoryStrategy, name: str, speed: Speed) -> PyTorchPath:
    """Return what runs a component in PyTorch."""
    workload, request, transformer = inputs.workload, inputs.request, is_transformer(name)
    usual = name != "vae" or (request.vae_precision == AUTO and strategy.decode_tile is None)
    return PyTorchPath(
        compiled=speed.compiles(name) and (transformer or (name == "vae" and workload.cuda)),
        quantization=strategy.quantization if transformer else "none",
        as_measured=usual,
        usual_attention=not transformer or not workload.cuda or request.attention == AUTO,
        attention_seconds=attention_seconds(inputs, workload.dtypes[name], speed) if transformer else 0.0,
        faster=1 / placement.faster_by_split(Seconds(1, 1, 1), workload.split, name).likely,
    )


def measured_path(inputs: ForecastInputs, strategy: MemoryStrategy, name: str, speed: Speed) -> PyTorchPath:
    """Return what runs a component in PyTorch, with its measured seconds."""
    call = _known_call(inputs, strategy, name, speed)
    path = pytorch_path(inputs, strategy, name, speed)
    return path if call is None else replace(path, seconds=call.likely)


def level(offer: EngineOffer, path: PyTorchPath) -> float:
    """Return by which factor an engine's measured seconds are corrected to be comparable with those of `path`.

    If jobs ran in PyTorch and not on the engine, the engine's seconds are PyTorch's in jobs, times the ratio that was
    measured when the engine was built.
    """
    built = offer.compared(replace(path, seconds=0.0))
    return path.seconds / built.pytorch if path.seconds and built.speedup else 1.0


def known_call(inputs: ForecastInputs, strategy: MemoryStrategy, name: str, speed: Speed) -> Seconds | None:
    """Return one call as `seconds` has it, with transfers and a step cache; `None` if no measurement is known.

    It is measured if this very call was: in a job, or when its engine was built.
    """
    source = _ran(inputs, strategy, name, speed) or _known_call(inputs, strategy, name, speed)
    if source is None:
        return None
    calls = inputs.calls[name] or 1.0
    call = _seconds_of_calls(inputs, strategy, name, speed, calls) * (1 / calls)
    measured = source.measured and isclose(call.likely, source.likely)
    return replace(call, measured=measured, inferred=not measured)


def component_seconds(inputs: ForecastInputs, strategy: MemoryStrategy, name: str, speed: Speed) -> Seconds:
    """Return the latency of all calls of a component; measured only if jobs of its size and kind ran."""
    return _seconds_of_calls(inputs, strategy, name, speed, inputs.calls[name])


def attention_between(inputs: ForecastInputs, _: MemoryStrategy, name: str, speed: Speed) -> float:
    """Return the seconds of one call that are PyTorch's attention between block engines; 0 without them."""
    workload = inputs.workload
    if not workload.in_blocks(name):
        return 0.0
    alone = attention_seconds(inputs, workload.dtypes[name], speed)
    return placement.faster_by_split(Seconds(alone, alone, alone), workload.split, name).likely


def compute_seconds(workload: Workload, component: str, machine: Machine, strategy: MemoryStrategy) -> Seconds:
    """Estimate one call on its device with all weights there; an engine's own measurement counts first."""
    if component in workload.engine_seconds and component in workload.engine_bytes:
        measured = workload.engine_seconds[component]
        return Seconds(measured, _ENGINE[0] * measured, _ENGINE[1] * measured, measured=True)
    if workload.cuda:
        return _on_gpu(workload, component, machine, strategy)
    return _on_cpu(workload.flops(component, strategy.decode_tile), machine)


def _on_cpu(operations: float, machine: Machine) -> Seconds:
    likely = operations / (_CORE_RATE * machine.cores)
    return Seconds(likely, _CPU[0] * likely, _CPU[1] * likely)


def network_seconds(operations: float, device: str, machine: Machine) -> Seconds:
    """Estimate how long a small network takes in PyTorch, in float32.

    Args:
        operations: of all calls.
        device: a torch device.
    """
    if device == "cpu":
        return _on_cpu(operations, machine)
    rate, _, slower, known_gpu = _rates(machine.gpu_of(device), "float32")
    likely = operations / (_DECODE_SHARE["float32"] * slower * rate)
    low, high = _KNOWN_GPU if known_gpu else _OTHER_GPU
    return Seconds(likely, low * likely, high * likely)


def decode_seconds(spec: ModelSpec, operations: float, dtype: str, device: str, machine: Machine) -> Seconds:
    """Estimate decoding latents in PyTorch, uncompiled, with the weights on the device.

    Args:
        operations: of the decoder.
        device: a torch device.
    """
    if device == "cpu":
        return _on_cpu(operations, machine)
    rate, _, slower, known_gpu = _rates(machine.gpu_of(device), dtype)
    likely = operations / (_decoder_share(spec, dtype, slower) * rate)
    low, high = _KNOWN_GPU if known_gpu else _OTHER_GPU
    return Seconds(likely, low * likely, high * likely)


def _decodes_whole_clips(spec: ModelSpec) -> bool:
    return "chunks" in spec.lacks


def _saving_seconds(workload: Workload) -> Seconds:
    """Estimate encoding the frames of a clip as an MP4."""
    frames = (workload.decoded - 1) * workload.spec.vae.scale_factor_temporal + 1
    likely = frames * workload.height * workload.width / _SAVED_PIXELS
    return Seconds(likely, _SAVING[0] * likely, _SAVING[1] * likely)


def _decoder_share(spec: ModelSpec, dtype: str, slower: float) -> float:
    """Return the share of a GPU's rate that a decoder reaches; `slower` as from `_rates`."""
    share: float = _DECODE_SHARE[dtype] * min((spec.vae.last_channels / _DECODE_CHANNELS) ** _DECODE_POWER, 1.0)
    return share * (2 * slower if DTYPE_BYTES[dtype] == DTYPE_BYTES["float32"] else 1.0)


def measured_alone(likely: float) -> Seconds:
    """Return a duration that follows from one call of a component that was measured by itself."""
    return Seconds(likely, _ENGINE[0] * likely, _ENGINE[1] * likely, inferred=True)


def attention_seconds(inputs: ForecastInputs, dtype: str, speed: Speed) -> float:
    """Return the seconds of the attention in one forward pass on one GPU: measured on this machine, else estimated."""
    workload, spec = inputs.workload, inputs.workload.spec
    flops = attention_flops(spec, workload.tokens)
    # Cross-attention, in proportion.
    texts = 1 if speed.nag == NO_NAG else 2
    calls = spec.blocks * (1 + texts * spec.max_sequence_length / workload.tokens)
    device = history.device_name(inputs.machine, workload.device)
    measured = history.attention_seconds(inputs.history, device, dtype, flops).get(speed.attention)
    share = _attention_share(speed, workload)
    if measured is not None:
        return calls * measured.likely * share / _attention_share(speed.replace(sparse_tau=None), workload)
    if not workload.cuda:
        return calls * flops / (_CORE_RATE * inputs.machine.cores)
    rate, _, slower, _ = _rates(inputs.machine.gpu_of(workload.device), dtype)
    return calls * flops / (_MATRIX_SHARE * rate * slower) * share


def _in_blocks(inputs: ForecastInputs, name: str, speed: Speed) -> Seconds:
    """Return the seconds of one forward pass on measured block engines, with attention between them."""
    workload = inputs.workload
    likely = workload.engine_seconds[name] + attention_seconds(inputs, workload.dtypes[name], speed)
    return Seconds(likely, _ENGINE[0] * likely, _ENGINE[1] * likely, measured=True)


def transfer_seconds(workload: Workload, strategy: MemoryStrategy, component: str, calls: float) -> Seconds:
    """Estimate the transfers of a component's weights to the GPU over all its calls.

    Sections use the transformer and the VAE in turn: each time, weights that are not kept are brought or read again.
    """
    times = workload.sections if memory_model.stage_of(component) != "encode" else 1
    if strategy.offload == "none" and times > 1 and not strategy.keeps(component):
        return reading_seconds(workload, {component}) * (times - 1)
    if strategy.offload == "none" or component in workload.engine_bytes:
        return Seconds(0, 0, 0)
    size = weights_bytes(workload.spec, workload.dtypes, strategy.quantization)[component]
    if strategy.offload == "model" or not (is_transformer(component) or component == "text_encoder"):
        return Seconds(size / _PCIE, size / _PCIE_FAST, size / _PCIE_SLOW) * times
    if strategy.offload == "group":
        return Seconds(size / _PCIE, size / _PCIE_FAST, size / _PCIE_SLOW) * calls
    return Seconds(size / _PCIE_SLOW, size / _PCIE, size / _PCIE_BY_LAYER) * calls


def stage_seconds(compute: Seconds, transfer: Seconds, strategy: MemoryStrategy) -> Seconds:
    """Combine computation and transfer: they overlap with offload by group, otherwise one waits for the other."""
    if strategy.offload != "group":
        together = replace(compute + transfer, measured=compute.measured, inferred=compute.inferred)
        return together if strategy.offload == "none" and not transfer.likely else together.as_inferred()
    return Seconds(
        max(compute.likely, transfer.likely) + _NOT_HIDDEN * min(compute.likely, transfer.likely),
        max(compute.low, transfer.low),
        compute.high + transfer.high,
        inferred=compute.known,
    )


def load_seconds(workload: Workload) -> Seconds:
    """Estimate how long reading all weights from disk takes."""
    return reading_seconds(workload, set(workload.spec.component_names))


def reading_seconds(workload: Workload, components: set[str]) -> Seconds:
    """Estimate how long reading the weights of some components from disk takes."""
    every = weights_bytes(workload.spec, workload.dtypes) | dict(workload.engine_bytes)
    sizes = {name: size for name, size in every.items() if name in components}
    return read_seconds(sum(sizes.values()), len(sizes))


def read_seconds(size: int, components: int = 1) -> Seconds:
    """Estimate how long making components and reading their `size` bytes of weights from disk takes."""
    modules = _MODULE_SECONDS * components
    return Seconds(size / _DISK + modules, size / _DISK_FAST + modules, size / _DISK_SLOW + 2 * modules)


def process_seconds(size: int) -> float:
    """Return about how long a new process takes to import its libraries and to read `size` bytes of weights."""
    return _IMPORT_SECONDS + read_seconds(size).likely


def build_seconds(
    spec: ModelSpec, component: str, program: str, builder: str, size: LatentSize, index: Iterable[EngineRecord] = ()
) -> float:
    """Return about how many seconds building an engine takes.

    Args:
        component: whose weights.
        program: what is built.
        builder: what builds it.
        size: (latent frames, height, width) that it is built for.
        index: the engines on this machine. The latest of the same model, program and builder counts; its build time is
            scaled by the operations of a call if they are more, except that of block engines, which serve every size.
    """
    in_blocks = is_block_program(program)
    built = [
        record
        for record in index
        if (record.key.program, record.key.builder) == (program, builder)
        # Block engines belong to an architecture, not to a model.
        and (record.key.family == spec.family if in_blocks else record.model == spec.name)
        and record.build_seconds > 0
        and record.key.profiles
    ]
    if built:
        last = max(built, key=lambda record: record.built_at)
        if in_blocks:
            return last.build_seconds
        before = last.key.profiles[0].opt
        # Loading, exporting and compiling take as long for a smaller clip.
        return last.build_seconds * max(call_flops(spec, component, size) / call_flops(spec, component, before), 1.0)
    if in_blocks:
        return _BLOCK_BUILD_SECONDS[builder] + _CHILD_SECONDS
    if component in {"vae", VAE_ENCODER} and builder in _VAE_BUILD_SECONDS:
        return _VAE_BUILD_SECONDS[builder] + _CHILD_SECONDS
    parameters = spec.parameters[component]
    return _BUILD_SECONDS[builder][sum(parameters > largest for largest in _BUILD_SIZES)] + _CHILD_SECONDS


def _kind(inputs: ForecastInputs, strategy: MemoryStrategy, name: str, speed: Speed) -> history.Kind:
    transformer, workload = is_transformer(name), inputs.workload
    return history.Kind(
        device=placement.devices_name(history.device_name(inputs.machine, workload.device), workload.split, name),
        model=history.architecture(workload.spec),
        component="transformer" if transformer else name,
        backend=inputs.backends[name],
        dtype=workload.dtypes[name],
        quantization=strategy.quantization if transformer else "none",
        offload=strategy.offload,
        tile=history.tile_of(strategy, name),
        step_cache=history.cache_of(inputs.step_cache, inputs.request.guidance_cache, name),
        speed=_tag(inputs, name, speed),
    )


def _tag(inputs: ForecastInputs, name: str, speed: Speed) -> str:
    if inputs.workload.in_blocks(name):
        return history.blocks_tag(speed)
    uses = inputs.workload.engines.get(name)
    return history.whole_tag(uses) if uses else history.history_tag(speed, name)


def _kind_on(
    inputs: ForecastInputs, strategy: MemoryStrategy, name: str, speed: Speed, offer: EngineOffer
) -> history.Kind:
    """Return the kind of the calls of a component on the engines of an offer, without offload and step cache."""
    kind = _kind(inputs, strategy.replace(offload="none"), name, speed)
    if not offer.in_blocks:
        return kind.replace(backend=offer.backend, step_cache="", tile="", speed=history.whole_tag(offer.engines))
    precision = offer.engines[0].precision
    dtype = precision if precision in DTYPE_BYTES else kind.dtype
    return kind.replace(backend=offer.backend, step_cache="", dtype=dtype, speed=history.blocks_tag(speed))


def _seconds_of_calls(
    inputs: ForecastInputs, strategy: MemoryStrategy, name: str, speed: Speed, calls: float
) -> Seconds:
    per_call = _ran(inputs, strategy, name, speed)
    if per_call is not None:
        return per_call * calls
    call = call_seconds(inputs, strategy, name, speed)
    if history.cache_of(inputs.step_cache, OFF, name):
        call = Seconds(_CACHED[1] * call.likely, _CACHED[0] * call.low, _CACHED[2] * call.high)
    if history.cache_of(NONE, inputs.request.guidance_cache, name):
        passes = inputs.workload.spec.guidance_passes
        low, likely, high = (1 - share * (passes - 1) / (2 * passes) for share in _GUIDANCE_LEFT_OUT)
        call = Seconds(likely * call.likely, low * call.low, high * call.high)
    whole = stage_seconds(call * calls, transfer_seconds(inputs.workload, strategy, name, calls), strategy)
    # What was measured by itself, when an engine was built, is no measurement of a clip.
    as_ran = strategy.offload != "none" or _ran_call(inputs, strategy, name, speed) is not None
    return whole if as_ran else whole.as_inferred()


def _ran(inputs: ForecastInputs, strategy: MemoryStrategy, name: str, speed: Speed) -> Seconds | None:
    """Return the seconds of one call in earlier jobs of the same kind, offload and step cache included."""
    if not inputs.history:
        return None
    operations = inputs.workload.flops(name, strategy.decode_tile)
    return history.seconds_per_call(inputs.history, _kind(inputs, strategy, name, speed), operations)


def _compiled_speedup(inputs: ForecastInputs, strategy: MemoryStrategy, name: str) -> float:
    if is_transformer(name):
        return compiled_speedup(inputs.workload.spec, strategy.quantization)
    workload = inputs.workload
    if name != "vae" or not workload.cuda or "compiled_vae" in workload.spec.lacks:
        return 1.0
    gpu = inputs.machine.gpu_of(workload.device)
    return decoder_speedup(workload.dtypes[name], workload.spec.vae.last_channels, gpu.capability)


def _on_gpu(workload: Workload, component: str, machine: Machine, strategy: MemoryStrategy) -> Seconds:
    dtype = workload.dtypes[component]
    rate, bandwidth, slower, is_known = _rates(machine.gpu_of(workload.device), dtype)
    operations = workload.flops(component, strategy.decode_tile)
    low, high = _KNOWN_GPU if is_known else _OTHER_GPU
    if is_text_encoder(component) or component in {CONNECTORS, IMAGE_ENCODER}:
        likely = operations / (_TEXT_SHARE * rate * slower)
    elif component in {"vae", VAE_ENCODER, LATENT_UPSAMPLER, *SOUND_DECODERS}:
        share = _decoder_share(workload.spec, dtype, slower)
        share *= _DECODE_CLIP if component == "vae" and _decodes_whole_clips(workload.spec) else 1.0
        likely = operations / (share * rate)
    else:
        spec = workload.spec.transformer
        per_token = _BLOCK_TRAFFIC_TIME_PER_TOKEN if workload.spec.expand_timesteps else _BLOCK_TRAFFIC
        traffic = float(per_token * workload.spec.blocks * workload.tokens * spec.width)
        if machine.version_of("triton") and not workload.spec.small and ROW_KERNELS not in workload.spec.lacks:
            traffic *= _KERNEL_TRAFFIC
        likely = operations / (_MATRIX_SHARE * rate * slower) + traffic / bandwidth
        attention = workload.spec.blocks * attention_flops(workload.spec, workload.tokens)
        share = attention / (_NATIVE_ATTENTION_SHARE * rate * slower) / likely
        quick, usual, slow = _quantized(strategy.quantization, min(share, 1.0))
        return Seconds(usual * likely, quick * low * likely, slow * high * likely)
    return Seconds(likely, low * likely, high * likely)


def _quantized(quantization: str, attention_share: float) -> tuple[float, float, float]:
    """Return the slowdown of quantized arithmetic, (low, likely, high); FP8 saves time outside attention only.

    Args:
        attention_share: of attention in the time of a pass in 16 bits.
    """
    low, likely, high = _QUANTIZED[quantization]
    usual = 1 - _FP8_SAVED * (1 - attention_share) if quantization == FP8 else likely
    return low * usual / likely, usual, high * usual / likely


def _rates(gpu: Gpu, dtype: str) -> tuple[float, float, float, bool]:
    """Return a GPU's operations and bytes per second, the share of operations in a dtype, and if it is a known GPU."""
    entry = next(((rate, memory) for name, rate, memory in _GPUS if name in gpu.name), None)
    rate, bandwidth = entry or next((rate, memory) for least, rate, memory in _BY_CAPABILITY if gpu.capability >= least)
    full = DTYPE_BYTES[dtype] == DTYPE_BYTES["float32"]
    slower = (_NO_TF32 if gpu.capability < _TF32_CAPABILITY else 0.5) if full else 1.0
    return rate * _TERA, bandwidth * _GIGA, slower, entry is not None


def compiled_speedup(spec: ModelSpec, quantization: str) -> float:
    """Return the estimated speedup of compiled blocks."""
    if quantization == "none" and ROW_KERNELS in spec.lacks:
        return _COMPILED_SPEEDUP_WITHOUT_KERNELS
    return _COMPILED_SPEEDUP.get(quantization, 1.0)


def attention_speedup(speed: Speed, workload: Workload) -> float:
    """Return the estimated speedup of a transformer by its attention, against PyTorch's own and a prompt alone."""
    spec, tokens = workload.spec, workload.tokens
    whole = spec.transformer.forward_flops(tokens, spec.max_sequence_length)
    share = spec.blocks * attention_flops(spec, tokens) / whole
    # Attention to a negative prompt, and what is computed of both results.
    suppressing = 0.0 if speed.nag == NO_NAG else share * (spec.max_sequence_length + _NAG_KEYS) / tokens
    return 1 / (1 - share + share * _attention_share(speed, workload) + suppressing)


def _attention_share(speed: Speed, workload: Workload) -> float:
    """Return the estimated seconds of attention as a share of those of PyTorch's own, over all steps of a video."""
    exact = 1 / _ATTENTION_SPEEDUP.get(speed.attention, 1.0)
    if speed.sparse_tau is None:
        return exact
    attended = _attended(speed.sparse_tau) / _attended(TAU)
    sparse = _SPARSE_SHARE * attended + _SPARSE_TOKENS / workload.tokens
    share = exact_share(workload.spec.blocks)
    return share * exact + (1 - share) * sparse


def _attended(tau: float) -> float:
    """Return the share of keys that a block of queries attends to: exactly, of Gaussian scores, and by pooled terms."""
    return erfc(tau / sqrt(2)) / 2 + 1 / BLOCK


def decoder_speedup(dtype: str, outputs: int, capability: tuple[int, int]) -> float:
    """Return the estimated speedup of decoding by Triton kernels.

    Args:
        outputs: channels of the last block's convolutions.
    """
    if dtype == "float32":
        return _DECODER_SPEEDUP_FLOAT32
    all_convolutions = outputs == constraints.OUTPUTS_BY_KERNEL and capability == constraints.HOPPER
    return _DECODER_SPEEDUP_ALL if all_convolutions else _DECODER_SPEEDUP_BETWEEN
