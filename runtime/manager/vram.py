"""How much memory a plan needs, from the architecture alone: pure functions, no measuring."""

from collections.abc import Mapping

from runtime.models.spec import ModelSpec

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

# Latent frames in one call of the VAE's decoder: more gain nothing, and cancelling waits for a call to end. Measured:
# on 2 cores diorama decodes in 4.4 s with 1, 3.9 with 2, 4.6 with 4, 5.4 with 8, which leave the processor's caches;
# on an H200 Wan2.1's decoder gains 10 % from 4.
_MOST_AT_ONCE = {"cpu": 2, "cuda": 4}
_DECODE_SHARE = 0.25
# Python with PyTorch, diffusers and transformers loaded, before any weight (measured: 0.45 GiB on Linux).
_LIBRARIES_BYTES = 1 << 29


def weights_bytes(spec: ModelSpec, dtypes: Mapping[str, str]) -> dict[str, int]:
    """Return the bytes of each component's weights in its dtype."""
    return {name: spec.parameters[name] * DTYPE_BYTES[dtypes[name]] for name in spec.component_names}


def denoise_bytes(spec: ModelSpec, tokens: int, dtype: str) -> int:
    """Return an estimate of one forward pass's activations, attention computed without its matrix.

    A block holds the residual stream, q, k, v and the feed-forward's inner layer at once, the norms in float32.
    """
    width, inner = spec.transformer.width, spec.transformer.ffn_dim
    return tokens * (6 * width + inner) * DTYPE_BYTES[dtype] + 2 * tokens * width * DTYPE_BYTES["float32"]


def decode_chunk(
    spec: ModelSpec, latent_frames: int, height: int, width: int, dtype: str, device: str, free_bytes: int
) -> int:
    """Return how many latent frames the VAE decodes in one call: as many as a quarter of free memory allows."""
    chunk = min(_MOST_AT_ONCE[device.partition(":")[0]], max(latent_frames - 1, 1))
    while chunk > 1 and spec.vae.decode_bytes(chunk, height, width, DTYPE_BYTES[dtype]) > _DECODE_SHARE * free_bytes:
        chunk -= 1
    return chunk


def peak_bytes(
    spec: ModelSpec, weights: Mapping[str, int], denoise: int, decode: int, frames_bytes: int, *, keep_loaded: bool
) -> int:
    """Return the peak over the stages: all weights if they stay loaded, else the largest part with its activations."""
    beside = frames_bytes + _LIBRARIES_BYTES
    if keep_loaded:
        return sum(weights.values()) + max(denoise, decode) + beside
    experts = max(weights[name] for name in spec.component_names if name.startswith("transformer"))
    return max(weights["text_encoder"], experts + denoise, weights["vae"] + decode) + beside
