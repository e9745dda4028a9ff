"""Sampling as verbs: get_noise, denoise, decode. Knows nothing about jobs, files or pages."""
