"""Exports diffusers' modules as other programs do: other names, odd sizes, half precision, integer timesteps."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import nn
from transformers import UMT5EncoderModel

from runtime.families.wan.programs import TextEncoderForm
from runtime.models.spec import ModelSpec
from runtime.upstream.onnxscript import fast_rewriting

NAMES = ("sample", "timestep", "encoder_hidden_states")


class Transformer(nn.Module):
    """A `diffusers.WanTransformer3DModel` that gives a tensor, with what others add around one.

    Args:
        module: the transformer.
        cut: rows left out of its output.
    """

    def __init__(self, module: Any, cut: int = 0) -> None:
        super().__init__()
        self.module, self.cut = module, cut

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return the velocity."""
        timestep = timestep.reshape(-1).expand(sample.shape[0])
        out: torch.Tensor = self.module(sample, timestep, text, return_dict=False)[0]
        return out[..., : out.shape[-2] - self.cut, :]


class Decoder(nn.Module):
    """A whole clip through `AutoencoderKLWan.decode`, of latents with the model's mean and deviation put back."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        """Return frames (1, 3, n, height, width)."""
        frames: torch.Tensor = self.vae.decode(latent, return_dict=False)[0]
        return frames


class TextEncoder(nn.Module):
    """A `transformers.UMT5EncoderModel` that does not zero what it gives for the padding."""

    def __init__(self, module: Any, length: int) -> None:
        super().__init__()
        self.form = TextEncoderForm(module, length)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return embeddings (1, tokens, width)."""
        # The content of the padding is undefined.
        embeds: torch.Tensor = self.form(tokens.long(), mask.long())
        return embeds + (1 - mask.float()).unsqueeze(-1)


def transformer(
    spec: ModelSpec,
    path: Path,
    *,
    component: str = "transformer",
    size: Sequence[int] = (3, 5, 8),
    text: int = 1024,
    batch: int = 1,
    time: Sequence[int] = (1,),
    dtype: torch.dtype = torch.float16,
    names: Sequence[str] = NAMES,
    cut: int = 0,
    module: Any = None,
) -> Path:
    """Write a transformer as ONNX under another contract.

    Args:
        size: latent frames, rows and columns.
        text: tokens.
        time: shape of the timestep, int64.
        cut: rows that it leaves out.
        module: instead of the component's own.
    """
    if module is None:
        module = WanTransformer3DModel.from_pretrained(spec.directory / component)
    form = Transformer(module.to(dtype).eval(), cut)
    inputs = (
        torch.randn(batch, spec.transformer.in_channels, *size).to(dtype),
        torch.full(tuple(time), 700, dtype=torch.int64),
        torch.randn(batch, text, spec.transformer.text_dim).to(dtype),
    )
    return _write(form, inputs, path, names, "out_sample")


def decoder(spec: ModelSpec, path: Path, size: Sequence[int]) -> Path:
    """Write a VAE's decoder as ONNX: whole clips of one size."""
    vae = AutoencoderKLWan.from_pretrained(spec.directory / "vae").eval()
    return _write(Decoder(vae), (torch.randn(1, spec.vae.z_dim, *size),), path, ("latent",), "video")


def text_encoder(spec: ModelSpec, path: Path, length: int) -> Path:
    """Write a text encoder as ONNX: int32 ids and mask, values left as they are in the padding."""
    encoder = UMT5EncoderModel.from_pretrained(spec.directory / "text_encoder").eval()
    mask = torch.ones(1, length, dtype=torch.int32)
    return _write(TextEncoder(encoder, length), (mask.clone(), mask), path, ("tokens", "mask"), "last_hidden_state")


def _write(form: nn.Module, inputs: Any, path: Path, names: Sequence[str], output: str) -> Path:
    with warnings.catch_warnings(), torch.no_grad(), fast_rewriting():
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(
            form.eval(),
            inputs,
            dynamo=True,
            opset_version=18,
            input_names=list(names),
            output_names=[output],
            external_data=False,
            verbose=False,
        )
    assert exported is not None
    exported.save(path, external_data=False)
    return path
