"""FramePack's components in PyTorch, for `execution.components`. Text encoders are HunyuanVideo's."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo
from diffusers.models.transformers.transformer_hunyuan_video_framepack import HunyuanVideoFramepackTransformer3DModel

from runtime.core.plan import EAGER, LatentSize, Speed
from runtime.execution.components import SectionInputs
from runtime.execution.image_encoder import ImageEncoder, ImageModel, PyTorchImageModel
from runtime.families.framepack.image_encoder import siglip_pixels
from runtime.families.framepack.programs import ImageEncoderForm
from runtime.families.framepack.transformer import PyTorchSectionDenoiser
from runtime.families.framepack.vae import PyTorchImageLatents, PyTorchSectionDecoder
from runtime.families.hunyuan_video import components as hunyuan_video
from runtime.families.hunyuan_video.vae_programs import VaeImageForm
from runtime.models.spec import IMAGE_ENCODER, ModelSpec
from runtime.models.vae_groups import IMAGE_PROGRAM

MODULES: Mapping[str, Any] = {
    **hunyuan_video.MODULES,
    "image_encoder": "SiglipVisionModel",
    "vae_encoder": AutoencoderKLHunyuanVideo,
    "transformer": HunyuanVideoFramepackTransformer3DModel,
}
text_encoder = hunyuan_video.text_encoder
strip_decoder = hunyuan_video.strip_decoder
share_tokens = hunyuan_video.share_tokens
row_calls = hunyuan_video.row_calls


def image_encoder(processor: Any, model: ImageModel) -> ImageEncoder:
    """See `execution.components.Components`."""
    return ImageEncoder(partial(siglip_pixels, processor), model)


def image_model(module: torch.nn.Module, device: str | torch.device) -> ImageModel:
    """See `execution.components.Components`."""
    return PyTorchImageModel(module, device, lambda siglip, pixels: siglip(pixels).last_hidden_state)


def video_encoder(module: torch.nn.Module, device: str | torch.device) -> PyTorchImageLatents:
    """See `execution.components.Components`."""
    return PyTorchImageLatents(module, device)


def denoiser(module: torch.nn.Module, speed: Speed = EAGER) -> PyTorchSectionDenoiser:
    """See `execution.components.Components`."""
    return PyTorchSectionDenoiser(module, speed)


def video_decoder(module: torch.nn.Module, device: str | torch.device) -> PyTorchSectionDecoder:
    """See `execution.components.Components`."""
    return PyTorchSectionDecoder(module, device)


def see_noise(module: PyTorchSectionDenoiser, spec: ModelSpec, size: LatentSize, device: torch.device) -> None:
    """Let a transformer see noise instead of frames; see `engines.block_reference`.

    Args:
        size: of the latents.
    """
    images, section = spec.image_input, spec.sections_of(spec.least_frames)[0]
    assert images is not None
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, *size[1:], generator=generator).to(device)

    channels = spec.vae.z_dim
    inputs = SectionInputs(
        section=section,
        clean=noise(channels, len(section.clean)),
        history_2x=noise(channels, len(section.history_2x)),
        history_4x=noise(channels, len(section.history_4x)),
        image_embeds=torch.randn(1, images.tokens, images.width, generator=generator).to(device),
        guidance_scale=spec.defaults.guidance_scale,
    )
    module.see(inputs)


def make_form(spec: ModelSpec, program: str, load: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """See `engines.programs.MakeForm`."""
    if program == IMAGE_ENCODER:
        return ImageEncoderForm(load())
    return VaeImageForm(load()) if program == IMAGE_PROGRAM else hunyuan_video.make_form(spec, program, load)
