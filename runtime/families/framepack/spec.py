"""FramePack's architecture, defaults and limits, read from a folder in diffusers' format. Imports no torch.

Its text encoders, VAE and scheduler are HunyuanVideo's. Source of defaults: https://github.com/lllyasviel/FramePack.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import TypeAdapter

from runtime.families.framepack import lora_names
from runtime.families.framepack.prompt_guide import GUIDE
from runtime.families.hunyuan_video import spec as hunyuan_video
from runtime.models.folder import read_config, read_sidecar, reading, up_to
from runtime.models.registry import Family, FileSigns, KnownModel
from runtime.models.sections import HISTORY_1X, HISTORY_2X, HISTORY_4X, LATENT_WINDOW
from runtime.models.spec import IMAGE_ENCODER, VAE_ENCODER, Defaults, ImageInput, ModelSpec, SectionSpec
from runtime.models.vae_groups import GROUP_PROGRAMS, IMAGE_PROGRAM

# Checkpoints within a section are saved after any step, where a step cache would be lost.
_UNSUPPORTED = frozenset({"step_cache", "guidance_cache", *hunyuan_video.UNSUPPORTED})
# The components in the order they run.
_PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "text_encoder": ("text_encoder",),
    "text_encoder_2": ("text_encoder_2",),
    IMAGE_ENCODER: (IMAGE_ENCODER,),
    VAE_ENCODER: (IMAGE_PROGRAM,),
    "transformer": (),
    "vae": tuple(GROUP_PROGRAMS),
}
# In the names of the models that make sections from the start to the end: both kinds have one configuration.
_F1 = re.compile(r"(?<![a-z0-9])f1(?![a-z0-9])")


@dataclass(frozen=True, kw_only=True)
class TransformerSpec(hunyuan_video.TransformerSpec):
    """Architecture of a `diffusers.HunyuanVideoFramepackTransformer3DModel`.

    Attributes:
        image_dim: channels of SigLIP's embeddings.
    """

    image_dim: Annotated[int, up_to(65_536)]

    def forward_flops(self, tokens: int, text_tokens: int) -> float:
        """Return the operations of one forward pass, batch 1.

        Args:
            tokens: of a section's own latents, without those of the frames that it sees.
        """
        return super().forward_flops(packed_tokens(tokens), text_tokens)

    def forward_bytes(self, tokens: int, element_bytes: int, *, time_per_token: bool) -> int:
        """Return the peak memory of one forward pass in bytes; `tokens` as in `forward_flops`."""
        return super().forward_bytes(packed_tokens(tokens), element_bytes, time_per_token=time_per_token)


@dataclass(frozen=True, kw_only=True)
class _Siglip:
    """The sizes of a `transformers.SiglipVisionModel`, with the values that its configurations leave out."""

    hidden_size: Annotated[int, up_to(65_536)] = 768
    image_size: Annotated[int, up_to(8_192)] = 224
    patch_size: Annotated[int, up_to(8_192)] = 16
    num_hidden_layers: Annotated[int, up_to(512)] = 12

    @property
    def tokens(self) -> int:
        """Embeddings of one image: one for each patch."""
        return int((self.image_size // self.patch_size) ** 2)


_SIGLIP = TypeAdapter(_Siglip)
_IMAGE_DIM = TypeAdapter(Annotated[int, up_to(65_536)])
_SAMPLING_TYPE: TypeAdapter[Any] = TypeAdapter(Literal["vanilla", "inverted_anti_drifting"])


# The first are diffusers' names, which are the authors'; SigLIP's patches have a bias, unlike CLIP's.
_FOLDER_FILES: Mapping[str, Sequence[FileSigns]] = {
    "transformer": (
        FileSigns(
            ("context_embedder.token_refiner.refiner_blocks.0.attn.to_q.weight", "clean_x_embedder.proj.weight"),
        ),
    ),
    IMAGE_ENCODER: (
        FileSigns(("embeddings.patch_embedding.bias", "post_layernorm.weight"), ("embeddings.class_embedding",)),
    ),
}


class FramePackFamily(Family):
    """See `models.registry.Family`."""

    negative_prompt = ""
    prompt_guide = GUIDE
    shared_programs = ("hunyuan_video",)
    folder_files: Mapping[str, Sequence[FileSigns]] = _FOLDER_FILES
    lora_change = staticmethod(lora_names.NAMES.change_of)
    lora_weight_shape = staticmethod(lora_names.weight_shape)

    def read_spec(self, directory: Path, name: str) -> ModelSpec:
        """Read a model folder, as `HunyuanVideoFramepackPipeline.save_pretrained` writes it.

        A folder of a model that makes sections from the start to the end has "F1" in its name, or
        `"sampling_type": "vanilla"` in its `tandem.json`.

        Raises:
            ModelError: if it is incomplete, damaged or invalid.
        """
        with reading(directory.name):
            configs = _read_configurations(directory, directory.name)
            shared, transformer = configs.shared, configs.transformer
            sidecar = read_sidecar(directory, 1) or {"title": directory.name, "license": "unknown", **_CARD}
            return ModelSpec(
                family="framepack",
                name=name,
                transformer=transformer,
                **hunyuan_video.folder_fields(directory, shared, _PROGRAMS),
                **_common(transformer, shared.vae, configs.siglip, configs.section),
                **{"latent_rgb": None, **sidecar},
            )

    def check(self, directory: Path, title: str) -> None:
        """Check a folder's configurations.

        Raises:
            ModelError: if one is missing, damaged or invalid.
        """
        with reading(title):
            _read_configurations(directory, title)

    def known_spec(self, model: KnownModel, weights_dir: Path) -> ModelSpec:
        """Return the spec of a published model, as if its folder were in `weights_dir`."""
        fields = hunyuan_video.known_fields(model)
        image_dim = model.configs["transformer"]["image_proj_dim"]
        transformer = TransformerSpec(**vars(fields.pop("transformer")), image_dim=image_dim)
        siglip = _SIGLIP.validate_python(model.configs[IMAGE_ENCODER])
        section = SectionSpec(latent_frames=LATENT_WINDOW, **_order(weights_dir / model.folder))
        return ModelSpec(
            transformer=transformer,
            **fields,
            **_CARD,
            **_common(transformer, fields["vae"], siglip, section),
            **model.description(weights_dir),
        )


FAMILY: Family = FramePackFamily()

# Of the authors' code: 25 steps, a distilled guidance scale of 10, and four sections of 36 frames at 30 per second.
_CARD: Mapping[str, Any] = {
    "defaults": Defaults(
        width=832,
        height=480,
        frames=145,
        fps=30,
        steps=25,
        guidance_scale=10.0,
        guidance_scale_2=None,
        negative_prompt="",
    ),
    "sizes": ((832, 480), (480, 832), (640, 640)),
    "frame_counts": (37, 73, 145, 289, 901, 1801),
}


def packed_tokens(tokens: int) -> int:
    """Return the tokens of a section with the frames that it sees: two in full, and others compressed.

    Frames compressed 2 times in time, height and width take an eighth of their tokens, and 4 times a sixty-fourth.

    Args:
        tokens: of the section's own latent frames.
    """
    context_frames = 1 + HISTORY_1X + HISTORY_2X / 2**3 + HISTORY_4X / 4**3
    return math.ceil(tokens * (1 + context_frames / LATENT_WINDOW))


def _common(
    transformer: TransformerSpec, vae: hunyuan_video.VaeSpec, siglip: _Siglip, section: SectionSpec
) -> dict[str, Any]:
    """Return what all models of the family share."""
    return {
        **hunyuan_video.common_fields(transformer),
        "programs": _PROGRAMS,
        "unsupported": _UNSUPPORTED,
        "unquantized": (*hunyuan_video.UNQUANTIZED, "image_projection"),
        "section": section,
        "image_input": ImageInput(
            kind="sections",
            vae=vae,
            required=True,
            # It takes the place of the frame after the section that is made first: the last in time.
            last="optional" if section.sampling_type == "inverted_anti_drifting" else "none",
            tokens=siglip.tokens,
            width=siglip.hidden_size,
        ),
    }


class _Configurations(NamedTuple):
    """The configurations of a folder; `shared` with HunyuanVideo."""

    shared: hunyuan_video.Configurations
    transformer: TransformerSpec
    siglip: _Siglip
    section: SectionSpec


def _read_configurations(directory: Path, title: str) -> _Configurations:
    """Read and check all configurations of a folder, before a library reads one.

    Raises:
        KeyError, TypeError, ValueError: if one is incomplete or wrong.
        ModelError: if one is missing or not JSON, or they do not fit each other.
    """
    shared = hunyuan_video.read_configurations(directory, title)
    config = read_config(directory / "transformer" / "config.json")
    for part in ("has_image_proj", "has_clean_x_embedder"):
        if not config.get(part):
            raise ValueError(part)
    siglip = _SIGLIP.validate_python(read_config(directory / "image_encoder" / "config.json"))
    image_dim = _IMAGE_DIM.validate_python(config["image_proj_dim"])
    if siglip.tokens == 0:
        raise ValueError("patch_size")
    if siglip.hidden_size != image_dim:
        raise ValueError("image_proj_dim")
    processor = read_config(directory / "feature_extractor" / "preprocessor_config.json")
    if processor["size"] != {"height": siglip.image_size, "width": siglip.image_size}:
        raise ValueError("size")
    if shared.scheduler["_class_name"] != "FlowMatchEulerDiscreteScheduler":
        raise ValueError("_class_name")
    transformer = TransformerSpec(**vars(shared.transformer), image_dim=image_dim)
    return _Configurations(shared, transformer, siglip, SectionSpec(latent_frames=LATENT_WINDOW, **_order(directory)))


def _order(directory: Path) -> dict[str, Any]:
    """Return the order in which a folder's model makes sections."""
    sidecar = directory / "tandem.json"
    sampling_type = read_config(sidecar).get("sampling_type") if sidecar.exists() else None
    named = "vanilla" if _F1.search(directory.name.lower().replace("_", "-")) else "inverted_anti_drifting"
    return {"sampling_type": _SAMPLING_TYPE.validate_python(named if sampling_type is None else sampling_type)}
