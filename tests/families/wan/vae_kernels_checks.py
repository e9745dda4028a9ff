"""Triton's kernels of the VAE against PyTorch; `test_vae_kernels` runs this in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

from runtime.families.wan import vae, vae_kernels


def lying(*size: int) -> torch.Tensor:
    """Random values, pixel by pixel."""
    return torch.randn(size).contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("channels", "frames", "height", "width"), [(96, 1, 5, 44), (20, 3, 4, 7)])
def test_norm_activate(channels: int, frames: int, height: int, width: int, biased: bool, padding: int) -> None:
    torch.manual_seed(1)
    x, before = lying(1, channels, frames, height, width), lying(1, channels, 2, height, width)
    x[:, :, 0, 1, 2] = 0  # a pixel of no length
    gamma, bias = torch.randn(channels, 1, 1, 1), torch.randn(channels) if biased else None
    got = vae_kernels.norm_activate(x, bias, gamma, before, padding)
    wanted = vae.norm_activate(x, bias, gamma, before, padding)
    assert got.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("channels", [96, 20])
def test_add_residual(channels: int) -> None:
    torch.manual_seed(2)
    x, shortcut, bias = lying(1, channels, 2, 9, 7), lying(1, channels, 2, 9, 7), torch.randn(channels)
    got = vae_kernels.add_residual(x, bias, shortcut)
    assert got.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(got, vae.add_residual(x, bias, shortcut))


@pytest.mark.parametrize("channels", [192, 20])
def test_upsample(channels: int) -> None:
    torch.manual_seed(3)
    frames = torch.randn(3, channels, 5, 13).contiguous(memory_format=torch.channels_last)
    got = vae_kernels.upsample(frames)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(got, vae.upsample(frames))


@pytest.mark.parametrize("size", [(96, 3, 2, 13, 17), (24, 3, 1, 5, 7), (8, 1, 2, 5, 7)])
def test_convolve(size: tuple[int, int, int, int, int]) -> None:
    torch.manual_seed(4)
    channels, deep, frames, height, width = size
    x, weight = torch.randn(1, channels, frames + deep - 1, height, width), torch.randn(96, channels, deep, 3, 3)
    padded = F.pad(x, (1, 1, 1, 1)).contiguous(memory_format=torch.channels_last_3d)
    got = vae_kernels.convolve(padded, weight)
    assert got.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(got, F.conv3d(x, weight, padding=(0, 1, 1)), rtol=1e-4, atol=1e-3)
