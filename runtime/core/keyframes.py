"""Where keyframes lie: each is the first frame of a latent frame other than the first one.

This is as in diffusers' `LTX2ConditionPipeline`, whose conditions have the index of a latent frame. With 8 frames in
each latent frame after the first, which has one, keyframes lie at frames 1, 9, 17, …, counted from 0.
"""


def latent_at(seconds: float, fps: int, stride: int, latents: int) -> int:
    """Return the number of the latent frame, from 1, whose first frame is nearest to a time.

    Args:
        stride: frames in each latent frame after the first.
        latents: of the clip, at least 2.
    """
    return min(max(round((seconds * fps - 1) / stride) + 1, 1), latents - 1)


def first_frame(latent: int, stride: int) -> int:
    """Return the number of the first frame, from 0, of a latent frame other than the first."""
    return (latent - 1) * stride + 1
