"""LTX-2's components in PyTorch, for `execution.components`, and the exportable forms of programs."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import AutoencoderKLLTX2Video
from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import AutoencoderKLLTX2Audio
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder, LTX2VocoderWithBWE

from runtime.core.plan import EAGER, ComponentPlan, LatentSize, Speed
from runtime.core.request import SOUND_DECODERS
from runtime.execution.components import SoundDecoder, StripDecoder
from runtime.execution.image_encoder import ImageEncoder, ImageModel
from runtime.execution.parallel.ulysses import Tokens
from runtime.execution.streams import Streams
from runtime.execution.text_encoder import TextEncoder, TextModel
from runtime.families.ltx2 import transformer
from runtime.families.ltx2.block_programs import BLOCK_PARTS
from runtime.families.ltx2.conditioning import GemmaEncoder, GemmaStates, PyTorchConnectors
from runtime.families.ltx2.sound_programs import SpectrumForm, VocoderForm
from runtime.families.ltx2.spec import TransformerSpec
from runtime.families.ltx2.transformer import PyTorchStreamDenoiser
from runtime.families.ltx2.vae import (
    PyTorchImageEncoder,
    PyTorchLatentUpsampler,
    PyTorchSpectrumDecoder,
    PyTorchVideoDecoder,
    PyTorchVocoder,
)
from runtime.families.ltx2.vae_programs import VaeClipForm, VaeImageForm
from runtime.models.quantization import FP8
from runtime.models.row_operations import RowCall
from runtime.models.spec import ModelSpec
from runtime.models.stored_modules import config_of
from runtime.models.vae_groups import CLIP_PROGRAM
from runtime.models.weights import load_tensors


class Vocoder(ModelMixin):
    """The class that a vocoder's configuration names: LTX-2.3's has a bandwidth extension."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Return a vocoder of that class."""
        kinds = {kind.__name__: kind for kind in (LTX2Vocoder, LTX2VocoderWithBWE)}
        return kinds[config["_class_name"]].from_config(config)


MODULES: Mapping[str, Any] = {
    "text_encoder": GemmaStates,
    "connectors": LTX2TextConnectors,
    "vae_encoder": AutoencoderKLLTX2Video,
    "transformer": LTX2VideoTransformer3DModel,
    "latent_upsampler": LTX2LatentUpsamplerModel,
    "vae": AutoencoderKLLTX2Video,
    "audio_vae": AutoencoderKLLTX2Audio,
    "vocoder": Vocoder,
}


def text_encoder(spec: ModelSpec, name: str, tokenizer: Any, model: TextModel) -> TextEncoder:
    """See `execution.components.Components`."""
    del name
    return GemmaEncoder(tokenizer, model, spec.max_sequence_length)


def text_connector(module: torch.nn.Module, device: str | torch.device) -> PyTorchConnectors:
    """See `execution.components.Components`."""
    return PyTorchConnectors(module, device)


def latent_upsampler(spec: ModelSpec, module: torch.nn.Module, device: str | torch.device) -> PyTorchLatentUpsampler:
    """See `execution.components.Components`; the VAE has the mean and the deviation of latents."""
    mean, deviation = load_tensors(spec, "vae", ("latents_mean", "latents_std"))
    scaling = config_of(spec, "vae").get("scaling_factor", 1.0)
    return PyTorchLatentUpsampler(module, mean, deviation / scaling, device)


def sound_decoder(name: str, module: torch.nn.Module, device: str | torch.device) -> SoundDecoder:
    """See `execution.components.Components`."""
    return PyTorchVocoder(module, device) if name == "vocoder" else PyTorchSpectrumDecoder(module, device)


def row_calls(spec: ModelSpec, part: ComponentPlan, speed: Speed) -> Iterator[RowCall]:
    """See `execution.components.Components`."""
    assert isinstance(spec.transformer, TransformerSpec)
    return transformer.row_calls(
        spec.transformer,
        getattr(torch, part.dtype),
        part.device,
        timesteps=2 if spec.images else 1,
        fused=speed.fused,
        rounded=part.quantization == FP8,
    )


def denoiser(module: torch.nn.Module, speed: Speed = EAGER) -> PyTorchStreamDenoiser:
    """See `execution.components.Components`."""
    return PyTorchStreamDenoiser(module, speed)


def video_decoder(module: torch.nn.Module, device: str | torch.device) -> PyTorchVideoDecoder:
    """See `execution.components.Components`."""
    return PyTorchVideoDecoder(module, device)


def video_encoder(module: torch.nn.Module, device: str | torch.device) -> PyTorchImageEncoder:
    """See `execution.components.Components`; no model of the family takes videos."""
    return PyTorchImageEncoder(module, device)


def image_encoder(processor: Any, model: ImageModel) -> ImageEncoder:
    """No model of the family attends to images."""
    raise AssertionError(processor, model)


def image_model(module: torch.nn.Module, device: str | torch.device) -> ImageModel:
    """No model of the family attends to images."""
    raise AssertionError(module, device)


def strip_decoder(
    module: torch.nn.Module, device: str | torch.device, number: int, count: int, speed: Speed
) -> StripDecoder:
    """One GPU decodes: the spec lacks strips."""
    raise AssertionError(module, device, number, count, speed)


def see_noise(module: PyTorchStreamDenoiser, spec: ModelSpec, size: LatentSize, device: torch.device) -> None:
    """Let a transformer see the shapes of a clip and its sound; see `engines.block_reference`."""
    del device
    frames = (size[0] - 1) * spec.vae.scale_factor_temporal + 1
    assert spec.sound_latents is not None
    sound = spec.sound_latents.shape(frames, spec.defaults.fps)
    module.see(Streams((1, spec.transformer.in_channels, *size), sound, spec.defaults.fps), ())


def share_tokens(module: torch.nn.Module, tokens: Tokens) -> None:
    """See `execution.components.Components`."""
    transformer.share_tokens(module, tokens)


def make_form(spec: ModelSpec, program: str, load: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """See `engines.programs.MakeForm`."""
    if program in BLOCK_PARTS:
        return BLOCK_PARTS[program](spec)
    if program in SOUND_DECODERS:
        assert spec.sound_latents is not None
        return (VocoderForm if program == "vocoder" else SpectrumForm)(load(), spec.sound_latents)
    return VaeClipForm(load()) if program == CLIP_PROGRAM else VaeImageForm(load())
