"""How long building an engine will take: from earlier builds on this machine, else a rough guess. Pure."""

from collections.abc import Iterable, Mapping
from math import prod

from runtime.core.plan import LatentSize
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import EngineRecord

# Seconds for a component of up to 100 million, 3 thousand million and more weights. Measured: TensorRT's builder on an
# H200 with the shipped model and a slice of one of 1.3 billion weights, the others with the shipped model on 2 cores;
# the rest is a guess.
_LARGEST = (100_000_000, 3_000_000_000)
_GUESSES: Mapping[str, tuple[float, float, float]] = {
    "onnx_tensorrt": (40, 300, 900),
    "torch_tensorrt": (60, 300, 1200),
    "inductor": (40, 120, 300),
    "onnxruntime": (6, 60, 300),
}
# Each of the VAE's two programs, whatever its size: TensorRT times every convolution in many ways.
_VAE_GUESSES: Mapping[str, float] = {"onnx_tensorrt": 145, "torch_tensorrt": 180}


def build_seconds(
    spec: ModelSpec, component: str, program: str, builder: str, size: LatentSize, index: Iterable[EngineRecord] = ()
) -> float:
    """Return about how many seconds building takes.

    Args:
        component: whose weights.
        program: what is built.
        builder: what builds it.
        size: (latent frames, height, width) that it is built for.
        index: the engines on this machine. The last of the same model, program and builder counts;
            its time is scaled by the operations of a call.
    """
    built = [
        record
        for record in index
        if (record.model, record.key.program, record.key.builder) == (spec.name, program, builder)
        and record.build_seconds > 0
        and record.key.profiles
    ]
    if built:
        last = max(built, key=lambda record: record.built_at)
        return last.build_seconds * _flops(spec, program, size) / _flops(spec, program, last.key.profiles[0].opt)
    if program.startswith("vae") and builder in _VAE_GUESSES:
        return _VAE_GUESSES[builder]
    weights = spec.parameters[component]
    return _GUESSES[builder][sum(weights > largest for largest in _LARGEST)]


def _flops(spec: ModelSpec, program: str, size: LatentSize) -> float:
    if program == "text_encoder":
        return 1.0
    frames, height, width = size
    if program == "transformer":
        tokens = prod(n // patch for n, patch in zip(size, spec.transformer.patch_size, strict=True))
        return spec.transformer.forward_flops(tokens, spec.max_sequence_length)
    vae = spec.vae
    scale = vae.scale_factor_spatial
    return vae.decode_flops((frames - 1) * vae.scale_factor_temporal + 1, height * scale, width * scale)
