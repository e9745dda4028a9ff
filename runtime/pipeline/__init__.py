"""Sampling and jobs: noise, denoising, decoding, checkpoints and retries. Independent of the user interfaces."""
