"""Wan's architecture, defaults and limits, read from a folder in diffusers' format. Imports no torch.

Covers Wan2.1 (one transformer), Wan2.2-A14B (two experts), Wan2.2-TI2V-5B (48-channel VAE that patchifies, a timestep
per token), their variants that start from images, and other models of the same architectures. What diffusers'
configurations do not hold (title, defaults, trained sizes, preview colours) is read from `tandem.json` in the model's
folder, or else taken from the model cards: https://huggingface.co/Wan-AI.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from runtime.core.errors import ModelError
from runtime.families.wan import file_names, lora_names, part_files
from runtime.families.wan.part_files import weights
from runtime.families.wan.prompt_guide import GUIDE
from runtime.families.wan.transformer_spec import (
    AnimateTransformerSpec,
    TransformerSpec,
    VaceTransformerSpec,
    transformer_spec,
)
from runtime.models.folder import (
    count_parameters,
    has_component,
    read_config,
    read_sidecar,
    reading,
    tensor_types,
    up_to,
)
from runtime.models.registry import Family, FileSigns, KnownModel, PartFiles, SingleFiles
from runtime.models.spec import (
    IMAGE_ENCODER,
    VAE_ENCODER,
    ControlInput,
    Defaults,
    ImageInput,
    ModelSpec,
    TextEncoderSpec,
    folder_of,
    is_transformer,
)
from runtime.models.stored_weights import WeightFiles
from runtime.models.timesteps import NoiseLevels, noise_levels

# WanPipeline.__call__'s default; Wan was trained with it.
MAX_SEQUENCE_LENGTH = 512
# Those of one segment of Wan-Animate, by which it was trained.
ANIMATED_FRAMES = 77
_FLOAT32 = 4
_RGB = 3
# Values of a 3×3×3 kernel.
_KERNEL = 27
# On a CPU, oneDNN computes convolutions whose input has more channels × frames × rows (`use_mkldnn` in PyTorch's
# Convolution.cpp).
_UNFOLDED = 20480
# Of an image and gray frames, those that the VAE's encoder computes at each level; the others are equal.
_COMPUTED_FRAMES = (12, 20, 24)
# Of a video, those that it computes in one call.
MOST_ENCODED_FRAMES = _COMPUTED_FRAMES[0]
# Two names of UMT5's embedding; some files hold both.
_TIED = ("shared.weight", "encoder.embed_tokens.weight")
# Names of the VAE's parameters that its encoder has.
_OF_ENCODER = ("encoder.", "quant_conv.")
_SCHEDULER = "UniPCMultistepScheduler"
# Of experts in files beside a folder that states none: that of Wan2.2-T2V-A14B.
_BOUNDARY = 0.875
# That of Wan2.2-I2V-A14B.
_IMAGE_BOUNDARY = 0.9
# For a model that is not downloaded; its configuration determines the shift later.
_NOISE = NoiseLevels(setting="flow_shift", fixed=None, shift=math.nan, spread="unipc")

# From Wan2.2's configuration (`sample_neg_prompt`), https://github.com/Wan-Video/Wan2.2.
NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，"
    "杂乱的背景，三条腿，背景人很多，倒着走"
)


@dataclass(frozen=True, kw_only=True)
class VaeSpec:
    """Architecture of a `diffusers.AutoencoderKLWan`, with the names of its config."""

    z_dim: Annotated[int, up_to(4_096)]
    base_dim: Annotated[int, up_to(8_192)]
    decoder_base_dim: Annotated[int, up_to(8_192)]
    dim_mult: Annotated[tuple[Annotated[int, up_to(64)], ...], Field(min_length=1, max_length=8)]
    num_res_blocks: Annotated[int, up_to(64)]
    temperal_downsample: tuple[bool, ...]
    # diffusers' defaults: Wan2.1's configuration has none of these.
    scale_factor_temporal: Annotated[int, up_to(64)] = 4
    scale_factor_spatial: Annotated[int, up_to(256)] = 8
    patch_size: Annotated[int, up_to(64)] = 1
    is_residual: bool = False

    def encode_flops(self, frames: int, height: int, width: int, *, video: bool = False) -> float:
        """Return the operations of encoding a video, or an image and gray frames; a last image adds a tenth."""
        h, w, t = height // self.patch_size, width // self.patch_size, frames
        dims = [self.base_dim * m for m in (1, *self.dim_mult)]
        total = 0.0
        for level, (before, out) in enumerate(itertools.pairwise(dims)):
            computed = t if video else min(t, _COMPUTED_FRAMES[min(level, len(_COMPUTED_FRAMES) - 1)])
            convolutions = before * out + out * out * (2 * self.num_res_blocks - 1)
            total += 2.0 * _KERNEL * computed * h * w * convolutions
            if level < len(self.dim_mult) - 1:
                t = (t + 1) // 2 if self.temperal_downsample[level] else t
                h, w = h // 2, w // 2
        return total + 2.0 * _KERNEL * t * h * w * 4 * dims[-1] ** 2

    def encode_bytes(self, frames: int, height: int, width: int, element_bytes: int) -> int:
        """Return the peak memory of that in bytes, weights excluded: a residual block of the first level.

        There are the block's input, the norm's input in float32 and its result, and the convolution's input padded and
        its output, both also in the layout of the kernel's library. A last image is computed apart, after that. An H200
        took 13 % less for one image, 11 % for two.
        """
        computed = min(frames, _COMPUTED_FRAMES[0])
        values = computed * (height // self.patch_size) * (width // self.patch_size) * self.base_dim
        lifted = 0 if element_bytes == _FLOAT32 else _FLOAT32
        return values * (5 * element_bytes + lifted)

    def encoder_cache_bytes(self, height: int, width: int, element_bytes: int) -> int:
        """Return the bytes that one step of the encoder passes to the next: two frames of each convolution.

        Where time is halved, it is one frame.
        """
        dims = [self.base_dim * m for m in (1, *self.dim_mult)]
        positions = (height // self.patch_size) * (width // self.patch_size)
        values = 2 * positions * _RGB * self.patch_size**2
        for level, (before, out) in enumerate(itertools.pairwise(dims)):
            values += 2 * positions * (before + (2 * self.num_res_blocks - 1) * out)
            if level < len(self.dim_mult) - 1:
                positions //= 4
                values += positions * out if self.temperal_downsample[level] else 0
        return element_bytes * (values + 2 * positions * 5 * dims[-1])

    @property
    def last_channels(self) -> int:
        """Channels of the decoder's last and largest level."""
        return self.decoder_base_dim * self.dim_mult[0]

    def decode_flops(self, frames: int, height: int, width: int) -> float:
        """Return the operations of decoding a clip: the decoder's 3×3×3 convolutions, level by level."""
        latent_frames = (frames - 1) // self.scale_factor_temporal + 1
        h, w, t = height // self.scale_factor_spatial, width // self.scale_factor_spatial, latent_frames
        dims = [self.decoder_base_dim * m for m in (self.dim_mult[-1], *reversed(self.dim_mult))]
        upsample_time = tuple(reversed(self.temperal_downsample))
        total = 2.0 * 27 * t * h * w * (self.z_dim * dims[0] + 4 * dims[0] ** 2)
        for level, (before, out) in enumerate(itertools.pairwise(dims)):
            enters = before // 2 if level and not self.is_residual else before
            convolutions = enters * out + out * out * (2 * self.num_res_blocks + 1)
            total += 2.0 * 27 * t * h * w * convolutions
            if level < len(self.dim_mult) - 1:
                t = 2 * t - 1 if upsample_time[level] else t
                h, w = 2 * h, 2 * w
                total += 2.0 * 9 * t * h * w * out * out // 2
        return total

    def decode_bytes(
        self, latent_frames: int, height: int, width: int, element_bytes: int, *, cpu: bool = False
    ) -> int:
        """Return the peak memory of decoding `latent_frames` in one call in bytes, weights excluded.

        The peak is a convolution of a residual block, mostly of the last level. At that moment there are the block's
        and the level's inputs, the shortcut, the convolution's input as it is and padded (by two frames of cache), its
        output, both once more in cuDNN's own layout, and the caches of all convolutions: two frames each. A residual
        decoder (TI2V-5B) keeps a copy of each level's input for its shortcut. In 16 bits with several latent frames it
        is the norm between two convolutions, which is computed in float32.

        On a CPU the layout is oneDNN's. PyTorch itself computes convolutions with a small input and unfolds the 27
        inputs of each output, so the first latent frame, which is decoded alone, may need more memory than later calls.

        Source: diffusers' `autoencoder_kl_wan`, within 1 % of the memory measured on an H200 in float32
        (tests/planner/measured_h200.jsonl), and `families.wan.vae`, within 3 % in bfloat16; compiled it needs less.
        """
        most = self._call_bytes(latent_frames, height, width, element_bytes, cpu=cpu, first=False)
        if cpu:
            most = max(most, self._call_bytes(1, height, width, element_bytes, cpu=True, first=True))
        return most

    def _call_bytes(
        self, latent_frames: int, height: int, width: int, element_bytes: int, *, cpu: bool, first: bool
    ) -> int:
        dims = [self.decoder_base_dim * m for m in (self.dim_mult[-1], *reversed(self.dim_mult))]
        upsample_time = tuple(reversed(self.temperal_downsample))
        rows = height // self.scale_factor_spatial
        positions = rows * (width // self.scale_factor_spatial)
        frames = latent_frames
        most = 0
        for level, (before, out) in enumerate(itertools.pairwise(dims)):
            enters = before // 2 if level and not self.is_residual else before
            level_input = (2 if self.is_residual else 1) * frames * enters
            for block in range(self.num_res_blocks + 1):
                channels = out if block else enters
                live_values = level_input + (frames * out if block or channels != out else 0)
                for c in (channels, out):
                    convolution = frames * c + 2 * (frames + 2) * c + 2 * frames * out + 2 * c
                    if cpu and c * (frames + 2) * rows <= _UNFOLDED:
                        convolution += (_KERNEL - 1) * frames * c - 2 * c - frames * out
                    most = max(most, positions * (live_values + convolution))
                # In 16 bits, the norm before the second convolution: its input without and with the bias, in
                # float32, and its result.
                lifted = 2 * frames * out * _FLOAT32 // element_bytes
                most = max(most, positions * (live_values + 2 * frames * out + lifted))
            if level < len(self.dim_mult) - 1:
                frames = 2 * frames if upsample_time[level] and not first else frames
                rows *= 2
                positions *= 4
        pixels = _RGB * self.patch_size**2 * positions * frames
        return element_bytes * (most + 2 * pixels) + self.cache_bytes(height, width, element_bytes)

    def cache_bytes(self, height: int, width: int, element_bytes: int) -> int:
        """Return the bytes of the caches of all convolutions, two frames each, which one call passes to the next."""
        dims = [self.decoder_base_dim * m for m in (self.dim_mult[-1], *reversed(self.dim_mult))]
        upsample_time = tuple(reversed(self.temperal_downsample))
        positions = (height // self.scale_factor_spatial) * (width // self.scale_factor_spatial)
        values = positions * (self.z_dim + 4 * dims[0])
        for level, (before, out) in enumerate(itertools.pairwise(dims)):
            enters = before // 2 if level and not self.is_residual else before
            values += positions * (enters + out + 2 * self.num_res_blocks * out)
            if level < len(self.dim_mult) - 1:
                values += positions * out if upsample_time[level] else 0
                positions *= 4
        values += positions * dims[-1]
        return 2 * element_bytes * values


@dataclass(frozen=True, kw_only=True)
class _TextEncoder:
    """Sizes of a `transformers.UMT5EncoderModel`: of its layers, and of others that its class creates."""

    d_model: Annotated[int, up_to(65_536)]
    d_ff: Annotated[int, up_to(1_000_000)]
    num_heads: Annotated[int, up_to(1_024)]
    num_layers: Annotated[int, up_to(512)]
    vocab_size: Annotated[int, up_to(10_000_000)]
    num_labels: Annotated[int, up_to(1_000)] = 2

    @property
    def spec(self) -> TextEncoderSpec:
        """What the planner needs."""
        return TextEncoderSpec(
            width=self.d_model,
            ffn_dim=self.d_ff,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
            max_tokens=MAX_SEQUENCE_LENGTH,
            stores_scores=True,
            takes_weights=True,
        )


@dataclass(frozen=True, kw_only=True)
class _Encoder:
    """What a VAE's configuration says of its encoder only."""

    attn_scales: Annotated[tuple[float, ...], Field(max_length=8)] = ()


@dataclass(frozen=True, kw_only=True)
class _ImageEncoder:
    """The sizes of a `transformers.CLIPVisionModel`."""

    hidden_size: Annotated[int, up_to(65_536)]
    image_size: Annotated[int, up_to(8_192)]
    patch_size: Annotated[int, up_to(8_192)]

    @property
    def tokens(self) -> int:
        """Embeddings of one image: one for each patch, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


_VAE = TypeAdapter(VaeSpec)
_TEXT_ENCODER = TypeAdapter(_TextEncoder)
_ENCODER = TypeAdapter(_Encoder)
_IMAGE_ENCODER = TypeAdapter(_ImageEncoder)
_FLOW_SHIFT = TypeAdapter(Annotated[float, Field(strict=True, gt=0)] | None)
_BOUNDARY_RATIO = TypeAdapter(Annotated[float, Field(strict=True, ge=0, le=1)] | None)


def _vae_config(
    shapes: Mapping[str, tuple[int, ...]], candidates: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """See `part_files.vae_config`; invalid configurations of installed models are passed over."""
    return part_files.vae_config(shapes, _valid(candidates, vae_spec))


def _image_encoder_config(
    shapes: Mapping[str, tuple[int, ...]], candidates: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """See `part_files.image_encoder_config`; invalid configurations of installed models are passed over."""
    return part_files.image_encoder_config(
        shapes, _valid(candidates, lambda config: _IMAGE_ENCODER.validate_python(dict(config)))
    )


def _valid(
    configs: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], object]
) -> list[Mapping[str, Any]]:
    """Return the configurations for which `read` raises no `ValueError`."""
    valid = []
    for config in configs:
        with suppress(ValueError):
            read(config)
            valid.append(config)
    return valid


class WanFamily(Family):
    """See `models.registry.Family`."""

    negative_prompt = NEGATIVE_PROMPT
    prompt_guide = GUIDE
    single_files: SingleFiles | None = file_names
    part_files: Mapping[str, PartFiles] = {
        "text_encoder": PartFiles(
            part_files.text_encoder_names,
            part_files.text_encoder_config,
            part_files.text_encoder_parameters,
            lambda config, transformer: bool(config["d_model"] == transformer["text_dim"]),
        ),
        IMAGE_ENCODER: PartFiles(
            part_files.image_encoder_names,
            _image_encoder_config,
            part_files.image_encoder_parameters,
            lambda config, transformer: bool(config["hidden_size"] == transformer["image_dim"]),
        ),
        "vae": PartFiles(
            part_files.vae_names,
            _vae_config,
            part_files.vae_parameters,
            lambda config, transformer: bool(config["z_dim"] == transformer["out_channels"]),
        ),
    }
    folder_files: Mapping[str, Sequence[FileSigns]] = {
        # Wan's own names of CLIP, with queries, keys and values in one layer.
        IMAGE_ENCODER: (FileSigns(("transformer.0.attn.to_qkv.weight", "cls_embedding")),),
        # VACE's control blocks, which ComfyUI's wrapper of Wan adds to another file.
        "transformer": (
            FileSigns(
                ("vace_blocks.0.after_proj.weight",), ("patch_embedding.weight",), "model.file_has_control_blocks_only"
            ),
        ),
    }
    weights = staticmethod(weights)
    lora_change = staticmethod(lora_names.NAMES.change_of)
    lora_weight_shape = staticmethod(lora_names.weight_shape)
    distilled_steps = staticmethod(lora_names.DISTILLED.steps)
    distilled_model = staticmethod(lora_names.DISTILLED_MODELS.steps)
    distilled_shift = staticmethod(lora_names.DISTILLED.shift)
    distilled_levels = staticmethod(lora_names.DISTILLED.noise_levels)

    def read_spec(self, directory: Path, name: str) -> ModelSpec:
        """Read a model folder, as `save_pretrained` of a Wan pipeline in `registry.FAMILIES` writes it.

        Raises:
            ModelError: if it is incomplete, damaged or invalid.
        """
        with reading(directory.name):
            configs = _read_configurations(directory, directory.name)
            experts = len(configs.experts)
            sidecar = read_sidecar(directory, experts) or {
                "title": directory.name,
                "license": "unknown",
                "latent_rgb": None,
                **card_defaults(configs.vae, experts, configs.image_input),
            }
            return _spec(directory, name, configs, {}, sidecar)

    def assemble(
        self, directory: Path, name: str, files: Mapping[str, WeightFiles], model: KnownModel | None
    ) -> ModelSpec:
        """See `registry.Family`."""
        with reading(directory.name):
            configs = _read_configurations(directory, directory.name, files, model)
            card = card_defaults(configs.vae, len(configs.experts), configs.image_input)
            about = {"title": name, "license": "unknown", "latent_rgb": None}
            if model is not None:
                about |= {"title": model.title, "license": model.license, "about": model.about}
                card = _with_sizes(card, model.sizes)
            return _spec(directory, name, configs, files, {**about, **card})

    def check(self, directory: Path, title: str) -> None:
        """Check a folder's configurations.

        Raises:
            ModelError: if one is missing, damaged or invalid.
        """
        with reading(title):
            _read_configurations(directory, title)

    def known_spec(self, model: KnownModel, weights_dir: Path) -> ModelSpec:
        """Return the spec of a published model, as if its folder were in `weights_dir`."""
        vae = vae_spec(dict(model.configs["vae"]))
        transformer = transformer_spec(dict(model.configs["transformer"]))
        encoder = model.configs.get("image_encoder")
        image_input = _image_input(transformer, vae, encoder, expand_timesteps=model.expand_timesteps)
        control_input = _control_input(transformer, vae)
        card = card_defaults(vae, model.experts, image_input)
        return ModelSpec(
            transformer=transformer,
            experts=model.experts,
            vae=vae,
            boundary_ratio=model.boundary_ratio,
            scheduler=_SCHEDULER,
            expand_timesteps=model.expand_timesteps,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            encoders={"text_encoder": _TEXT_ENCODER.validate_python(model.configs["text_encoder"]).spec},
            programs=_programs(model.experts, image_input, control_input),
            image_input=image_input or _given_frames(vae, control_input),
            control_input=control_input,
            unquantized=_unquantized(transformer),
            video_input=_video_input(transformer, vae, model.parameters),
            block_programs=_block_programs([model.configs["transformer"]]),
            noise=_NOISE,
            **_with_sizes(card, model.sizes),
            **model.description(weights_dir),
        )


FAMILY: Family = WanFamily()


def _spec(
    directory: Path,
    name: str,
    configs: "_Configurations",
    files: Mapping[str, WeightFiles],
    described: Mapping[str, Any],
) -> ModelSpec:
    """Return the spec of a folder, with the components of `files` instead of its own.

    Args:
        described: the fields of the spec that are not in diffusers' configurations.
    """
    control_input = _control_input(configs.transformer, configs.vae)
    programs = _programs(len(configs.experts), configs.image_input, control_input)
    if VAE_ENCODER in programs and "vae" in files:
        files = {**files, VAE_ENCODER: files["vae"]}
    of_files = {**files, VAE_ENCODER: files["vae"]} if "vae" in files else files
    counted = {
        part: _parameters_of(of_files[part], part) if part in of_files else _parameters(directory, part)
        for part in (*programs, VAE_ENCODER)
    }
    if VAE_ENCODER not in programs and not counted[VAE_ENCODER]:  # some files of VAEs only decode
        del counted[VAE_ENCODER]
    return ModelSpec(
        family="wan",
        name=name,
        directory=directory,
        transformer=configs.transformer,
        experts=len(configs.experts),
        vae=configs.vae,
        boundary_ratio=configs.boundary_ratio,
        scheduler=str(configs.scheduler["_class_name"]),
        expand_timesteps=bool(configs.pipeline.get("expand_timesteps", False)),
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        parameters=counted,
        encoders={"text_encoder": configs.text_encoder},
        programs=programs,
        image_input=configs.image_input or _given_frames(configs.vae, control_input),
        control_input=control_input,
        unquantized=_unquantized(configs.transformer),
        video_input=_video_input(configs.transformer, configs.vae, counted),
        block_programs=_block_programs(list(configs.experts.values())),
        flow_shift=configs.flow_shift,
        noise=noise_levels(configs.scheduler),
        files=files,
        **described,
    )


class _Configurations(NamedTuple):
    """The configurations of a folder: the pipeline's, the transformers' by name, the VAE's and the scheduler's."""

    pipeline: dict[str, Any]
    experts: dict[str, Mapping[str, Any]]
    transformer: TransformerSpec
    vae: VaeSpec
    text_encoder: TextEncoderSpec
    boundary_ratio: float | None
    scheduler: dict[str, Any]
    flow_shift: float | None
    image_input: ImageInput | None


def _read_configurations(
    directory: Path, title: str, files: Mapping[str, WeightFiles] | None = None, model: KnownModel | None = None
) -> _Configurations:
    """Read and check all configurations of a folder, before a library reads one.

    Args:
        files: instead of the folder's components, which may be missing, as may the pipeline's configuration.
        model: the published model with these transformers, whose boundary and timesteps replace the pipeline's.

    Raises:
        KeyError, TypeError, ValueError: if one is incomplete or wrong.
        ModelError: if one is missing or not JSON, or they do not fit each other.
    """
    experts: dict[str, Mapping[str, Any]]
    if files:
        index = read_config(directory / "model_index.json") if (directory / "model_index.json").exists() else {}
        experts = {expert: part.config for expert, part in files.items() if is_transformer(expert)}
        path = directory / "transformer" / "config.json"
        channels = next(iter(experts.values()))["in_channels"]
        if len(experts) == 1 or (path.exists() and read_config(path).get("in_channels") != channels):
            index["boundary_ratio"] = None  # of the folder's model, which is another one
        if model is not None:
            index |= {"boundary_ratio": model.boundary_ratio, "expand_timesteps": model.expand_timesteps}
    else:
        index = read_config(directory / "model_index.json")
        names = ["transformer", "transformer_2"][: 2 if has_component(index, "transformer_2") else 1]
        experts = {expert: read_config(directory / expert / "config.json") for expert in names}
    transformer, *rest = [transformer_spec(config) for config in experts.values()]
    if any(expert_spec != transformer for expert_spec in rest):
        raise ModelError("model.experts_differ", model=title)
    vae = vae_spec(_config_of(directory, "vae", files))
    encoder = None
    if transformer.image_dim is not None:
        encoder = _config_of(directory, IMAGE_ENCODER, files)
        read_config(directory / "image_processor" / "preprocessor_config.json")
    sidecar = directory / "tandem.json"
    by_first_frame = index.get("expand_timesteps") or (sidecar.exists() and read_config(sidecar).get("from_images"))
    image_input = _image_input(transformer, vae, encoder, expand_timesteps=bool(by_first_frame))
    if image_input is None and vae.z_dim != transformer.in_channels:
        raise ModelError("model.channels_differ", model=title, transformer=transformer.in_channels, vae=vae.z_dim)
    boundary_ratio = _BOUNDARY_RATIO.validate_python(index.get("boundary_ratio"))
    if rest and boundary_ratio is None:
        value = _BOUNDARY if image_input is None else _IMAGE_BOUNDARY
        boundary_ratio = value if files else None
    if rest and boundary_ratio is None:
        raise ModelError("model.boundary_missing", model=title, value=value, file=directory / "model_index.json")
    text_encoder = _TEXT_ENCODER.validate_python(_config_of(directory, "text_encoder", files)).spec
    scheduler = read_config(directory / "scheduler" / "scheduler_config.json")
    if scheduler.get("use_dynamic_shifting"):
        raise ModelError("model.dynamic_shifting", model=title)
    noise_levels(scheduler)
    flow_shift = _FLOW_SHIFT.validate_python(scheduler.get("flow_shift", scheduler.get("shift")))
    return _Configurations(
        index, experts, transformer, vae, text_encoder, boundary_ratio, scheduler, flow_shift, image_input
    )


def _config_of(directory: Path, component: str, files: Mapping[str, WeightFiles] | None) -> dict[str, Any]:
    if files and component in files:
        return dict(files[component].config)
    return read_config(directory / component / "config.json")


def _parameters_of(files: WeightFiles, component: str) -> int:
    """Return the number of weights of a component in files; see `_parameters`."""
    if component != VAE_ENCODER:
        return files.parameters
    return sum(weight.elements for name, weight in files.weights.items() if name.startswith(_OF_ENCODER))


def _parameters(directory: Path, component: str) -> int:
    """Return the number of weights of a component; the VAE's are those of both its parts."""
    folder = directory / folder_of(component)
    if component == VAE_ENCODER:
        counts = tensor_types(folder).items()
        return sum(count for name, (_, count) in counts if name.startswith(_OF_ENCODER))
    return count_parameters(folder, _TIED)


def _image_input(
    transformer: TransformerSpec, vae: VaeSpec, encoder: Mapping[str, Any] | None, *, expand_timesteps: bool
) -> ImageInput | None:
    """Return how a model starts from images, as `WanImageToVideoPipeline` does; `None` if it cannot.

    Of Wan-Animate, it is the image of the character.

    Args:
        encoder: `config.json` of CLIP, if the transformer attends to its embeddings.
        expand_timesteps: whether the first frame can have its own timestep.

    Raises:
        ValueError: if the sizes of the encoder and the transformer differ.
    """
    if isinstance(transformer, AnimateTransformerSpec):
        channels = 2 * vae.z_dim + vae.scale_factor_temporal
        if transformer.in_channels != channels or transformer.latent_channels != vae.z_dim:
            raise ValueError("in_channels")
        sizes = _IMAGE_ENCODER.validate_python(dict(encoder or {}))
        if sizes.hidden_size != transformer.image_dim:
            raise ValueError("image_dim")
        return ImageInput(kind="character", vae=vae, required=True, tokens=sizes.tokens, width=sizes.hidden_size)
    if transformer.in_channels == 2 * vae.z_dim + vae.scale_factor_temporal:
        if encoder is None:
            return ImageInput(kind="channels", vae=vae, required=True, last="optional")
        sizes = _IMAGE_ENCODER.validate_python(dict(encoder))
        both = transformer.pos_embed_seq_len
        if sizes.hidden_size != transformer.image_dim or both not in {None, 2 * sizes.tokens}:
            raise ValueError("image_dim")
        return ImageInput(
            kind="channels",
            vae=vae,
            required=True,
            last="required" if both else "none",
            tokens=both or sizes.tokens,
            width=sizes.hidden_size,
        )
    fits = expand_timesteps and transformer.in_channels == vae.z_dim and transformer.image_dim is None
    return ImageInput(kind="first_frame", vae=vae, required=False) if fits else None


def _video_input(transformer: TransformerSpec, vae: VaeSpec, parameters: Mapping[str, int]) -> VaeSpec | None:
    """Return the encoder of a video that the model starts from, as `WanVideoToVideoPipeline` does; `None` if it cannot.

    Such a model denoises latents without those of images beside them.
    """
    if isinstance(transformer, VaceTransformerSpec):
        return None  # it is steered by one instead
    return vae if VAE_ENCODER in parameters and transformer.in_channels == vae.z_dim else None


def _control_input(transformer: TransformerSpec, vae: VaeSpec) -> ControlInput | None:
    """Return how a model is steered, as `WanVACEPipeline` or `WanAnimatePipeline` does; `None` if it cannot.

    Raises:
        ValueError: if it reads other channels than latents of two videos and a mask of every pixel.
    """
    if isinstance(transformer, AnimateTransformerSpec):
        return ControlInput(
            vae=vae,
            blocks=0,
            channels=vae.z_dim,
            fields=("control", "face", "background", "mask", "control_start", "overlap"),
            required=("control", "face"),
            masked="background",
            face_side=transformer.motion_encoder_size,
            segment_frames=ANIMATED_FRAMES,
        )
    if not isinstance(transformer, VaceTransformerSpec):
        return None
    if transformer.vace_in_channels != 2 * vae.z_dim + vae.scale_factor_spatial**2:
        raise ValueError("vace_in_channels")
    return ControlInput(vae=vae, blocks=len(transformer.vace_layers), channels=transformer.vace_in_channels)


def _given_frames(vae: VaeSpec, control_input: ControlInput | None) -> ImageInput | None:
    """Return how a model starts from an image, and ends with one, in the place of frames of a control video."""
    return None if control_input is None else ImageInput(kind="control", vae=vae, required=False, last="alone")


def _programs(
    experts: int, image_input: ImageInput | None, control_input: ControlInput | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the programs by component; both experts have one architecture, so one program serves them.

    There are none for a transformer that is steered, and for the encoder of what steers it.
    """
    names = ("transformer", "transformer_2")[:experts]
    if control_input is not None:
        encoders: dict[str, tuple[str, ...]] = {"text_encoder": ("text_encoder",)}
        if image_input is not None:
            encoders[IMAGE_ENCODER] = (IMAGE_ENCODER,)
        encoders[VAE_ENCODER] = ()
        return {**encoders, **dict.fromkeys(names, ()), "vae": ("vae_first", "vae_next")}
    of_images: dict[str, tuple[str, ...]] = {}
    if image_input is not None:
        # With "first_frame", the image alone is encoded.
        steps = ("vae_encoder_first", "vae_encoder_next")
        of_images[VAE_ENCODER] = steps[:1] if image_input.kind == "first_frame" else steps
        if image_input.tokens:
            of_images = {IMAGE_ENCODER: (IMAGE_ENCODER,), **of_images}
    return {
        "text_encoder": ("text_encoder",),
        **of_images,
        **dict.fromkeys(names, ("transformer",)),
        "vae": ("vae_first", "vae_next"),
    }


def _block_programs(configs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the programs of `block_programs`, if the blocks have the norms of the published models."""
    norms = {"cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6}
    usual = all(config.get(name, value) == value for config in configs for name, value in norms.items())
    return ("block_qkv", "block_query", "block_feed_forward") if usual else ()


def _unquantized(transformer: TransformerSpec) -> tuple[str, ...]:
    """Return `ModelSpec.unquantized`: the encoders of a face keep their precision too."""
    names = ("patch_embedding", "condition_embedder", "proj_out")
    return (*names, *file_names.FACE_ENCODERS) if isinstance(transformer, AnimateTransformerSpec) else names


def vae_spec(config: Mapping[str, Any]) -> VaeSpec:
    """Read a VAE's `config.json`.

    Raises:
        ValueError: if it is incomplete or wrong.
    """
    fields = {name: value for name, value in config.items() if value is not None}
    _ENCODER.validate_python(fields)
    vae = _VAE.validate_python({"decoder_base_dim": fields.get("base_dim"), **fields})
    if len(vae.temperal_downsample) != len(vae.dim_mult) - 1:
        raise ValueError("temperal_downsample")
    return vae


def _with_sizes(card: dict[str, Any], sizes: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """Return a card's settings for a model that was trained for other sizes; the first is the default."""
    if not sizes:
        return card
    (width, height), defaults = sizes[0], card["defaults"]
    return card | {"sizes": sizes, "defaults": replace(defaults, width=width, height=height)}


def card_defaults(vae: VaeSpec, experts: int, image_input: ImageInput | None = None) -> dict[str, Any]:
    """Return the model cards' settings, by VAE, number of experts and images.

    They are for TI2V-5B, Wan2.2-A14B, Wan2.1 and Wan2.2-Animate.
    """
    from_image = image_input is not None and image_input.required
    if image_input is not None and image_input.kind == "character":
        width, height, frames, fps, steps, guidance, guidance_2 = 1280, 720, ANIMATED_FRAMES, 30, 20, 1.0, None
        sizes: tuple[tuple[int, int], ...] = ((1280, 720), (720, 1280), (832, 480), (480, 832))
    elif vae.scale_factor_spatial == 16:  # noqa: PLR2004 - TI2V-5B's VAE
        width, height, frames, fps, steps, guidance, guidance_2 = 1280, 704, 121, 24, 50, 5.0, None
        sizes = ((1280, 704), (704, 1280))
    elif experts > 1:
        width, height, frames, fps, steps = 832, 480, 81, 16, 40
        guidance, guidance_2 = (3.5, 3.5) if from_image else (4.0, 3.0)
        sizes = ((832, 480), (480, 832), (1280, 720), (720, 1280))
    else:
        width, height, frames, fps, guidance, guidance_2 = 832, 480, 81, 16, 5.0, None
        steps = 40 if from_image else 50
        sizes = ((832, 480), (480, 832), (1280, 720), (720, 1280))
    return {
        "defaults": Defaults(
            width=width,
            height=height,
            frames=frames,
            fps=fps,
            steps=steps,
            guidance_scale=guidance,
            guidance_scale_2=guidance_2,
            negative_prompt=NEGATIVE_PROMPT,
        ),
        "sizes": sizes,
        "frame_counts": (frames,),
    }
