"""Interfaces of a model's components, and of the family's `components` module that implements them in PyTorch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from PIL.Image import Image

from runtime.core.facts import Fact
from runtime.core.plan import ComponentPlan, Speed
from runtime.execution.block_engines import BlockEngines
from runtime.execution.image_encoder import ImageEncoder, ImageModel
from runtime.execution.step_caches import Sharing
from runtime.execution.streams import Streams
from runtime.execution.text_encoder import TextEncoder, TextModel
from runtime.models import registry
from runtime.models.row_operations import RowCall
from runtime.models.sections import Section
from runtime.models.spec import ModelSpec
from runtime.video.preprocessing import CHANGES_ABOVE

# The passes of a step with guidance; the last two are of models that make sound, see `models.spec.StreamGuidance`.
PROMPTED, UNPROMPTED, SKIPPING, ISOLATED = "cond", "uncond", "skipping", "isolated"
# Makes what a transformer attends to, (1, tokens, width), of states of a text's tokens, (1, tokens, states × width).
TextConnector = Callable[[torch.Tensor], torch.Tensor]
# Doubles the width and height of normalised latents, (1, channels, frames, height, width), float32.
LatentUpsampler = Callable[[torch.Tensor], torch.Tensor]
# Makes a spectrogram of a sound's normalised latents, (1, channels, latents, bins), or samples, (1, channels, samples),
# float32 in -1 to 1, of a spectrogram.
SoundDecoder = Callable[[torch.Tensor], torch.Tensor]
# Receives a field of `Speed` that could not be applied, and the reason.
OnDegraded = Callable[[str, Fact], None]


class Denoiser(Protocol):
    """One transformer."""

    @property
    def pairs(self) -> bool:
        """Whether `together` is faster than calls one after the other."""

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """Predict the velocity.

        Args:
            latents: (1, channels, frames, height, width), float32; where the model takes the latents of given frames as
                channels, with these after its own.
            timestep: scalar tensor, 0 to 1000, or two: of the first latent frame and of the others; or, where the model
                embeds the guidance scale, of all frames and 1000 times the guidance scale.
            text_embeds: (1, text tokens, text width). A model that attends to images takes their embeddings, padded
                with zeros to the text's width, as the first tokens; so do those of a second text encoder. A model that
                supports `nag` also takes those of a prompt and a negative prompt, (2, …).
            which: the pass of the step; each pass has its own cache.

        Returns:
            The prediction in the transformer's dtype, shaped like the model's own latents. It may be written over by
            the call after the next.
        """

    def together(
        self, latents: torch.Tensor, timestep: torch.Tensor, texts: Mapping[str, torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Predict the velocity in several passes of a step; arguments and results are those of a call for each.

        Args:
            texts: the text embeddings of each pass.
        """

    def begin_step(self, *, fresh: bool, exact: bool) -> None:
        """Prepare for the passes of a step.

        Args:
            fresh: whether values cached in earlier steps are discarded.
            exact: whether sparse attention is not used.
        """


class PyTorchDenoiser(Denoiser, Protocol):
    """A transformer in PyTorch."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in."""

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""

    def compute(self, speed: Speed, on_degraded: OnDegraded | None = None, engines: BlockEngines | None = None) -> None:
        """Apply a plan's `Speed` from the next call on; what fails costs time only.

        Args:
            engines: compute parts of each block until `forget`; a family without block programs gets none.
        """

    def caching(self, step_cache: str, sharing: Sharing | None = None) -> AbstractContextManager[None]:
        """Reuse values across steps while entered.

        Args:
            step_cache: as in the plan.
            sharing: the processes that share the tokens of a pass, if several do.
        """

    def forget(self) -> None:
        """Free values cached for a text or a size, and use no block engines from then on."""


@dataclass(frozen=True)
class SectionInputs:
    """What a section of a video is sampled from, besides noise and text.

    Attributes:
        section: has the positions of all latent frames.
        clean: the image and the nearest frame made before, (1, channels, 2, height, width), float32.
        history_2x: the frames before that, (1, channels, 2, height, width), float32.
        history_4x: the frames before those, (1, channels, 16, height, width), float32.
        image_embeds: the embeddings of the image, (1, tokens, width).
        guidance_scale: the scale that the model was distilled to follow in one pass.
    """

    section: Section
    clean: torch.Tensor
    history_2x: torch.Tensor
    history_4x: torch.Tensor
    image_embeds: torch.Tensor
    guidance_scale: float


class SectionDenoiser(Denoiser, Protocol):
    """A transformer of a model that makes videos in sections. `see` comes before its first call for a section.

    The timestep is a scalar; text embeddings are those of the text alone.
    """

    def see(self, inputs: SectionInputs) -> None:
        """Set what the section is sampled from; it stays in memory until `PyTorchDenoiser.forget`."""


class StreamDenoiser(Denoiser, Protocol):
    """A transformer that denoises video and sound together. `see` comes before its first call for a clip.

    Latents and predictions are joined, see `streams.Streams`. Text embeddings are those for the video and those for the
    sound, one after the other in each token.
    """

    def see(self, streams: Streams, skipping_blocks: tuple[int, ...]) -> None:
        """Set the shapes of the streams, and the blocks that skip their self-attention in passes of that kind."""


class ControlDenoiser(Denoiser, Protocol):
    """A transformer that is steered. `steer` comes before its first call; `PyTorchDenoiser.compute` keeps it.

    The latents of a call have further channels after their own, see `Components.control_latents`.
    """

    def steer(self, scales: tuple[float, ...], face: torch.Tensor | None = None) -> None:
        """Set by what the result of each control block is multiplied, and the frames of a face.

        Args:
            face: (frames, side, side, 3), uint8, on the CPU.
        """


@dataclass(frozen=True)
class ControlClip:
    """What steers a clip.

    Attributes:
        frames, height, width: of the clip, in frames and pixels.
        video: the control video, (frames, height, width, 3), uint8, on the CPU; `None` for none.
        mask: where it changes, (frames, height, width), uint8; `None` for everywhere.
        references: images of things that the clip shows, in RGB and of any size.
        background: the video that a character is put into, shaped like `video`; `None` for none.
        before: the clip's first frames, which are those of the clip before, (frames, height, width, 3), float32 in -1
            to 1; `None` for none.
    """

    frames: int
    height: int
    width: int
    video: torch.Tensor | None
    mask: torch.Tensor | None
    references: Sequence[Image]
    background: torch.Tensor | None = None
    before: torch.Tensor | None = None

    @property
    def changes(self) -> torch.Tensor | None:
        """Which pixels change, (frames, height, width), bool; `None` for all."""
        return None if self.mask is None else self.mask > CHANGES_ABOVE


class VideoEncoder(Protocol):
    """The encoder of a VAE, for videos and for clips whose frames are given at the start and the end only."""

    def latents(self, images: Sequence[torch.Tensor], frames: int, tile: int | None = None) -> torch.Tensor:
        """Return the latents of a clip, (1, channels, latent frames, height, width), float32, normalised.

        Args:
            images: the first frame and, if there are two, the last, each (3, height, width), float32 in -1 to 1.
            frames: of the clip; those between the images are gray.
            tile: side of the tiles that frames are encoded in, in latents; `None` encodes them whole. An engine has
                its size, and encodes them whole.
        """

    def video_latents(
        self,
        video: torch.Tensor,
        tile: int | None,
        check: Callable[[], None],
        shown: torch.Tensor | None = None,
        chunk: int = 1,
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the latents of a video, as `latents` does; never called on engines.

        Args:
            video: (frames, height, width, 3), uint8, on the CPU.
            tile: see `latents`.
            check: called before each call of the encoder; may raise.
            shown: the pixels of the video that are encoded, (frames, height, width), bool; the others are gray.
            chunk: the most latent frames to encode in one call, after the first, which is always alone.
            before: frames that are encoded instead of the first ones, (frames, height, width, 3), float32 in -1 to 1.
        """


class ImageSampler(Protocol):
    """The encoder of a VAE, for images that are given one at a time."""

    def sample(self, pixels: torch.Tensor, generator: torch.Generator, tile: int | None = None) -> torch.Tensor:
        """Return latents of an image, drawn from its distribution, (1, channels, 1, height, width), float32.

        Args:
            pixels: (1, 3, height, width), float32 in -1 to 1.
            generator: the video's: it draws for the image, then for the last image, then the noise of each section.
            tile: see `VideoEncoder.latents`.
        """


class VideoDecoder(Protocol):
    """A causal video decoder."""

    def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
        """Yield decoded frames in order.

        Args:
            latents: (1, channels, latent frames, height, width), normalised as the transformer sees them.
            chunk: latent frames to decode in one call, after the first, which is always alone.
            tile: side of the tiles that frames are decoded in, in latents; `None` decodes them whole. An engine has
                its size, and decodes them whole.

        Yields:
            (frames, height, width, 3), float32 in -1 to 1: on the decoder's device, or on the CPU if tiled; or uint8,
            rounded from that. Tiled frames are complete at the end only: until then, each call yields 0 frames.
        """


class SectionDecoder(VideoDecoder, Protocol):
    """The decoder of a model that makes videos in sections."""

    def window(self, latents: torch.Tensor, tile: int | None = None) -> torch.Tensor:
        """Return the frames of latents, (frames, height, width, 3), float32 on the CPU, in about -1 to 1.

        Values outside are not cut off, because sections blend first.

        Args:
            latents, tile: see `VideoDecoder.frames`.
        """


class ResumableDecoder(VideoDecoder, Protocol):
    """A decoder in PyTorch that continues where an engine failed."""

    def decode_from(
        self, latents: torch.Tensor, chunk: int, start: int, caches: Sequence[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Decode from latent frame `start`, with the caches that an engine returned for the frames before it."""


@runtime_checkable
class CompilableVae(Protocol):
    """A part of a VAE in PyTorch that has faster kernels."""

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""

    def compute(self, speed: Speed, on_degraded: OnDegraded | None = None) -> None:
        """Apply a plan's `Speed` from the next call on; what fails costs time only."""


class PyTorchVideoDecoder(ResumableDecoder, CompilableVae, Protocol):
    """A VAE decoder in PyTorch."""


class StripDecoder(Protocol):
    """A VAE decoder for one strip of each frame."""

    def frames(self, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        """Yield decoded frames as `VideoDecoder.frames` does, of one strip."""


class Components(Protocol):
    """What a family's `components` module provides to this package."""

    def text_encoder(self, spec: ModelSpec, name: str, tokenizer: Any, model: TextModel) -> TextEncoder:
        """Make the text encoder `name` of its tokenizer and a model that embeds tokens."""

    def text_connector(self, module: torch.nn.Module, device: str | torch.device) -> TextConnector:
        """Make the function of loaded connectors. Called only if the model has them, like the next one."""

    def latent_upsampler(self, spec: ModelSpec, module: torch.nn.Module, device: str | torch.device) -> LatentUpsampler:
        """Make the function of a loaded upsampler of latents."""

    def sound_decoder(self, name: str, module: torch.nn.Module, device: str | torch.device) -> SoundDecoder:
        """Make the function of one of `SOUND_DECODERS`, loaded."""

    def image_encoder(self, processor: Any, model: ImageModel) -> ImageEncoder:
        """Make the image encoder of an image processor and a model that embeds pixels."""

    def image_model(self, module: torch.nn.Module, device: str | torch.device) -> ImageModel:
        """Make the function of a loaded image encoder that embeds pixels."""

    def video_encoder(self, module: torch.nn.Module, device: str | torch.device) -> VideoEncoder:
        """Make the encoder of a loaded VAE that computes on `device`; its weights may be elsewhere until then."""

    def control_latents(
        self,
        encoder: VideoEncoder,
        spec: ModelSpec,
        clip: ControlClip,
        tile: int | None,
        check: Callable[[], None],
        chunk: int = 1,
    ) -> torch.Tensor:
        """Return the channels that the transformers read of what steers a clip, (1, channels, frames, height, width).

        Called only if the model has a `control_input`, like `ControlDenoiser.steer`.

        Args:
            tile, check, chunk: see `VideoEncoder`.
        """

    def row_calls(self, spec: ModelSpec, part: ComponentPlan, speed: Speed) -> Iterator[RowCall]:
        """Yield the operations of `row_operations` that kernels compute in blocks that are not compiled.

        Those of attention in FP8 are left out.

        Args:
            part: a transformer's.
        """

    def denoiser(self, module: torch.nn.Module, speed: Speed = ...) -> PyTorchDenoiser:
        """Make the denoiser of a loaded transformer; its weights may be elsewhere until it is called."""

    def video_decoder(self, module: torch.nn.Module, device: str | torch.device) -> PyTorchVideoDecoder:
        """Make the decoder of a loaded VAE that computes on `device`; its weights may be elsewhere until then."""

    def strip_decoder(
        self, module: torch.nn.Module, device: str | torch.device, number: int, count: int, speed: Speed
    ) -> StripDecoder:
        """Make the decoder of strip `number` of `count`. Called only if the planner may divide frames (`VaeSpec`)."""

    def share_tokens(self, module: torch.nn.Module, tokens: Any) -> None:
        """Let several processes compute a transformer together; see `parallel.ulysses.Tokens`."""


def components_of(spec: ModelSpec) -> Components:
    """Return the components of a model's family."""
    return cast("Components", registry.components_of(spec.family))
