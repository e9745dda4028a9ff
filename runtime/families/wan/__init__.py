"""Wan text-to-video: Wan2.1, Wan2.2-A14B, Wan2.2-TI2V-5B and models of the same architectures."""
