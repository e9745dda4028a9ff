"""Architecture of the network that interpolates, as a model of a single component. Imports no torch.

Its weights ship with Tandem. Two frames are the "latents" of `models.spec.VaeSpec`, and the frame between them is the
result.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from runtime.core.request import INTERPOLATOR
from runtime.families.dcae.spec import finisher_card
from runtime.models.catalogue import EMBEDDED
from runtime.models.registry import Family, KnownModel
from runtime.models.spec import ModelSpec
from runtime.models.stored_weights import WeightFiles, file_tensors, stored_weights

WEIGHTS = EMBEDDED / "interpolator" / "model.safetensors"
COLORS = 3
# How much smaller a stage computes, and its channels.
STAGES = ((8, 96), (4, 80), (2, 64))
# Convolutions of a stage at its smallest size; channels of those that correct the mixed frames.
BODY, REFINED = 6, 32
# The motion from both frames, in x and y.
FLOW = 4
# Sides that frames are padded to are multiples of this.
MULTIPLE = 16
# Longest side in pixels whose motion the network estimates: it was trained with 192×112.
_LONGEST = 480
_KERNEL = 9  # values of a 3×3 kernel
# Operations of a pixel where both frames are moved and mixed: they take as long on a CPU as so many of convolutions.
_MIXING = 2_000
# Tensors of three channels that are in memory at once at the frames' size, and at the motion's.
_LIVE_FRAMES, _LIVE = 12, 24


def smaller_for(width: int, height: int) -> int:
    """Return how many times smaller the frames are in which motion is estimated: a power of two."""
    smaller = 1
    while max(width, height) > _LONGEST * smaller:
        smaller *= 2
    return smaller


def given_channels(stage: int) -> int:
    """Return the channels that a stage takes: both frames; from the second on, also moved, with mask and flow."""
    return 2 * COLORS if stage == 0 else 2 * 2 * COLORS + 1 + FLOW


def refined_channels() -> int:
    """Return the channels of what the mixed frames are corrected with."""
    return given_channels(1) + COLORS


@dataclass(frozen=True, kw_only=True)
class InterpolatorSpec:
    """Architecture of the network; see `models.spec.VaeSpec`."""

    z_dim: Literal[6] = 6
    channels: Literal[3] = 3
    scale_factor_temporal: Literal[1] = 1
    scale_factor_spatial: Literal[1] = 1
    last_channels: int = REFINED
    output_scale: Literal[1] = 1
    # Each frame is computed from whole frames, never from tiles.
    context: int = 1 << 20

    def frame_size(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of the new frame."""
        return height, width

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of both frames."""
        return height, width

    def decode_flops(self, frames: int, height: int, width: int) -> float:
        """Return the operations (two per multiply-add) of new frames."""
        smaller = smaller_for(width, height)
        pixels = height * width / smaller**2
        products = 0.0
        for number, (scale, channels) in enumerate(STAGES):
            half = pixels * (2 / scale) ** 2 / 4
            inner = BODY * channels**2 + channels**2 // 2
            products += half * _KERNEL * given_channels(number) * channels / 2 + half / 4 * _KERNEL * inner
            products += half * 4 * channels * (FLOW + 1)
        if smaller == 1:
            products += pixels * _KERNEL * REFINED * (refined_channels() + 2 * REFINED + COLORS)
        mixed = pixels * len(STAGES) + (height * width if smaller > 1 else 0)
        return frames * (2.0 * products + _MIXING * mixed)

    def decode_bytes(
        self, latent_frames: int, height: int, width: int, element_bytes: int, *, cpu: bool = False
    ) -> int:
        """Return the peak memory of computing so many frames in one call; counted, not measured."""
        del cpu
        smaller = smaller_for(width, height)
        pixels = height * width
        # Places and colors are float32, convolutions have the dtype of the weights.
        convolved = 3 * REFINED * element_bytes * (pixels // smaller**2)
        return latent_frames * (COLORS * 4 * (_LIVE_FRAMES * pixels + _LIVE * pixels // smaller**2) + convolved)

    def cache_bytes(self, height: int, width: int, element_bytes: int) -> int:
        """Return 0: each frame is computed for itself."""
        return 0 * height * width * element_bytes


def interpolator_model() -> ModelSpec:
    """Return the network as a model of its own.

    Raises:
        ModelError: if its file cannot be read.
    """
    return _model(WEIGHTS, WEIGHTS.stat().st_mtime_ns)


@lru_cache
def _model(path: Path, changed: int) -> ModelSpec:
    del changed
    # Keys of engines contain it.
    config = {"stages": STAGES, "body": BODY, "refined": REFINED, "longest": _LONGEST}
    files = WeightFiles.of(stored_weights(file_tensors(path)), config, None)
    return ModelSpec(
        family="interpolator",
        name="interpolator",
        title="Tandem's network for new frames",
        license="Apache-2.0",
        directory=path.parent,
        vae=InterpolatorSpec(),
        parameters={INTERPOLATOR: files.parameters},
        files={INTERPOLATOR: files},
        **finisher_card(INTERPOLATOR, 192, 112),
    )


class InterpolatorFamily(Family):
    """The family's torch-free part; see `registry.Family`. Its only model is no folder that anyone can add."""

    negative_prompt = ""

    def read_spec(self, directory: Path, name: str) -> ModelSpec:
        """Raise `LookupError`: no folder is an interpolator."""
        raise LookupError(name, directory)

    def check(self, directory: Path, title: str) -> None:
        """Raise `LookupError`: no folder is an interpolator."""
        raise LookupError(title, directory)

    def known_spec(self, model: KnownModel, weights_dir: Path) -> ModelSpec:
        """Raise `LookupError`: it is not among the published models."""
        raise LookupError(model.name, weights_dir)


FAMILY: Family = InterpolatorFamily()
