"""Latents to frames, a few latent frames at a time. Knows nothing about files."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan, unpatchify

from runtime.core.errors import BadResultError
from runtime.core.plan import ComponentPlan, Speed
from runtime.core.tiles import spans
from runtime.engines.identity import CLIP_PROGRAM
from runtime.engines.service import OpenEngines
from runtime.execution import vae_fast
from runtime.execution.engine_fallback import Guarded
from runtime.execution.tiling import shares
from runtime.execution.vae_steps import DecoderSteps, Trim, as_frames
from runtime.planner import vae_precision

# Frames handed on at a time once tiles have come together.
_TOGETHER = 4


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
            rounded from that. Tiles come together at the very end: until then, a batch of 0 frames comes after each
            call.
        """
        ...


class PyTorchVideoDecoder:
    """The decoder of a `diffusers.AutoencoderKLWan`, computed by `vae_steps`.

    The causal convolutions' caches take the first latent frame alone and then any number at once; the result equals
    one at a time up to rounding.

    Args:
        module: its weights may lie elsewhere until it is called.
        device: where it computes; by default, where its weights are.
    """

    def __init__(self, module: AutoencoderKLWan, device: str | torch.device | None = None) -> None:
        self._vae: Any = module
        config: Any = module.config
        parameter = next(module.decoder.parameters())
        device, shape = device or parameter.device, (1, config.z_dim, 1, 1, 1)
        # In float32 always: rounded, they would shift every colour.
        self._mean = torch.tensor(config.latents_mean, device=device, dtype=torch.float32).view(shape)
        self._std = torch.tensor(config.latents_std, device=device, dtype=torch.float32).view(shape)
        self._dtype = parameter.dtype
        self._patch_size = config.patch_size
        self._steps = DecoderSteps(module.decoder)

    def compute(self, speed: Speed, on_degraded: Callable[[str, str], None] | None = None) -> None:
        """Compute so from now on; see `PyTorchDenoiser.compute`."""

        def told(reason: str) -> None:
            if on_degraded is not None:
                on_degraded("compiled", reason)

        fast = speed.compiled and speed.channels_last and vae_fast.can_run(self._mean.device)
        between = vae_fast.Fast(self._mean.device, self._dtype, told) if fast else None
        self._steps = DecoderSteps(self._vae.decoder, channels_last=speed.channels_last, between=between)

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return self._steps.between.compile_seconds

    def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
        """See `VideoDecoder`."""
        if tile is None or max(latents.shape[3:]) <= tile:
            yield from self.go_on(latents, chunk, 0, ())
        else:
            yield from self._tiled(latents, chunk, tile)

    def _tiled(self, latents: torch.Tensor, chunk: int, tile: int) -> Iterator[torch.Tensor]:
        """Decode tile by tile, each through the whole clip, so that the caches of one tile are all that is held.

        Tiles are blended as `AutoencoderKLWan.tiled_decode` does it, with its overlap, a quarter of a tile; ours are
        all of one size. The clip comes together in memory (RAM), in float16: 2 bytes a colour and pixel, whose
        rounding is a sixteenth of what 8 bits tell apart.
        """
        scale = self._vae.config.scale_factor_spatial
        rows, columns = spans(latents.shape[3], tile), spans(latents.shape[4], tile)
        clip: torch.Tensor | None = None
        for row, down in zip(rows, shares(rows, scale), strict=True):
            for column, across in zip(columns, shares(columns, scale), strict=True):
                share = (down[:, None] * across)[None, :, :, None].to(self._mean.device)
                start = 0
                part = latents[..., row.start : row.end, column.start : column.end]
                for frames in self.go_on(part, chunk, 0, ()):
                    if clip is None:
                        count = (latents.shape[2] - 1) * self._vae.config.scale_factor_temporal + 1
                        size = (count, latents.shape[3] * scale, latents.shape[4] * scale, frames.shape[3])
                        clip = torch.zeros(size, dtype=torch.float16)
                    end = start + len(frames)
                    place = clip[
                        start:end, row.start * scale : row.end * scale, column.start * scale : column.end * scale
                    ]
                    place += (frames * share).half().cpu()
                    start = end
                    yield clip[:0].float()
        assert clip is not None
        for start in range(0, len(clip), _TOGETHER):
            yield clip[start : start + _TOGETHER].float()

    @torch.inference_mode()
    def go_on(
        self,
        latents: torch.Tensor,
        chunk: int,
        start: int,
        caches: Sequence[torch.Tensor],
        trim: Trim | None = None,
    ) -> Iterator[torch.Tensor]:
        """Decode from latent frame `start` on, with an engine's caches of the frames before it.

        They hold two frames each, zeros where there was nothing: the convolutions pad with zeros, so that is the same.
        `trim` cuts off on the way what is not wanted of each frame.
        """
        vae = self._vae
        z = latents.to(self._mean.device, self._mean.dtype) * self._std + self._mean
        z = vae.post_quant_conv(z.to(self._dtype))
        held = [cache.to(z.device, z.dtype) for cache in caches]
        while start < z.shape[2]:
            end = min(start + chunk, z.shape[2]) if start else 1
            out, held = self._steps(z[:, :, start:end], held, first=start == 0, trim=trim)
            if self._patch_size is not None:
                out = unpatchify(out, patch_size=self._patch_size)
            yield as_frames(out)
            start = end


def as_bytes(frames: torch.Tensor, part: ComponentPlan | None) -> torch.Tensor:
    """Return decoded frames in 8 bits, uint8.

    Args:
        frames: float32 in -1 to 1.
        part: how the VAE that gave them is planned.

    Raises:
        BadResultError: if they hold NaN or Inf.
    """
    if not torch.isfinite(frames).all().item():
        raise _not_numbers(part)
    return _rounded(frames)


def fetch(frames: torch.Tensor, part: ComponentPlan | None) -> Callable[[], torch.Tensor]:
    """Start decoded frames on their way to the CPU, in 8 bits; what is returned waits until they are there.

    A GPU copies into page-locked memory while it goes on with what is started next.

    Args:
        frames, part: see `as_bytes`; what is uint8 already is only copied.
    """
    if frames.dtype == torch.uint8:
        return frames.cpu
    if frames.device.type != "cuda":
        return lambda: as_bytes(frames, part)
    with torch.cuda.device(frames.device):
        there = _page_locked(_rounded(frames))
        finite = _page_locked(torch.isfinite(frames).all())
        copied = torch.cuda.Event()
        copied.record()

    def arrived() -> torch.Tensor:
        copied.synchronize()
        if not finite.item():
            raise _not_numbers(part)
        return there

    return arrived


def _page_locked(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a tensor on a GPU will be on the CPU once the stream has come so far."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _rounded(frames: torch.Tensor) -> torch.Tensor:
    return ((frames + 1.0) * 127.5).round().to(torch.uint8)


def _not_numbers(part: ComponentPlan | None) -> BadResultError:
    return BadResultError("The VAE gave values that are not numbers (NaN or Inf).", vae_precision.remedy(part))


class EngineVideoDecoder:
    """Two engines, the first step and the recurrent one, and PyTorch from the step on in which one fails.

    One that was made elsewhere may take whole clips; where it fails, PyTorch decodes all.
    """

    def __init__(self, engines: OpenEngines, fall_back: Callable[[str], PyTorchVideoDecoder]) -> None:
        self._guarded = Guarded(engines, fall_back)

    def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
        """See `VideoDecoder`."""
        if self._guarded.runs(CLIP_PROGRAM):
            yield from self._clip(latents, chunk)
            return
        caches: dict[str, torch.Tensor] = {}
        start = 0
        while start < latents.shape[2]:
            end = min(start + chunk, latents.shape[2]) if start else 1
            program, given = ("vae_next", caches) if start else ("vae_first", {})
            z = latents[:, :, start:end]
            outputs = self._guarded.call(
                lambda engines: engines.infer(program, z=z, **given),  # noqa: B023 - called at once
                lambda _: None,
            )
            if outputs is None and not start:
                yield from self._guarded.instead().frames(latents, chunk, tile)
                return
            if outputs is None:
                yield from self._guarded.instead().go_on(latents, chunk, start, list(caches.values()))
                return
            yield outputs.pop("frames")
            caches = outputs
            start = end

    def _clip(self, latents: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
        outputs = self._guarded.call(lambda engines: engines.infer(CLIP_PROGRAM, z=latents), lambda _: None)
        if outputs is None:
            yield from self._guarded.instead().frames(latents, chunk)
        else:
            yield outputs["frames"]
