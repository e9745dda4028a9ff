"""The latents of a video and of its sound as one tensor, so that schedulers, checkpoints and the loop see one state."""

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
    """

    video: tuple[int, int, int, int, int]
    sound: tuple[int, int, int, int]
    fps: float

    @classmethod
    def of(cls, plan: ExecutionPlan) -> "Streams | None":
        """Return the streams of a plan; `None` if its model makes no sound, and latents are those of the video."""
        return None if plan.sound_shape is None else cls(plan.latent_shape, plan.sound_shape, plan.fps)

    def join(self, video: torch.Tensor, sound: torch.Tensor) -> torch.Tensor:
        """Return both streams as one tensor."""
        return torch.cat([video.reshape(1, -1), sound.reshape(1, -1)], dim=1)

    def split(self, joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the video and the sound of a joined tensor, as views."""
        count = torch.Size(self.video).numel()
        return joined[:, :count].reshape(self.video), joined[:, count:].reshape(self.sound)


def video_of(latents: torch.Tensor, streams: Streams | None) -> torch.Tensor:
    """Return the video's latents, (1, channels, frames, height, width), of those of a clip with or without sound."""
    return latents if streams is None else streams.split(latents)[0]
