"""Triton's kernels of the VAE against PyTorch."""

from pathlib import Path

from tests.triton_interpreter import run_checks


def test_kernels_equal_pytorch() -> None:
    run_checks(Path(__file__).with_name("vae_kernels_checks.py"))
