"""The latents of a video and of its sound as one tensor, so that schedulers, checkpoints and the loop see one state."""

import math
from dataclasses import dataclass

import torch

from runtime.core.plan import ExecutionPlan


@dataclass(frozen=True)
class Streams:
    """The shapes of both streams, which follow each other in a tensor (1, numbers).

    Attributes:
        video: (1, channels, frames, height, width).
        sound: (1, channels, latents, bins).
        fps: frames per second of the video.
        keyframes: numbers of frames, from 0, that a transformer is guided towards: it takes and predicts a further
            latent frame for each of them, before those of the clip.
        given: how many of the first latent frames that a transformer takes are given, if any are.
    """

    video: tuple[int, int, int, int, int]
    sound: tuple[int, int, int, int]
    fps: float
    keyframes: tuple[int, ...] = ()
    given: int = 1

    @classmethod
    def of(cls, plan: ExecutionPlan) -> "Streams | None":
        """Return the streams of a plan; `None` if its model makes no sound, and latents are those of the video."""
        if plan.sound_shape is None:
            return None
        keyframes = tuple(plan.keyframe_places.values())
        return cls(plan.latent_shape, plan.sound_shape, plan.fps, keyframes, max(len(plan.images), 1))

    def join(self, video: torch.Tensor, sound: torch.Tensor) -> torch.Tensor:
        """Return both streams as one tensor."""
        return torch.cat([video.reshape(1, -1), sound.reshape(1, -1)], dim=1)

    def split(self, joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the video, with or without keyframes, and the sound of a joined tensor, as views."""
        _, channels, _, height, width = self.video
        count = joined.shape[1] - math.prod(self.sound)
        return joined[:, :count].reshape(1, channels, -1, height, width), joined[:, count:].reshape(self.sound)

    def with_keyframes(self, joined: torch.Tensor, keyframes: torch.Tensor) -> torch.Tensor:
        """Return joined latents as a transformer takes them.

        Args:
            keyframes: their latents, (1, channels, keyframes, height, width).
        """
        video, sound = self.split(joined)
        return self.join(torch.cat([keyframes, video], dim=2), sound)

    def without_keyframes(self, joined: torch.Tensor) -> torch.Tensor:
        """Return the part of joined latents or of a prediction that is of the clip and its sound."""
        if not self.keyframes:
            return joined
        video, sound = self.split(joined)
        return self.join(video[:, :, len(self.keyframes) :], sound)


def video_of(latents: torch.Tensor, streams: Streams | None) -> torch.Tensor:
    """Return the video's latents, (1, channels, frames, height, width), of those of a clip with or without sound."""
    return latents if streams is None else streams.split(latents)[0]
