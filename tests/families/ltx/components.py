"""LTX-Video's components in PyTorch: diffusers' modules as they are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import AutoencoderKLLTXVideo, LTXVideoTransformer3DModel
from torch import nn
from transformers import T5EncoderModel

from runtime.core.facts import Fact
from runtime.core.plan import EAGER, ComponentPlan, Speed
from runtime.core.step_cache import NONE
from runtime.execution.block_engines import BlockEngines
from runtime.execution.components import PROMPTED, OnDegraded, StripDecoder
from runtime.execution.step_caches import Sharing
from runtime.execution.text_encoder import TextEncoder, TextModel
from runtime.models.row_operations import RowCall
from runtime.models.spec import ModelSpec

MODULES: Mapping[str, Any] = {
    "text_encoder": T5EncoderModel,
    "transformer": LTXVideoTransformer3DModel,
    "vae": AutoencoderKLLTXVideo,
}


def predict(module: Any, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Return the velocity, shaped like `latents` (1, channels, frames, height, width)."""
    _, channels, frames, height, width = latents.shape
    dtype = module.proj_in.weight.dtype
    tokens = module(
        latents.flatten(2).transpose(1, 2).to(dtype),
        text.to(dtype),
        timestep.reshape(1),
        text.ne(0).any(dim=-1).to(dtype),
        frames,
        height,
        width,
        return_dict=False,
    )[0]
    velocity: torch.Tensor = tokens.transpose(1, 2).reshape(1, channels, frames, height, width)
    return velocity


def decode(module: Any, latents: torch.Tensor) -> torch.Tensor:
    """Return frames (n, height, width, 3), float32 in -1 to 1, of normalised latents."""
    config, shape = module.config, (1, -1, 1, 1, 1)
    z = latents.float() * module.latents_std.view(shape) / config.scaling_factor + module.latents_mean.view(shape)
    pixels = module.decoder(z.to(next(module.decoder.parameters()).dtype))
    frames: torch.Tensor = pixels[0].permute(1, 2, 3, 0).float().clamp(-1.0, 1.0)
    return frames


class LtxDenoiser:
    """See `execution.components.PyTorchDenoiser`."""

    pairs = False
    compile_seconds = 0.0

    def __init__(self, module: Any) -> None:
        self._module = module
        self.dtype: torch.dtype = module.proj_in.weight.dtype

    def compute(self, speed: Speed, on_degraded: OnDegraded | None = None, engines: BlockEngines | None = None) -> None:
        """Only PyTorch's own attention runs, not compiled."""
        assert engines is None, "the family has no block programs"
        for field in ("compiled", "graphed", "attention", "sparse_tau"):
            if getattr(speed, field) != getattr(EAGER, field) and on_degraded is not None:
                on_degraded(field, Fact("execution.compilation_failed", {"error": "not supported by this family"}))

    @contextmanager
    def caching(self, step_cache: str, sharing: Sharing | None = None) -> Iterator[None]:
        """No step cache."""
        assert step_cache == NONE
        assert sharing is None
        yield

    def begin_step(self, *, fresh: bool, exact: bool) -> None:
        """Nothing differs from step to step."""

    def forget(self) -> None:
        """Nothing is kept."""

    @torch.no_grad()
    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """See `Denoiser`."""
        del which
        return predict(self._module, latents, timestep, text_embeds)

    def together(
        self, latents: torch.Tensor, timestep: torch.Tensor, texts: Mapping[str, torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """See `Denoiser`."""
        return [self(latents, timestep, text, which) for which, text in texts.items()]


class LtxVideoDecoder:
    """See `execution.components.PyTorchVideoDecoder`; decodes whole clips."""

    compile_seconds = 0.0

    def __init__(self, module: Any, device: str | torch.device) -> None:
        module.encoder = None
        self._module, self._device = module, device

    def compute(self, speed: Speed, on_degraded: OnDegraded | None = None) -> None:
        """There is one way to compute it."""

    @torch.inference_mode()
    def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
        """See `VideoDecoder`."""
        del chunk, tile
        yield decode(self._module, latents.to(self._device))

    def decode_from(
        self, latents: torch.Tensor, chunk: int, start: int, caches: Sequence[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """An engine for whole clips fails before its first frame."""
        assert start == 0
        assert not caches
        return self.frames(latents, chunk)


def text_encoder(spec: ModelSpec, name: str, tokenizer: Any, model: TextModel) -> TextEncoder:
    """See `Components`."""
    del name
    return TextEncoder(tokenizer, model, spec.max_sequence_length)


def row_calls(spec: ModelSpec, part: ComponentPlan, speed: Speed) -> Iterator[RowCall]:
    """diffusers' modules call no operations of Tandem."""
    del spec, part, speed
    yield from ()


def denoiser(module: torch.nn.Module, speed: Speed = EAGER) -> LtxDenoiser:
    """See `Components`."""
    made = LtxDenoiser(module)
    made.compute(speed)
    return made


def video_decoder(module: torch.nn.Module, device: str | torch.device) -> LtxVideoDecoder:
    """See `Components`."""
    return LtxVideoDecoder(module, device)


def strip_decoder(
    module: torch.nn.Module, device: str | torch.device, number: int, count: int, speed: Speed
) -> StripDecoder:
    """One GPU decodes."""
    raise AssertionError(module, device, number, count, speed)


def share_tokens(module: torch.nn.Module, tokens: Any) -> None:
    """One GPU denoises."""
    raise AssertionError(module, tokens)


class TextForm(nn.Module):
    """See `engines.programs.MakeForm`."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.vocabulary: int = module.config.vocab_size

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return embeddings, zero in the padding."""
        stack = self.module.encoder
        x = stack.embed_tokens(input_ids)
        first = stack.block[0].layer[0].SelfAttention
        bias = first.compute_bias(x.shape[1], x.shape[1], device=x.device)
        bias = bias.masked_fill(~attention_mask.bool()[:, None, None, :], torch.finfo(x.dtype).min)
        for block in stack.block:
            attention, feed_forward = block.layer
            y = attention.layer_norm(x)
            inner = attention.SelfAttention
            q, k, v = (
                project(y).view(1, x.shape[1], inner.n_heads, -1).transpose(1, 2)
                for project in (inner.q, inner.k, inner.v)
            )
            scores = (q @ k.transpose(2, 3) + bias).softmax(-1)
            x = x + inner.o((scores @ v).transpose(1, 2).flatten(2))
            dense = feed_forward.DenseReluDense
            x = x + dense.wo(dense.act(dense.wi(feed_forward.layer_norm(x))))
        embeds: torch.Tensor = stack.final_layer_norm(x).float() * attention_mask.unsqueeze(-1).float()
        return embeds


class TransformerForm(nn.Module):
    """See `engines.programs.MakeForm`."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor) -> torch.Tensor:
        """Return the velocity, float32."""
        return predict(self.module, latents, timestep, text_embeds).float()


class VaeForm(nn.Module):
    """See `engines.programs.MakeForm`."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        module.encoder = None
        self.module = module

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Return a whole clip's frames."""
        return decode(self.module, z)


def make_form(spec: ModelSpec, program: str, load: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """See `engines.programs.MakeForm`."""
    del spec
    forms = {"text_encoder": TextForm, "transformer": TransformerForm, "vae_clip": VaeForm}
    return forms[program](load())
