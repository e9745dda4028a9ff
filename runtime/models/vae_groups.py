"""The groups of latent frames in which HunyuanVideo's VAE decodes a clip. Imports no torch.

A clip of more than four latent frames is decoded in overlapping groups of five, each as if it were the start of a clip.
Source: the defaults of `diffusers.AutoencoderKLHunyuanVideo`, `tile_sample_min_num_frames` and
`tile_sample_stride_num_frames`.
"""

# Latent frames of a group, and from the start of one to the start of the next.
GROUP, STRIDE = 5, 3
# The programs of engines that decode the first groups, and the last one of a clip, which may be shorter.
GROUP_PROGRAM, REST_PROGRAM = "vae_group", "vae_rest"


def groups_of(latent_frames: int) -> list[range]:
    """Return the latent frames of each group.

    A last latent frame alone is no group: all of its frames are those of the group before.
    """
    if latent_frames < GROUP:
        return [range(latent_frames)]
    starts = range(0, latent_frames - 1, STRIDE)
    return [range(start, min(start + GROUP, latent_frames)) for start in starts]


def calls_of(program: str, latent_frames: int) -> tuple[int, int]:
    """Return how often one of the programs is called for a clip, and the latent frames of one call; 0 for none."""
    first, *others = (len(group) for group in groups_of(latent_frames))
    if program == REST_PROGRAM:
        return (1, others[-1]) if others else (0, 0)
    return max(len(others), 1), first
