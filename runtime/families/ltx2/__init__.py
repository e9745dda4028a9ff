"""LTX-2: videos with sound, from text or from an image."""
