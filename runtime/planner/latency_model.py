"""How long each stage takes, with its uncertainty: operations over the device's rate, or what was measured here.

Pure functions of the model, the machine and what earlier runs measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.core.estimates import MemoryStrategy, Seconds
from runtime.core.tiles import times_decoded
from runtime.machine.probe import Machine
from runtime.models.spec import is_transformer
from runtime.planner.memory_model import DTYPE_BYTES, Load, weights_bytes

_TERA = 1e12
_GIGA = 1e9

# Dense 16-bit tensor operations a second with sums in float32, and bytes a second from memory: the makers' data sheets.
# The first name that a GPU's holds counts.
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
# A GPU of another name: low for its generation. (compute capability, tera-operations, gigabytes a second)
_BY_CAPABILITY: tuple[tuple[tuple[int, int], float, float], ...] = (
    ((12, 0), 60, 450),
    ((10, 0), 1500, 6000),
    ((9, 0), 600, 2000),
    ((8, 9), 30, 270),
    ((8, 0), 25, 350),
    ((0, 0), 20, 300),
)
# Shares of that, fitted to H200 measurements: transformers of 1.3 to 14 billion weights and their decoders are within
# 16 % at every size. A decoder's rate grows with its last level's channels (96 and 256 were measured).
_MATRIX_SHARE = 0.6
_MEMORY_SHARE = 0.7
# What a block reads and writes beside its matrix products, bytes per token and channel: norms, rotations and gates.
_BLOCK_TRAFFIC = 200
_BLOCK_TRAFFIC_TIME_PER_TOKEN = 300
_TEXT_SHARE = 0.2
_DECODE_SHARE = {"float32": 0.21, "float16": 0.32, "bfloat16": 0.32}
_DECODE_CHANNELS, _DECODE_POWER = 256, 0.7
# Without 16-bit brain floats there are no TF32 tensor cores either: float32 takes the slow strategy.
_TF32_CAPABILITY = (8, 0)
_NO_TF32 = 1 / 8
# A core's operations a second in float32, in PyTorch: 48 on an EPYC with AVX-512, about half that with AVX2.
_CORE_RATE = 40 * _GIGA

# How far off an estimate may be: (low, high) as factors.
_KNOWN_GPU = (0.75, 1.6)
_OTHER_GPU = (0.3, 2.5)
_CPU = (0.6, 2.5)
_ENGINE = (0.8, 1.3)
# Earlier runs here: other programs may run beside the next. The same size, and another.
MEASURED = (0.75, 1.4)
SCALED = (0.6, 1.7)
# What arithmetic in quantized weights costs beside 16-bit ones, (low, likely, high): on an H200, with three models.
_QUANTIZED: Mapping[str, tuple[float, float, float]] = {
    "none": (1.0, 1.0, 1.0),
    "fp8": (0.95, 1.1, 1.4),
    "bnb-8bit": (1.2, 1.6, 2.5),
    "bnb-4bit": (0.9, 1.0, 1.5),
}
# What a step cache leaves of the arithmetic, (low, likely, high): it depends on the model, the steps and the clip.
_CACHED = (0.3, 0.7, 1.05)
# Bytes a second from system memory to the GPU: pinned over PCIe 4, likely, and from ordinary memory or layer by layer.
_PCIE_FAST, _PCIE, _PCIE_SLOW, _PCIE_BY_LAYER = 25 * _GIGA, 16 * _GIGA, 12 * _GIGA, 6 * _GIGA
# Of what is brought while another group computes, this much is waited for all the same.
_NOT_HIDDEN = 0.1
# Bytes a second from disk: an NVMe disk or the system's cache, likely, and a disk that turns.
_DISK_FAST, _DISK, _DISK_SLOW = 4 * _GIGA, 1 * _GIGA, 0.15 * _GIGA
# Making one component's modules, whatever its size.
_MAKE_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a clip makes each component do.

    Attributes:
        calls: by component: prompts read, forward passes of each expert, and 1 for the VAE.
        frames: of the clip.
        engine_seconds: of one call, for components on engines that were measured here.
    """

    calls: Mapping[str, float]
    frames: int
    engine_seconds: Mapping[str, float]


def flops(load: Load, work: Work, component: str, tile: int | None = None) -> float:
    """Return the operations of one call of a component; of the whole clip for the VAE.

    Args:
        tile: side of the tiles that the VAE decodes frames in, in latents; where they overlap it decodes again.
    """
    spec = load.spec
    if component == "text_encoder":
        return 2.0 * spec.parameters[component] * spec.max_sequence_length
    if component == "vae":
        whole = spec.vae.decode_flops(work.frames, load.height, load.width)
        return whole * times_decoded(*load.latent_shape[3:], tile)
    return spec.transformer.forward_flops(load.tokens, spec.max_sequence_length)


def compute_seconds(load: Load, work: Work, component: str, machine: Machine, strategy: MemoryStrategy) -> Seconds:
    """Return what one call takes on its device, all weights at hand."""
    if component in work.engine_seconds:
        seconds = work.engine_seconds[component]
        return Seconds(seconds, _ENGINE[0] * seconds, _ENGINE[1] * seconds, measured=True)
    if load.cuda:
        return _on_gpu(load, work, component, machine, strategy)
    seconds = flops(load, work, component, strategy.decode_tile) / (_CORE_RATE * machine.cores)
    return Seconds(seconds, _CPU[0] * seconds, _CPU[1] * seconds)


def transfer_seconds(load: Load, strategy: MemoryStrategy, component: str, calls: float) -> Seconds:
    """Return what bringing a component's weights to the GPU takes over all its calls, beyond what hides behind them."""
    if strategy.offload == "none" or component in load.engine_bytes:
        return Seconds(0, 0, 0)
    size = weights_bytes(load.spec, load.dtypes, strategy.quantization)[component]
    if strategy.offload == "model" or not (is_transformer(component) or component == "text_encoder"):
        return Seconds(size / _PCIE, size / _PCIE_FAST, size / _PCIE_SLOW)
    if strategy.offload == "group":
        return Seconds(size / _PCIE, size / _PCIE_FAST, size / _PCIE_SLOW) * calls
    return Seconds(size / _PCIE_SLOW, size / _PCIE, size / _PCIE_BY_LAYER) * calls


def stage_seconds(compute: Seconds, transfer: Seconds, strategy: MemoryStrategy) -> Seconds:
    """Combine both: by group the next weights come while one group computes, else one waits for the other."""
    if strategy.offload != "group":
        together = compute + transfer
        return Seconds(together.likely, together.low, together.high, compute.measured and strategy.offload == "none")
    return Seconds(
        max(compute.likely, transfer.likely) + _NOT_HIDDEN * min(compute.likely, transfer.likely),
        max(compute.low, transfer.low),
        compute.high + transfer.high,
    )


def with_cache(call: Seconds) -> Seconds:
    """Return what a call takes on the average with a step cache, where that was not measured here yet."""
    return Seconds(_CACHED[1] * call.likely, _CACHED[0] * call.low, _CACHED[2] * call.high)


def load_seconds(load: Load) -> Seconds:
    """Return what reading all weights from disk takes."""
    sizes = weights_bytes(load.spec, load.dtypes) | dict(load.engine_bytes)
    size, making = sum(sizes.values()), _MAKE_SECONDS * len(sizes)
    return Seconds(size / _DISK + making, size / _DISK_FAST + making, size / _DISK_SLOW + 2 * making)


def _on_gpu(load: Load, work: Work, component: str, machine: Machine, strategy: MemoryStrategy) -> Seconds:
    gpu = machine.gpu_of(load.device)
    known = next(((rate, memory) for name, rate, memory in _GPUS if name in gpu.name), None)
    rate, memory = known or next((rate, memory) for least, rate, memory in _BY_CAPABILITY if gpu.capability >= least)
    rate, memory = rate * _TERA, memory * _GIGA
    dtype = load.dtypes[component]
    full = DTYPE_BYTES[dtype] == DTYPE_BYTES["float32"]
    slower = (_NO_TF32 if gpu.capability < _TF32_CAPABILITY else 0.5) if full else 1.0
    operations = flops(load, work, component, strategy.decode_tile)
    low, high = _KNOWN_GPU if known else _OTHER_GPU
    if component == "text_encoder":
        seconds = operations / (_TEXT_SHARE * rate * slower)
    elif component == "vae":
        width = load.spec.vae.last_channels
        share = _DECODE_SHARE[dtype] * min((width / _DECODE_CHANNELS) ** _DECODE_POWER, 1.0)
        seconds = operations / (share * rate * (2 * slower if full else 1.0))
    else:
        spec = load.spec.transformer
        per_token = _BLOCK_TRAFFIC_TIME_PER_TOKEN if load.spec.expand_timesteps else _BLOCK_TRAFFIC
        traffic = per_token * spec.num_layers * load.tokens * spec.width
        seconds = operations / (_MATRIX_SHARE * rate * slower) + traffic / (_MEMORY_SHARE * memory)
        quick, likely, slow = _QUANTIZED[strategy.quantization]
        return Seconds(likely * seconds, quick * low * seconds, slow * high * seconds)
    return Seconds(seconds, low * seconds, high * seconds)
