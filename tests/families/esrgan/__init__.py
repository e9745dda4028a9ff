"""Tests of upscalers."""
