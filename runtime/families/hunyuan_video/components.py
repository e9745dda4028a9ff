"""HunyuanVideo's components in PyTorch, for `execution.components`, and exportable forms, for `engines.programs`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoTransformer3DModel

from runtime.core.plan import EAGER, ComponentPlan, Speed
from runtime.execution.components import StripDecoder, VideoEncoder
from runtime.execution.image_encoder import ImageEncoder, ImageModel
from runtime.execution.parallel.ulysses import Tokens
from runtime.execution.rotation import rotation_call
from runtime.execution.text_encoder import TextEncoder, TextModel
from runtime.families.hunyuan_video import transformer
from runtime.families.hunyuan_video.block_programs import BLOCK_PARTS
from runtime.families.hunyuan_video.conditioning import ClipEncoder, LlamaEncoder, ShortLlama
from runtime.families.hunyuan_video.programs import ClipTextForm, LlamaForm
from runtime.families.hunyuan_video.vae import PyTorchVideoDecoder
from runtime.families.hunyuan_video.vae_programs import VaeGroupForm
from runtime.models.quantization import FP8
from runtime.models.row_operations import RowCall, rounding_calls
from runtime.models.spec import ModelSpec
from runtime.models.vae_groups import GROUP_PROGRAMS

MODULES: Mapping[str, Any] = {
    "text_encoder": ShortLlama,
    "text_encoder_2": "CLIPTextModel",
    "transformer": HunyuanVideoTransformer3DModel,
    "vae": AutoencoderKLHunyuanVideo,
}


def text_encoder(spec: ModelSpec, name: str, tokenizer: Any, model: TextModel) -> TextEncoder:
    """See `execution.components.Components`."""
    if name == "text_encoder":
        return LlamaEncoder(tokenizer, model, spec.max_sequence_length)
    return ClipEncoder(tokenizer, model)


def row_calls(spec: ModelSpec, part: ComponentPlan, speed: Speed) -> Iterator[RowCall]:
    """See `execution.components.Components`."""
    del speed
    sizes, dtype = spec.transformer, getattr(torch, part.dtype)
    yield rotation_call(sizes.num_attention_heads, sizes.attention_head_dim, dtype, part.device)
    if part.quantization == FP8:
        yield from rounding_calls((sizes.width, sizes.ffn_dim), dtype, part.device)


def denoiser(module: torch.nn.Module, speed: Speed = EAGER) -> transformer.PyTorchDenoiser:
    """See `execution.components.Components`."""
    return transformer.PyTorchDenoiser(module, speed)


def video_decoder(module: torch.nn.Module, device: str | torch.device) -> PyTorchVideoDecoder:
    """See `execution.components.Components`."""
    return PyTorchVideoDecoder(module, device)


def image_encoder(processor: Any, model: ImageModel) -> ImageEncoder:
    """No model of the family takes images."""
    raise AssertionError(processor, model)


def image_model(module: torch.nn.Module, device: str | torch.device) -> ImageModel:
    """No model of the family takes images."""
    raise AssertionError(module, device)


def video_encoder(module: torch.nn.Module, device: str | torch.device) -> VideoEncoder:
    """No model of the family takes images."""
    raise AssertionError(module, device)


def strip_decoder(
    module: torch.nn.Module, device: str | torch.device, number: int, count: int, speed: Speed
) -> StripDecoder:
    """One GPU decodes: the spec lacks strips."""
    raise AssertionError(module, device, number, count, speed)


def share_tokens(module: torch.nn.Module, tokens: Tokens) -> None:
    """See `execution.components.Components`."""
    transformer.share_tokens(module, tokens)


def make_form(spec: ModelSpec, program: str, load: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """See `engines.programs.MakeForm`."""
    if program in BLOCK_PARTS:
        return BLOCK_PARTS[program](spec)
    if program in GROUP_PROGRAMS:
        return VaeGroupForm(load())
    length = spec.encoders[program].max_tokens
    return LlamaForm(load(), length) if program == "text_encoder" else ClipTextForm(load(), length)
