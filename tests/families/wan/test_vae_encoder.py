"""The faster VAE encoder equals `AutoencoderKLWan.encode`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, patchify

from runtime.core.cancel import never
from runtime.families.wan.vae import TritonVaeOps, VaeOps
from runtime.families.wan.vae_encoder import Clip, EncoderSteps, PyTorchVideoEncoder
from runtime.families.wan.vae_video_encoder import VideoEncoderSteps, calls_of
from runtime.models.catalogue import find
from runtime.models.spec import ModelSpec
from tests.families.wan.test_vae import Kernels
from tests.tiny_models import VAES


@pytest.mark.slow
@pytest.mark.parametrize("architecture", VAES)
@pytest.mark.parametrize("last", [False, True], ids=["image", "two images"])
@torch.inference_mode()
def test_latents_of_an_image_and_gray_frames_equal_autoencoder_encode(
    architecture: str, last: bool, tiny: Callable[[str], ModelSpec]
) -> None:
    vae = AutoencoderKLWan.from_pretrained(tiny(architecture).directory, subfolder="vae").eval()
    steps, patch_size = EncoderSteps(vae.encoder), vae.config.patch_size
    side = 2 * vae.config.scale_factor_spatial
    image, other = torch.rand(2, 1, 3, 1, side, 2 * side, generator=torch.Generator().manual_seed(5)) * 2 - 1
    for frames in (1, 5, 9, 17, 45):
        gray = frames - 1 - last
        if gray < 0:
            continue
        start = torch.cat([image, torch.zeros_like(image)], dim=2) if gray else image
        clip = Clip(start, max(gray - 1, 0), other if last else None)
        assert clip.frames == frames
        wanted = vae.encode(clip.whole()).latent_dist.mode()
        got = vae.quant_conv(steps(clip.each(lambda part: patchify(part, patch_size or 1)))).chunk(2, dim=1)[0]
        assert got.shape == wanted.shape
        assert (got - wanted).abs().max() < 1e-5, frames


@pytest.mark.slow
def test_tiles_are_close_to_whole_frames() -> None:
    spec = find("diorama", Path("none"))  # trained: random weights attend to all pixels alike
    encoder = PyTorchVideoEncoder(AutoencoderKLWan.from_pretrained(spec.directory, subfolder="vae").float())
    scale = spec.vae.scale_factor_spatial
    rows, columns = torch.linspace(-1, 1, 12 * scale), torch.linspace(-1, 1, 20 * scale)
    image = torch.stack([rows[:, None] * columns, rows[:, None].expand(-1, 20 * scale), columns.expand(12 * scale, -1)])
    images = [image, image.flip(1)]
    whole = encoder.latents(images, 5)
    assert torch.equal(encoder.latents(images, 5, 20), whole)
    tiled = encoder.latents(images, 5, 8)
    assert tiled.shape == whole.shape
    assert 0 < (tiled - whole).norm() / whole.norm() < 0.1
    video = torch.stack([image.roll(frame, 1) for frame in range(9)]).add(1).mul(127.5).byte().permute(0, 2, 3, 1)
    every, in_tiles = (encoder.video_latents(video, tile, never) for tile in (None, 8))
    assert every.shape[2] == 3 and in_tiles.shape == every.shape
    assert 0 < (in_tiles - every).norm() / every.norm() < 0.1


@pytest.mark.parametrize("architecture", VAES)
@torch.inference_mode()
def test_latents_of_videos_equal_autoencoder_encode(
    architecture: str, tiny: Callable[[str], ModelSpec], subtests: pytest.Subtests
) -> None:
    vae = AutoencoderKLWan.from_pretrained(tiny(architecture).directory, subfolder="vae").eval()
    encoder, side = PyTorchVideoEncoder(vae), 2 * vae.config.scale_factor_spatial
    random = torch.Generator().manual_seed(7)
    moving = torch.randint(256, (161, side, 2 * side, 3), generator=random, dtype=torch.uint8)
    box = torch.zeros(161, side, 2 * side, dtype=torch.bool)
    box[:, 4 : side // 2, 4:side] = True
    # Gray from a frame on, and again not: in the middle of a latent frame and between two.
    late = box.clone()
    late[14:], late[137:] = False, True
    still = torch.cat([moving[:6], moving[5:6].expand(155, -1, -1, -1)])
    for name, video, shown in (
        ("one frame", moving[:1], None),
        ("moving", moving[:17], None),
        ("a box", moving[:17], box[:17]),
        ("still", still, None),
        ("gray", moving, torch.zeros_like(box)),
        ("gray between", moving, late),
    ):
        with subtests.test(msg=name):
            pixels = video.permute(3, 0, 1, 2)[None].float() / 127.5 - 1
            wanted = vae.encode(pixels if shown is None else pixels * shown).latent_dist.mode()
            wanted = (wanted - encoder._mean) / encoder._std
            assert wanted.std() > 0.01
            for chunk in (1, 2, 4):
                got = encoder.video_latents(video, None, never, shown, chunk)
                assert got.shape == wanted.shape
                assert (got - wanted).abs().max() < 2e-5


@torch.inference_mode()
def test_levels_are_not_computed_while_nothing_changes(tiny: Callable[[str], ModelSpec]) -> None:
    vae: Any = AutoencoderKLWan.from_pretrained(tiny("wan2.1").directory, subfolder="vae").eval()
    blocks = [block for block in vae.encoder.down_blocks if isinstance(block, WanResample)]
    calls = [0] * len(blocks)
    video = torch.zeros(81, 16, 16, 3, dtype=torch.uint8)
    video[:17] = torch.randint(256, (17, 16, 16, 3), dtype=torch.uint8)
    for number, block in enumerate(blocks):

        def count(*_: object, number: int = number) -> None:
            calls[number] += 1

        block.resample[0].register_forward_hook(count)
    PyTorchVideoEncoder(vae).video_latents(video, None, never, None, 4)
    # Of 21 latent frames, three calls compute the first six. The others repeat the last of these, one per call: until a
    # level's convolutions see no others.
    assert calls == [3 + 2, 3 + 3, 3 + 6]


@torch.inference_mode()
def test_kernels_compute_the_convolutions_of_96_channels() -> None:
    torch.manual_seed(0)
    # Of as many in the first block as Wan's.
    vae = AutoencoderKLWan(base_dim=96, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True]).eval().bfloat16()
    frames, kernels = torch.randn(1, 3, 9, 8, 12).bfloat16(), Kernels()

    def encoded(steps: VideoEncoderSteps) -> torch.Tensor:
        return torch.cat([steps(frames[:, :, :1]), steps(frames[:, :, 1:5]), steps(frames[:, :, 5:])], dim=2)

    wanted = encoded(VideoEncoderSteps(vae.encoder, 4, VaeOps()))
    fast = TritonVaeOps(torch.device("cpu"), torch.bfloat16, kernels=kernels)
    layouts = {conv: conv.weight.stride() for conv in vae.encoder.modules() if isinstance(conv, torch.nn.Conv3d)}
    got = encoded(VideoEncoderSteps(vae.encoder, 4, fast, channels_last=True))
    assert kernels.taken == [(96, 96, 3, 3, 3)] * 2 * 3, "one block of two convolutions"
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.02)
    # Images are encoded in PyTorch's own layout.
    assert all(conv.weight.stride() == layout for conv, layout in layouts.items())


def test_calls_of_repeated_latent_frames() -> None:
    yes, no = True, False
    for repeated, most, wanted in (
        ([no], 3, [1]),
        ([no] * 8, 3, [1, 3, 3, 1]),
        ([no] * 3, 1, [1, 1, 1]),
        ([no, no, yes, yes, no, no, yes], 3, [1, 1, 1, 1, 2, 1]),
        ([no, no, no, yes], 3, [1, 2, 1]),
    ):
        calls = list(calls_of(repeated, most))
        assert [len(call) for call in calls] == wanted
        assert [number for call in calls for number in call] == [*range(len(repeated))]
