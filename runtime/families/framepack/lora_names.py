"""Names of FramePack's modules in LoRA files, and their shapes: HunyuanVideo's and its own. Imports no torch.

LoRAs for HunyuanVideo change FramePack, too. Its own code has diffusers' names of modules, which musubi-tuner writes
with underscores: https://github.com/kohya-ss/musubi-tuner, src/musubi_tuner/networks/lora_framepack.py.
"""

from typing import Any

from runtime.families.hunyuan_video import lora_names as hunyuan_video
from runtime.models.lora_names import LoraNames
from runtime.models.spec import ModelSpec

# The convolutions of the frames that a section sees, by the size of their kernel.
_HISTORY = {
    "clean_x_embedder.proj": (1, 2, 2),
    "clean_x_embedder.proj_2x": (2, 4, 4),
    "clean_x_embedder.proj_4x": (4, 8, 8),
}
_IMAGE = ("image_projection.up", "image_projection.down")
NAMES = LoraNames(
    hunyuan_video.BLOCKS,
    {**hunyuan_video.OUTSIDE, **{name: name for name in (*_HISTORY, *_IMAGE)}},
    hunyuan_video.SWAPPED,
)


def weight_shape(spec: ModelSpec, module: str) -> tuple[int | None, ...] | None:
    """Return the shape of the weight of a module; `None` for an unknown module. A norm's weight has one axis."""
    transformer: Any = spec.transformer
    width = transformer.width
    if module in _HISTORY:
        return (width, transformer.in_channels, *_HISTORY[module])
    if module in _IMAGE:
        return (3 * width, transformer.image_dim) if module == _IMAGE[0] else (width, 3 * width)
    return hunyuan_video.weight_shape(spec, module)
