"""The transformer of both streams: diffusers' module as it is, for latents that are joined.

Every token of a text is one that the connectors made, so that the attention to the text needs no mask.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2PerturbedAttnProcessor

from runtime.core.plan import EAGER, Speed
from runtime.core.step_cache import NONE
from runtime.execution.block_engines import BlockEngines
from runtime.execution.components import ISOLATED, PROMPTED, SKIPPING, UNPROMPTED, OnDegraded
from runtime.execution.step_caches import Sharing
from runtime.execution.streams import Streams


class PyTorchStreamDenoiser:
    """A `LTX2VideoTransformer3DModel`; see `execution.components.StreamDenoiser`.

    Args:
        module: the model; offloading may keep its weights on another device until it is called.
    """

    pairs = False
    compile_seconds = 0.0

    def __init__(self, module: Any) -> None:
        self._module = module
        self._streams: Streams | None = None
        self._skipping: list[int] = []
        self.dtype: torch.dtype = module.proj_in.weight.dtype
        # LTX-2 was published before its blocks could skip their attention; the weights are the same.
        for block in module.transformer_blocks:
            block.perturbed_attn = True
            for attention in (block.attn1, block.audio_attn1):
                attention.set_processor(LTX2PerturbedAttnProcessor())

    def compute(self, speed: Speed, on_degraded: OnDegraded | None = None, engines: BlockEngines | None = None) -> None:
        """See `execution.components.PyTorchDenoiser`; the spec lacks all options."""
        del on_degraded
        assert engines is None
        assert (speed.attention, speed.compiled, speed.graphed) == (EAGER.attention, False, False)

    @contextmanager
    def caching(self, step_cache: str, sharing: Sharing | None = None) -> Iterator[None]:
        """See `execution.components.PyTorchDenoiser`; the spec supports no step cache."""
        assert step_cache == NONE
        assert sharing is None
        yield

    def begin_step(self, *, fresh: bool, exact: bool) -> None:
        """Do nothing: no step differs from another."""

    def forget(self) -> None:
        """Forget the shapes of the streams."""
        self._streams = None

    def see(self, streams: Streams, skipping_blocks: tuple[int, ...]) -> None:
        """See `execution.components.StreamDenoiser`."""
        self._streams, self._skipping = streams, list(skipping_blocks)

    # Not in inference mode: offloading hooks change weights while the module runs.
    @torch.no_grad()
    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """See `execution.components.Denoiser`.

        Args:
            latents: joined, see `Streams`.
            timestep: scalar, or two if the first frame is given: its timestep, and that of all else.
            text_embeds: (1, tokens, video's width + sound's width).
            which: also `SKIPPING`, in which some blocks skip their self-attention, and `ISOLATED`, in which the streams
                do not attend to each other.
        """
        streams, config = self._streams, self._module.config
        assert streams is not None, "call `see` first"
        video, sound = streams.split(latents)
        _, _, frames, height, width = video.shape
        text, sound_text = self._texts(text_embeds.to(self.dtype))
        *_, time = timestep.reshape(-1, 1)
        times = time
        if timestep.numel() > 1:
            first, others = timestep.reshape(-1)
            times = torch.cat([first.expand(height * width), others.expand((frames - 1) * height * width)])[None]
        predicted, predicted_sound = self._module(
            hidden_states=video.flatten(2).transpose(1, 2).to(self.dtype),
            audio_hidden_states=sound.transpose(1, 2).flatten(2).to(self.dtype),
            encoder_hidden_states=text,
            audio_encoder_hidden_states=sound_text,
            timestep=times,
            audio_timestep=time,
            sigma=time,
            num_frames=frames,
            height=height,
            width=width,
            fps=streams.fps,
            audio_num_frames=sound.shape[2],
            isolate_modalities=which == ISOLATED,
            spatio_temporal_guidance_blocks=self._skipping if which == SKIPPING else None,
            use_cross_timestep=bool(config.cross_attn_mod),
            return_dict=False,
        )
        channels, bins = sound.shape[1], sound.shape[3]
        return streams.join(
            predicted.transpose(1, 2), predicted_sound.unflatten(2, (channels, bins)).transpose(1, 2).contiguous()
        )

    def pair(
        self, latents: torch.Tensor, timestep: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `execution.components.Denoiser`."""
        return self(latents, timestep, first), self(latents, timestep, second, UNPROMPTED)

    def _texts(self, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the embeddings for the video and those for the sound."""
        config = self._module.config
        if config.use_prompt_embeddings:
            video, sound = embeds.split(config.caption_channels, dim=2)
            return video, sound
        video, sound = embeds.split([config.cross_attention_dim, config.audio_cross_attention_dim], dim=2)
        return video, sound
