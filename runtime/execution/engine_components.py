"""Components that run on engines, and in PyTorch once an engine has failed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from diffusers.utils.torch_utils import randn_tensor

from runtime.core.facts import Fact
from runtime.engines.service import OpenEngines
from runtime.execution.components import (
    PROMPTED,
    Denoiser,
    ImageSampler,
    ResumableDecoder,
    SoundDecoder,
    VideoEncoder,
)
from runtime.execution.engine_failures import failure_of_engine
from runtime.execution.image_encoder import ImageModel
from runtime.execution.text_encoder import TextModel
from runtime.execution.vae_groups import GroupDecoder, blended_groups
from runtime.models.vae_groups import CLIP_PROGRAM, IMAGE_PROGRAM, group_program

Part = TypeVar("Part")
Result = TypeVar("Result", bound=torch.Tensor | Mapping[str, torch.Tensor] | None)


class EngineWithFallback(Generic[Part]):
    """Engines, replaced by `fall_back`'s component if one fails, runs out of memory or returns NaN or Inf.

    Args:
        engines: loaded; the caller closes them. An error of any type counts as a failure.
        fall_back: called once, with the reason; closes the engines and returns the same component in PyTorch.
    """

    def __init__(self, engines: OpenEngines, fall_back: Callable[[Fact], Part]) -> None:
        self._engines = engines
        self._fall_back = fall_back
        self._instead: Part | None = None

    def call(self, on_engines: Callable[[OpenEngines], Result], in_pytorch: Callable[[Part], Result]) -> Result:
        """Return the result of the engines, or of PyTorch after a failure."""
        if self._instead is None:
            try:
                result = on_engines(self._engines)
                if _finite(result):
                    return result
                reason = Fact("execution.engine_not_finite")
            except Exception as error:
                reason = failure_of_engine(error, self._engines.device, "execution.engine_out_of_memory")
            # Outside of the handler: the exception's frames reference memory that is needed now.
            self._instead = self._fall_back(reason)
        return in_pytorch(self._instead)

    def runs(self, program: str) -> bool:
        """Return whether there is an engine for a program and no engine has failed."""
        return self._instead is None and self._engines.runs(program)

    def release(self, program: str) -> None:
        """Free the buffers of an engine that is not called again for now."""
        if self._instead is None:
            self._engines.release(program)

    def fallback(self) -> Part:
        """Return the component in PyTorch, after an engine has failed."""
        assert self._instead is not None
        return self._instead


def _finite(result: torch.Tensor | Mapping[str, torch.Tensor] | None) -> bool:
    # Only the first output is checked; errors in the others, the caches, appear in the next call.
    first = next(iter(result.values())) if isinstance(result, Mapping) else result
    return first is None or bool(torch.isfinite(first).all().item())


class EngineTextModel:
    """An engine that falls back to PyTorch when it fails.

    Args:
        program: the engine's.
        length: tokens of every text of the engine; shorter texts are padded for it.
    """

    def __init__(
        self, engines: OpenEngines, fall_back: Callable[[Fact], TextModel], *, program: str, length: int
    ) -> None:
        self._engines = EngineWithFallback(engines, fall_back)
        self._program = program
        self._length = length

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See `TextModel`; the result is as long as `ids`."""
        tokens = ids.shape[1]
        input_ids, attention_mask = (F.pad(tensor, (0, self._length - tokens)) for tensor in (ids, mask))

        def embed(engines: OpenEngines) -> torch.Tensor:
            outputs = engines.infer(self._program, input_ids=input_ids, attention_mask=attention_mask)
            return outputs["embeds"][:, :tokens].clone()

        return self._engines.call(embed, lambda model: model(ids, mask))


class EngineImageModel:
    """An engine that embeds one image per call, and falls back to PyTorch when it fails."""

    def __init__(self, engines: OpenEngines, fall_back: Callable[[Fact], ImageModel]) -> None:
        self._engines = EngineWithFallback(engines, fall_back)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of images, (images, tokens, width); `pixels` are (images, 3, side, side)."""

        def embed(engines: OpenEngines) -> torch.Tensor:
            return torch.cat(
                [engines.infer("image_encoder", pixels=image)["embeds"].clone() for image in pixels.split(1)]
            )

        return self._engines.call(embed, lambda model: model(pixels))


class EngineVideoEncoder:
    """Two engines, for the first frame and the others, that fall back to PyTorch when one fails.

    Args:
        scale: frames of one latent frame.
    """

    def __init__(self, engines: OpenEngines, fall_back: Callable[[Fact], VideoEncoder], scale: int) -> None:
        self._engines = EngineWithFallback(engines, fall_back)
        self._scale = scale

    def latents(self, images: Sequence[torch.Tensor], frames: int, tile: int | None = None) -> torch.Tensor:
        """See `VideoEncoder`."""
        return self._engines.call(
            lambda engines: self._encoded(engines, images, frames),
            lambda encoder: encoder.latents(images, frames, tile),
        )

    def _encoded(self, engines: OpenEngines, images: Sequence[torch.Tensor], frames: int) -> torch.Tensor:
        first, *last = [image.permute(1, 2, 0)[None] for image in images]
        gray = torch.zeros_like(first).repeat(self._scale, 1, 1, 1)
        caches = dict(engines.infer("vae_encoder_first", frames=first))
        latents = [caches.pop("z").clone()]
        engines.release("vae_encoder_first")
        steps, constant = (frames - 1) // self._scale, False
        for step in range(steps):
            clip = torch.cat([gray[1:], *last]) if last and step == steps - 1 else gray
            if constant and clip is gray:
                # From equal caches and frames follows the same.
                latents.append(latents[-1])
                continue
            outputs = dict(engines.infer("vae_encoder_next", frames=clip, **caches))
            latents.append(outputs.pop("z").clone())
            # Those of the last convolutions become constant last.
            constant = all(torch.equal(caches[name], outputs[name]) for name in reversed(outputs))
            caches = outputs
        return torch.cat(latents, dim=2)


class EngineImageSampler:
    """An engine that encodes one image a call, and falls back to PyTorch when it fails."""

    def __init__(self, engines: OpenEngines, fall_back: Callable[[Fact], ImageSampler]) -> None:
        self._engines = EngineWithFallback(engines, fall_back)

    def sample(self, pixels: torch.Tensor, generator: torch.Generator, tile: int | None = None) -> torch.Tensor:
        """See `ImageSampler`."""
        frames = pixels.permute(0, 2, 3, 1).contiguous()
        moments = self._engines.call(
            lambda engines: engines.infer(IMAGE_PROGRAM, frames=frames)["moments"], lambda _: None
        )
        if moments is None:
            return self._engines.fallback().sample(pixels, generator, tile)
        mean, deviation = moments.chunk(2, dim=1)
        drawn = randn_tensor(tuple(mean.shape), generator=generator, device=mean.device, dtype=mean.dtype)
        return mean + deviation * drawn


class EngineDenoiser:
    """An engine that falls back to PyTorch in the call in which it fails.

    Args:
        timesteps: how many it takes, see `ModelSpec.timesteps`.
    """

    pairs = False

    def __init__(self, engines: OpenEngines, fall_back: Callable[[Fact], Denoiser], timesteps: int = 1) -> None:
        self._engines = EngineWithFallback(engines, fall_back)
        self._timesteps = timesteps

    def begin_step(self, *, fresh: bool, exact: bool) -> None:
        """See `Denoiser`; neither an engine nor its fallback has a step cache or sparse attention."""

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """See `Denoiser`; the result is valid until the second call after this one."""
        time = timestep.expand(self._timesteps).float()
        inputs = {"latents": latents, "timestep": time, "text_embeds": text_embeds.float()}
        return self._engines.call(
            lambda engines: engines.infer("transformer", **inputs)["velocity"],
            lambda denoiser: denoiser(latents, timestep, text_embeds),
        )

    def together(
        self, latents: torch.Tensor, timestep: torch.Tensor, texts: Mapping[str, torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """See `Denoiser`."""
        return [self(latents, timestep, text, which) for which, text in texts.items()]


class EngineVideoDecoder:
    """Two engines, for the first step and the others, that fall back to PyTorch in the step in which one fails.

    One that was made elsewhere may take whole clips; where it fails, PyTorch decodes all.
    """

    def __init__(self, engines: OpenEngines, fall_back: Callable[[Fact], ResumableDecoder]) -> None:
        self._engines = EngineWithFallback(engines, fall_back)

    def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
        """See `VideoDecoder`."""
        if self._engines.runs(CLIP_PROGRAM):
            yield from self._clip(latents, chunk)
            return
        caches: dict[str, torch.Tensor] = {}
        start = 0
        while start < latents.shape[2]:
            end = min(start + chunk, latents.shape[2]) if start else 1
            program, inputs = ("vae_next", caches) if start else ("vae_first", {})
            z = latents[:, :, start:end]
            outputs = self._engines.call(
                lambda engines: engines.infer(program, z=z, **inputs),  # noqa: B023 - called at once
                lambda _: None,
            )
            if outputs is None and not start:
                yield from self._engines.fallback().frames(latents, chunk, tile)
                return
            if outputs is None:
                yield from self._engines.fallback().decode_from(latents, chunk, start, list(caches.values()))
                return
            yield outputs.pop("frames")
            caches = outputs
            if not start:
                self._engines.release(program)
            start = end

    def _clip(self, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        outputs = self._engines.call(lambda engines: engines.infer(CLIP_PROGRAM, z=latents), lambda _: None)
        if outputs is None:
            yield from self._engines.fallback().frames(latents, chunk)
        else:
            yield outputs["frames"]


class EngineSoundDecoder:
    """An engine of one of `SOUND_DECODERS` that falls back to PyTorch when it fails.

    Args:
        program: the engine's.
    """

    def __init__(self, engines: OpenEngines, fall_back: Callable[[Fact], SoundDecoder], *, program: str) -> None:
        self._engines = EngineWithFallback(engines, fall_back)
        self._program = program

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """See `SoundDecoder`."""

        def decode(engines: OpenEngines) -> torch.Tensor:
            inputs = {"spectrum" if self._program == "vocoder" else "sound": values.float()}
            (decoded,) = engines.infer(self._program, **inputs).values()
            return decoded.clone()

        return self._engines.call(decode, lambda decoder: decoder(values))


class EngineGroupDecoder:
    """Engines for groups of latent frames, that fall back to PyTorch in the group in which one fails."""

    def __init__(self, engines: OpenEngines, fall_back: Callable[[Fact], GroupDecoder]) -> None:
        self._engines = EngineWithFallback(engines, fall_back)

    def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
        """See `VideoDecoder`; a group of latent frames is decoded in a call, not `chunk`."""
        del chunk
        for part in self._unclamped(latents, tile):
            yield part.clamp(-1.0, 1.0)

    def window(self, latents: torch.Tensor, tile: int | None = None) -> torch.Tensor:
        """See `components.SectionDecoder`."""
        return torch.cat([part.cpu() for part in self._unclamped(latents, tile)])

    def _unclamped(self, latents: torch.Tensor, tile: int | None) -> Iterator[torch.Tensor]:
        def decode(z: torch.Tensor) -> torch.Tensor:
            return self._engines.call(
                lambda engines: engines.infer(group_program(z.shape[2]), z=z)["frames"].clone(),
                lambda decoder: decoder.group(z, tile),
            )

        return blended_groups(latents, decode)
