"""Guidance of models that denoise video and sound together: several kinds, with scales of their own for each stream.

Source: `LTX2Pipeline.__call__` of diffusers. Differences are those of predicted clean latents, because the result is
scaled to their deviation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from runtime.core.plan import ExecutionPlan
from runtime.execution.components import ISOLATED, PROMPTED, SKIPPING, UNPROMPTED
from runtime.execution.streams import Streams
from runtime.models.spec import ModelSpec, StreamGuidance


@dataclass(frozen=True)
class StreamSampling:
    """How the two streams of a clip are sampled.

    Attributes:
        streams: their shapes.
        guidance: of both, where a step's guidance scale is above 1.
    """

    streams: Streams
    guidance: StreamGuidance

    @classmethod
    def of(cls, plan: ExecutionPlan, spec: ModelSpec) -> "StreamSampling | None":
        """Return that of a plan; `None` if its model makes no sound."""
        streams, latents = Streams.of(plan), spec.sound_latents
        return None if streams is None or latents is None else cls(streams, latents.guidance)

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes of a step with guidance.

        They are with the prompt (`PROMPTED`), without (`UNPROMPTED`), with blocks that skip their self-attention
        (`SKIPPING`), and without attention between the streams (`ISOLATED`).
        """
        kinds = {
            PROMPTED: True,
            UNPROMPTED: True,
            SKIPPING: self.guidance.skips,
            ISOLATED: self.guidance.isolates,
        }
        return tuple(which for which, runs in kinds.items() if runs)

    def velocity(
        self, predicted: Mapping[str, torch.Tensor], latents: torch.Tensor, sigma: float, scale: float
    ) -> torch.Tensor:
        """Return the guided velocity of both streams, joined, float32.

        Args:
            predicted: the velocity of each of `passes`, float32.
            latents: before the step, joined, with keyframes if there are any; so are all velocities.
            sigma: the noise level before the step.
            scale: classifier-free guidance scale of the video.
        """
        guidance = self.guidance

        def clean(which: str) -> Sequence[torch.Tensor]:
            return self.streams.split(latents - predicted[which] * sigma)

        prompted, unprompted = clean(PROMPTED), clean(UNPROMPTED)
        scales = (scale, guidance.sound_scale)
        guided = [with_ + (by - 1) * (with_ - out) for with_, out, by in zip(prompted, unprompted, scales, strict=True)]
        video, sound = guidance.isolated
        factors = {SKIPPING: guidance.skipped, ISOLATED: (video - 1, sound - 1)}
        for which in self.passes[2:]:
            parts = zip(guided, prompted, clean(which), factors[which], strict=True)
            guided = [g + by * (p - o) for g, p, o, by in parts]
        results = [_rescaled(g, p, by) for g, p, by in zip(guided, prompted, guidance.rescaled, strict=True)]
        return (latents - self.streams.join(*results)) / sigma


def _rescaled(guided: torch.Tensor, prompted: torch.Tensor, share: float) -> torch.Tensor:
    """Return guided clean latents, scaled by a share to the standard deviation of those with the prompt.

    Source: section 3.4 of https://arxiv.org/abs/2305.08891.
    """
    if not share:
        return guided
    return share * guided * (prompted.std() / guided.std()) + (1 - share) * guided
