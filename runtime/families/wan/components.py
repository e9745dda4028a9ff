"""Wan's components in PyTorch, for `execution.components`, and its exportable forms, for `engines.programs`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan_animate import WanAnimateTransformer3DModel
from diffusers.models.transformers.transformer_wan_vace import WanVACETransformer3DModel
from PIL.Image import Image

from runtime.core.plan import EAGER, ComponentPlan, Speed
from runtime.execution.components import ControlClip, VideoEncoder
from runtime.execution.image_encoder import ImageEncoder, ImageModel, PyTorchImageModel
from runtime.execution.parallel.ulysses import Tokens
from runtime.execution.rotation import rotation_call
from runtime.execution.text_encoder import TextEncoder, TextModel
from runtime.families.wan import animate, transformer, vace
from runtime.families.wan.block_programs import BLOCK_PARTS
from runtime.families.wan.conditioning import clean_prompt
from runtime.families.wan.programs import ImageEncoderForm, TextEncoderForm, TransformerForm
from runtime.families.wan.vae import PyTorchVideoDecoder, StripDecoder
from runtime.families.wan.vae_encoder import PyTorchVideoEncoder
from runtime.families.wan.vae_programs import VaeClipForm, VaeEncoderForm, VaeForm
from runtime.models.quantization import FP8
from runtime.models.row_operations import EPSILON, RowCall, add_gated, layer_norm, rounding_calls
from runtime.models.spec import ModelSpec

_TRANSFORMERS = (WanTransformer3DModel, WanVACETransformer3DModel, WanAnimateTransformer3DModel)
MODULES: Mapping[str, Any] = {
    "text_encoder": "UMT5EncoderModel",
    "image_encoder": "CLIPVisionModel",
    "vae_encoder": AutoencoderKLWan,
    "transformer": _TRANSFORMERS,
    "transformer_2": _TRANSFORMERS,
    "vae": AutoencoderKLWan,
}


def text_encoder(spec: ModelSpec, name: str, tokenizer: Any, model: TextModel) -> TextEncoder:
    """See `execution.components.Components`."""
    del name
    return TextEncoder(tokenizer, model, spec.max_sequence_length, clean_prompt)


def image_encoder(processor: Any, model: ImageModel) -> ImageEncoder:
    """See `execution.components.Components`."""

    def pixels(images: Sequence[Image]) -> torch.Tensor:
        values: torch.Tensor = processor(images=list(images), return_tensors="pt").pixel_values
        return values

    return ImageEncoder(pixels, model)


def image_model(module: torch.nn.Module, device: str | torch.device) -> ImageModel:
    """See `execution.components.Components`; the embeddings are CLIP's before its last layer."""
    return PyTorchImageModel(
        module, device, lambda clip, pixels: clip(pixels, output_hidden_states=True).hidden_states[-2]
    )


def video_encoder(module: torch.nn.Module, device: str | torch.device) -> PyTorchVideoEncoder:
    """See `execution.components.Components`."""
    vae = cast("Any", module)
    vae.decoder = None
    return PyTorchVideoEncoder(vae, device)


def control_latents(
    encoder: VideoEncoder,
    spec: ModelSpec,
    clip: ControlClip,
    tile: int | None,
    check: Callable[[], None],
    chunk: int = 1,
) -> torch.Tensor:
    """See `execution.components.Components`."""
    of_kind = vace if spec.starts_from_images else animate
    return of_kind.control_latents(encoder, spec, clip, tile, check, chunk)


def row_calls(spec: ModelSpec, part: ComponentPlan, speed: Speed) -> Iterator[RowCall]:
    """See `execution.components.Components`."""
    del speed
    sizes, dtype = spec.transformer, getattr(torch, part.dtype)
    x = torch.ones(1, 1, sizes.width, dtype=dtype, device=part.device)
    table = torch.ones_like(x, dtype=torch.float32)
    yield layer_norm, (x, table, table, EPSILON, dtype)
    yield add_gated, (x, x, table)
    yield rotation_call(sizes.num_attention_heads, sizes.attention_head_dim, dtype, part.device)
    if part.quantization == FP8:
        yield from rounding_calls((sizes.width, sizes.ffn_dim), dtype, part.device)


def denoiser(module: torch.nn.Module, speed: Speed = EAGER) -> transformer.PyTorchDenoiser:
    """See `execution.components.Components`."""
    return transformer.PyTorchDenoiser(module, speed)


def video_decoder(module: torch.nn.Module, device: str | torch.device) -> PyTorchVideoDecoder:
    """See `execution.components.Components`."""
    return PyTorchVideoDecoder(_without_encoder(module), device)


def strip_decoder(
    module: torch.nn.Module, device: str | torch.device, number: int, count: int, speed: Speed
) -> StripDecoder:
    """See `execution.components.Components`."""
    return StripDecoder(_without_encoder(module), device, number, count, speed)


def share_tokens(module: torch.nn.Module, tokens: Tokens) -> None:
    """See `execution.components.Components`."""
    transformer.share_tokens(module, tokens)


def make_form(spec: ModelSpec, program: str, load: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """See `engines.programs.MakeForm`."""
    if program in BLOCK_PARTS:
        return BLOCK_PARTS[program](spec)
    if program == "text_encoder":
        return TextEncoderForm(load(), spec.max_sequence_length)
    if program == "image_encoder":
        return ImageEncoderForm(load())
    if program == "transformer":
        return TransformerForm(load(), 0 if spec.image_input is None else spec.image_input.tokens)
    if program.startswith("vae_encoder"):
        alone = spec.image_input is not None and spec.image_input.kind == "first_frame"
        return VaeEncoderForm(load(), first=program == "vae_encoder_first", alone=alone)
    if program == "vae_clip":
        return VaeClipForm(load(), load())
    return VaeForm(load(), first=program == "vae_first")


def _without_encoder(module: torch.nn.Module) -> AutoencoderKLWan:
    vae = cast("Any", module)
    vae.encoder = None
    return cast("AutoencoderKLWan", vae)
