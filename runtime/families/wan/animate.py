"""Wan-Animate: a character that moves as poses and a face in videos do, also in the place of someone in a video.

Equal to diffusers' `WanAnimateTransformer3DModel` and `WanAnimatePipeline` up to rounding. Differences:

- The face video is encoded once per clip, not in each step. Without the prompt all of its frames are black, so that the
  motion encoder takes one of them.
- The attention to the face is added within the block before it, so that step caches see both, and steps that skip the
  blocks skip it too.
- The latents of the poses are further channels of the latents that a `Denoiser` takes.
- A process with a share of the tokens completes its first and last latent frame with zeros: tokens do not depend on
  each other in the attention to the face.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image

from runtime.execution.components import PROMPTED, ControlClip, VideoEncoder
from runtime.models.spec import ModelSpec


def face_blocks(module: Any) -> Sequence[Any]:
    """Return a transformer's attentions to a face video; none if it has none."""
    blocks: Sequence[Any] = getattr(module, "face_adapter", ())
    return blocks


def face_step(block: Any, x: torch.Tensor, face: torch.Tensor, before: int = 0, after: int = 0) -> torch.Tensor:
    """Return the sum of hidden states and what they attend to of a face. The function is compiled as a whole.

    Tokens of a latent frame attend to those of the face in the same latent frame.

    Args:
        block: a `WanAnimateFaceBlockCrossAttention`.
        x: hidden states, (batch, tokens, width), in the dtype of the block's arithmetic or float32.
        face: from `face_tokens`, of the latent frames that the tokens are in.
        before, after: how many tokens the first latent frame lacks, and the last one.
    """
    batch, frames = face.shape[:2]
    heads = (block.heads, -1)
    query = block.norm_q(block.to_q(block.pre_norm_q(x).to(face.dtype)).unflatten(2, heads))
    if before or after:
        query = F.pad(query, (0, 0, 0, 0, before, after))
    normed = block.pre_norm_kv(face).flatten(1, 2)
    keys = block.norm_k(block.to_k(normed).unflatten(2, heads))
    values = block.to_v(normed).unflatten(2, heads)
    by_frame = (part.unflatten(1, (frames, -1)).flatten(0, 1) for part in (query, keys, values))
    attended = block.attend_text(*by_frame).flatten(2).unflatten(0, (batch, frames)).flatten(1, 2)
    out: torch.Tensor = x + block.to_out(attended[:, before : before + x.shape[1]])
    return out


def face_forward(
    self: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, before: int = 0, after: int = 0
) -> torch.Tensor:
    """Run one attention to the face; unlike diffusers', it returns the sum, see `face_step`."""
    out: torch.Tensor = self.step(self, hidden_states, encoder_hidden_states, before, after)
    return out


@dataclass(frozen=True)
class FaceHint:
    """An attention to the face after a block; the attributes are the arguments of `face_step`."""

    block: Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]
    face: torch.Tensor
    before: int
    after: int

    def added_to(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum with a block's output."""
        return self.block(x, self.face, self.before, self.after)


class FaceBranch:
    """The attentions to the face in one forward pass.

    Args:
        module: a transformer with them.
        face: from `face_tokens`.
        count: tokens of the pass.
        own: the place of the first token that this process computes, and how many it computes; padding may follow.
    """

    def __init__(self, module: Any, face: torch.Tensor, count: int, own: tuple[int, int]) -> None:
        start, tokens = own
        of_frame = count // face.shape[1]
        first, self._before = divmod(start, of_frame)
        frames = -(-(self._before + tokens) // of_frame)
        self._after = frames * of_frame - self._before - tokens
        self._module = module
        self._face = face
        if (first, frames) != (0, face.shape[1]):
            # Padding attends to the last latent frame.
            numbers = torch.arange(first, first + frames, device=face.device).clamp(max=face.shape[1] - 1)
            self._face = face[:, numbers]

    def hint(self, index: int) -> FaceHint | None:
        """Return what is added to the output of block `index`; `None` if that is nothing."""
        number, rest = divmod(index, self._module.config.inject_face_latents_blocks)
        return None if rest else FaceHint(self._module.face_adapter[number], self._face, self._before, self._after)


def face_tokens(module: Any, frames: torch.Tensor, passes: Sequence[str], embeds: torch.Tensor) -> torch.Tensor:
    """Return what blocks attend to of a face video, (passes, 1 + latent frames, tokens, width).

    The tokens of the character's latent frame, the first one, are zeros.

    Args:
        frames: (frames, side, side, 3), uint8.
        passes: see `Denoiser`; without the prompt, the face is black.
        embeds: has the dtype and the device of the arithmetic.
    """
    parts = []
    for which in passes:
        shown = frames if which == PROMPTED else torch.zeros_like(frames[:1])
        motion = [
            module.motion_encoder(_pixels(batch, embeds))
            for batch in shown.split(module.config.motion_encoder_batch_size)
        ]
        parts.append(torch.cat(motion).expand(len(frames), -1)[None])
    tokens = module.face_encoder(torch.cat(parts))
    return torch.cat([torch.zeros_like(tokens[:, :1]), tokens], dim=1)


def _pixels(frames: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return frames, (frames, height, width, 3), uint8, as (frames, 3, height, width) in -1 to 1."""
    return (frames.to(like.device).permute(0, 3, 1, 2).float() / 127.5 - 1).to(like.dtype)


def add_poses(module: Any, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Add the poses to the embedded latents of the clip, which are written over.

    Args:
        x: (batch, width, 1 + latent frames, rows, columns); the first latent frame is the character's.
        inputs: what the `Denoiser` was given, see `control_latents`.
    """
    x[:, :, 1:] += module.pose_patch_embedding(inputs[:, module.config.in_channels :, 1:])
    return x


def control_latents(
    encoder: VideoEncoder,
    spec: ModelSpec,
    clip: ControlClip,
    tile: int | None,
    check: Callable[[], None],
    chunk: int = 1,
) -> torch.Tensor:
    """Return what the transformer reads besides noise, as `WanAnimatePipeline` prepares it.

    These are, for each latent frame: a mask, 1 where the clip is known, latents of what is known, and those of the
    poses. The first latent frame is the image of the character. After it, the background is known where the mask is
    black; without a background, frames are gray, and nothing is known. Frames of the clip before are known too.

    Args:
        clip: its only reference is the image of the character.
        tile, check, chunk: see `VideoEncoder`.

    Returns:
        (1, frames of a latent + 2 × latent channels, 1 + latent frames, height, width), float32.
    """
    assert clip.video is not None
    (character,) = clip.references
    image = encoder.latents([_on_black(character, clip.width, clip.height)], 1, tile)
    if clip.before is not None:
        video = torch.zeros_like(clip.video) if clip.background is None else clip.background
        shown = torch.zeros(video.shape[:3], dtype=torch.bool) if clip.background is None else None
        known = encoder.video_latents(video, tile, check, shown, chunk, clip.before)
    elif clip.background is None:
        known = encoder.latents([torch.zeros(3, clip.height, clip.width)], clip.frames, tile)
    else:
        known = encoder.video_latents(clip.background, tile, check, None, chunk)
    poses = encoder.video_latents(clip.video, tile, check, None, chunk)
    mask = _known_frames(spec, clip).to(known.device)
    first = torch.cat([torch.ones_like(mask[:, :, :1]), image, torch.zeros_like(image)], dim=1)
    return torch.cat([first, torch.cat([mask, known, poses], dim=1)], dim=2)


def _known_frames(spec: ModelSpec, clip: ControlClip) -> torch.Tensor:
    """Return the mask of what is known, with the frames of each latent as channels, 0 to 1.

    (1, frames of a latent, latent frames, height, width); the first latent frame has one frame, which is repeated.
    """
    scale, stride = spec.vae.scale_factor_spatial, spec.vae.scale_factor_temporal
    size = clip.height // scale, clip.width // scale
    if clip.mask is None:
        frames = torch.zeros(clip.frames, *size)
    else:
        frames = F.interpolate(1 - clip.mask[:, None].float() / 255, size, mode="nearest")[:, 0]
    if clip.before is not None:
        frames[: len(clip.before)] = 1
    frames = torch.cat([frames[:1].expand(stride - 1, -1, -1), frames])
    return frames.unflatten(0, (-1, stride)).transpose(0, 1)[None]


def _on_black(image: Image.Image, width: int, height: int) -> torch.Tensor:
    """Return an image as a frame, (3, height, width), float32 in -1 to 1: all of it, on black.

    Source: `WanAnimateImageProcessor`.
    """
    wide = width / height < image.width / image.height
    inner = (width, image.height * width // image.width) if wide else (image.width * height // image.height, height)
    frame = Image.new("RGB", (width, height))
    resized = image.resize(inner, Image.Resampling.BILINEAR)
    frame.paste(resized, (width // 2 - inner[0] // 2, height // 2 - inner[1] // 2))
    data = torch.frombuffer(bytearray(frame.tobytes()), dtype=torch.uint8)
    return data.view(height, width, 3).permute(2, 0, 1).float() / 127.5 - 1
