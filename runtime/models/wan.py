"""The Wan family: reads a text-to-video folder in diffusers' format into a `ModelSpec`.

Covers Wan2.1 (one transformer), Wan2.2-A14B (two experts), Wan2.2-TI2V-5B (48-channel VAE that patchifies, a timestep
per token) and models of our own of the same architectures. What diffusers' configs do not hold (title, defaults,
trained sizes, preview colours) is read from `tandem.json` beside them, else taken from the model cards:
https://huggingface.co/Wan-AI.
"""

import json
from pathlib import Path
from typing import Any

from runtime.core.errors import ModelError
from runtime.models.safetensors_header import tensor_sizes
from runtime.models.spec import Defaults, LatentRgb, ModelSpec, TransformerSpec, VaeSpec
from runtime.models.timesteps import noise_levels

PIPELINE_CLASS = "WanPipeline"
# WanPipeline.__call__'s default; Wan was trained with it.
MAX_SEQUENCE_LENGTH = 512
# Of diffusers, where a configuration does not name it.
_ROPE_MAX_SEQ_LEN = 1024
# Two names of UMT5's embedding: some files hold it under both.
_TIED = ("shared.weight", "encoder.embed_tokens.weight")
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})

# From Wan2.2's configuration (`sample_neg_prompt`), https://github.com/Wan-Video/Wan2.2.
WAN_NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，"
    "杂乱的背景，三条腿，背景人很多，倒着走"
)


def read_spec(directory: Path, name: str) -> ModelSpec:
    """Read a model folder.

    Args:
        directory: a folder in diffusers' format, as `WanPipeline.save_pretrained` writes it.
        name: what to call the model.

    Raises:
        ModelError: if the folder is missing, incomplete, damaged, of another family, or holds pickled weights.
    """
    if not directory.is_dir():
        raise ModelError(
            f"There is no model folder {directory}.",
            "Give a name from `models list`, or a folder in diffusers' format.",
        )
    try:
        index, names, transformer, vae = _architecture(directory, directory.name)
        _refuse_pickles(directory)
        experts = len(names)
        boundary = index.get("boundary_ratio")
        sidecar = _sidecar(directory, vae, experts)
        scheduler = _read_json(directory / "scheduler" / "scheduler_config.json")
        if scheduler.get("use_dynamic_shifting"):
            raise ModelError(
                f"The scheduler of {directory.name} shifts by the size of the clip (use_dynamic_shifting), as no Wan "
                "model's does.",
                "Set that to false in scheduler/scheduler_config.json, or copy the model again.",
            )
        shift = scheduler.get("flow_shift", scheduler.get("shift"))
        return ModelSpec(
            name=name,
            directory=directory,
            transformer=transformer,
            experts=experts,
            vae=vae,
            boundary_ratio=None if boundary is None else float(boundary),
            scheduler=str(scheduler["_class_name"]),
            expand_timesteps=bool(index.get("expand_timesteps", False)),
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            parameters={part: _count(directory / part) for part in ("text_encoder", *names, "vae")},
            flow_shift=None if shift is None else float(shift),
            noise=noise_levels(scheduler),
            **sidecar,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(directory.name, error) from error


def check_family(directory: Path, title: str) -> None:
    """Check that a folder's configurations are of a model that Tandem runs; its weights may be missing.

    Args:
        title: what errors call it.

    Raises:
        ModelError: if they are of another family, missing or damaged.
    """
    try:
        _architecture(directory, title)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(title, error) from error


def _architecture(directory: Path, title: str) -> tuple[dict[str, Any], list[str], TransformerSpec, VaeSpec]:
    """Read the pipeline's index, the experts' names, their architecture and the VAE's.

    Raises:
        KeyError, TypeError, ValueError: if one is incomplete or wrong.
        ModelError: if one is missing, not JSON, or of another family.
    """
    index = _read_json(directory / "model_index.json")
    family = index.get("_class_name")
    if family != PIPELINE_CLASS:
        raise ModelError(
            f"{title} is a {family or 'model of an unknown kind'}, not a Wan text-to-video model.",
            "Take a folder whose model_index.json says WanPipeline.",
        )
    names = ["transformer", "transformer_2"][: 2 if _present(index, "transformer_2") else 1]
    config, *other = [_read_json(directory / expert / "config.json") for expert in names]
    transformer = transformer_spec(config)
    if any(transformer_spec(expert) != transformer for expert in other):
        raise ModelError(f"The two transformers of {title} differ in architecture.", "Take both from the same model.")
    vae = vae_spec(_read_json(directory / "vae" / "config.json"))
    if len(names) > 1 and index.get("boundary_ratio") is None:
        raise KeyError("boundary_ratio")
    if vae.z_dim != transformer.in_channels:
        raise ModelError(
            f"The transformer of {title} takes {transformer.in_channels} channels and its VAE has "
            f"{vae.z_dim}: it is not a text-to-video model.",
            "Take a text-to-video folder, not an image-to-video one.",
        )
    return index, names, transformer, vae


def _damaged(title: str, error: Exception) -> ModelError:
    return ModelError(
        f"A configuration file in {title} is incomplete or wrong ({error}).", "Copy or download the model again."
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"The model has no readable {path.parent.name}/{path.name}.",
            "Give a folder in diffusers' format, with model_index.json and a folder per component.",
        ) from error
    except ValueError as error:
        raise ModelError(
            f"{path.parent.name}/{path.name} is damaged: it is not JSON.", "Copy or download the model again."
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.parent.name}/{path.name} is not a JSON object.", "Copy or download the model again.")
    return value


def _present(index: dict[str, Any], component: str) -> bool:
    entry = index.get(component)
    return isinstance(entry, list) and len(entry) == 2 and entry[0] is not None  # noqa: PLR2004 - [library, class]


def _refuse_pickles(directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        if path.suffix.lower() in PICKLE_SUFFIXES:
            raise ModelError(
                f"The model holds pickled weights ({path.relative_to(directory)}), which can run code when loaded.",
                "Remove that file, or convert it to safetensors.",
            )


def transformer_spec(config: dict[str, Any]) -> TransformerSpec:
    """Read a transformer's `config.json`.

    Raises:
        KeyError, TypeError, ValueError: if it is incomplete or wrong.
        ModelError: if it wants an image.
    """
    if config.get("image_dim"):
        raise ModelError("The transformer expects an image.", "Take a text-to-video model, not an image-to-video one.")
    patch_t, patch_h, patch_w = config["patch_size"]
    return TransformerSpec(
        num_layers=int(config["num_layers"]),
        num_attention_heads=int(config["num_attention_heads"]),
        attention_head_dim=int(config["attention_head_dim"]),
        ffn_dim=int(config["ffn_dim"]),
        in_channels=int(config["in_channels"]),
        text_dim=int(config["text_dim"]),
        patch_size=(int(patch_t), int(patch_h), int(patch_w)),
        rope_max_seq_len=int(config.get("rope_max_seq_len", _ROPE_MAX_SEQ_LEN)),
    )


def vae_spec(config: dict[str, Any]) -> VaeSpec:
    """Read a VAE's `config.json`.

    Raises:
        KeyError, TypeError, ValueError: if it is incomplete or wrong.
    """
    return VaeSpec(
        z_dim=int(config["z_dim"]),
        decoder_base_dim=int(config.get("decoder_base_dim") or config["base_dim"]),
        dim_mult=tuple(int(m) for m in config["dim_mult"]),
        num_res_blocks=int(config["num_res_blocks"]),
        temperal_downsample=tuple(bool(down) for down in config["temperal_downsample"]),
        # diffusers' defaults: Wan2.1's config leaves these out.
        scale_factor_temporal=int(config.get("scale_factor_temporal") or 4),
        scale_factor_spatial=int(config.get("scale_factor_spatial") or 8),
        patch_size=int(config.get("patch_size") or 1),
        is_residual=bool(config.get("is_residual", False)),
    )


def weight_files(component: Path) -> list[Path]:
    """Return the safetensors files that hold a component's weights: those that its index names, where it has one.

    Raises:
        ModelError: if there are none, or one would lie elsewhere.
    """
    index_files = sorted(component.glob("*.safetensors.index.json"))
    if index_files:
        names = set(_read_json(index_files[0])["weight_map"].values())
    else:
        names = {
            name
            for name in ("diffusion_pytorch_model.safetensors", "model.safetensors")
            if (component / name).is_file()
        }
    if not names:
        raise ModelError(
            f"The model has no weights for its {component.name}.",
            f"Put a .safetensors file into {component.name}/, or download the model again.",
        )
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{component.name} names a weight file outside its folder.", "Download the model again.")
    return [component / name for name in sorted(names)]


def _count(component: Path) -> int:
    sizes: dict[str, int] = {}
    for path in weight_files(component):
        sizes |= tensor_sizes(path)
    return sum(size for name, size in sizes.items() if name != _TIED[1] or _TIED[0] not in sizes)


def _sidecar(directory: Path, vae: VaeSpec, experts: int) -> dict[str, Any]:
    path = directory / "tandem.json"
    if not path.is_file():
        return {
            "title": directory.name,
            "license": "unknown",
            "latent_rgb": None,
            **card_defaults(vae, experts),
        }
    config = _read_json(path)
    factors, bias = config.get("latent_rgb_factors"), config.get("latent_rgb_bias")
    second = config["defaults"].get("guidance_scale_2")
    return {
        "title": str(config.get("title") or directory.name),
        "license": str(config.get("license") or "unknown"),
        "latent_rgb": LatentRgb(tuple((r, g, b) for r, g, b in factors), tuple(bias)) if factors and bias else None,
        "defaults": Defaults(
            width=int(config["defaults"]["width"]),
            height=int(config["defaults"]["height"]),
            frames=int(config["defaults"]["frames"]),
            fps=int(config["defaults"]["fps"]),
            steps=int(config["defaults"]["steps"]),
            guidance_scale=float(config["defaults"]["guidance_scale"]),
            guidance_scale_2=float(second) if experts > 1 and second is not None else None,
            negative_prompt=str(config["defaults"].get("negative_prompt") or ""),
        ),
        "sizes": tuple((int(w), int(h)) for w, h in config["sizes"]),
        "frame_counts": tuple(int(n) for n in config["frame_counts"]),
    }


def card_defaults(vae: VaeSpec, experts: int) -> dict[str, Any]:
    """Return the model cards' settings: TI2V-5B, Wan2.2-A14B, Wan2.1, told apart by VAE and experts."""
    if vae.scale_factor_spatial == 16:  # noqa: PLR2004 - TI2V-5B's VAE
        width, height, frames, fps, steps, guidance, guidance_2 = 1280, 704, 121, 24, 50, 5.0, None
        sizes: tuple[tuple[int, int], ...] = ((1280, 704), (704, 1280))
    elif experts > 1:
        width, height, frames, fps, steps, guidance, guidance_2 = 832, 480, 81, 16, 40, 4.0, 3.0
        sizes = ((832, 480), (480, 832), (1280, 720), (720, 1280))
    else:
        width, height, frames, fps, steps, guidance, guidance_2 = 832, 480, 81, 16, 50, 5.0, None
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
            negative_prompt=WAN_NEGATIVE_PROMPT,
        ),
        "sizes": sizes,
        "frame_counts": (frames,),
    }
