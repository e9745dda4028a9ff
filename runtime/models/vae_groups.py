"""The groups of latent frames in which HunyuanVideo's VAE decodes a clip, and its programs. Imports no torch.

A clip of more than four latent frames is decoded in overlapping groups of five, each as if it were the start of a clip.
Source: the defaults of `diffusers.AutoencoderKLHunyuanVideo`, `tile_sample_min_num_frames` and
`tile_sample_stride_num_frames`.
"""

from collections.abc import Mapping, Sequence

# Latent frames of a group, and from the start of one to the start of the next.
GROUP, STRIDE = 5, 3
# The programs of engines that decode a group, and its latent frames.
GROUP_PROGRAMS: Mapping[str, int] = {f"vae_group_{size}": size for size in range(GROUP, 0, -1)}
# The program that encodes one image.
IMAGE_PROGRAM = "vae_encoder_image"
# The program that decodes a whole clip in one call.
CLIP_PROGRAM = "vae_clip"


def groups_of(latent_frames: int) -> list[range]:
    """Return the latent frames of each group.

    A last latent frame alone is no group: all of its frames are those of the group before.
    """
    if latent_frames < GROUP:
        return [range(latent_frames)]
    starts = range(0, latent_frames - 1, STRIDE)
    return [range(start, min(start + GROUP, latent_frames)) for start in starts]


def group_program(latent_frames: int) -> str:
    """Return the program that decodes a group of so many latent frames."""
    return next(name for name, size in GROUP_PROGRAMS.items() if size == latent_frames)


def calls_of(program: str, clips: Sequence[int]) -> float:
    """Return how often a program is called for a clip, on average; 0 if it is not.

    Args:
        program: one of `GROUP_PROGRAMS`.
        clips: latent frames of each.
    """
    sizes = [len(group) for clip in clips for group in groups_of(clip)]
    return sizes.count(GROUP_PROGRAMS[program]) / len(clips)
