"""Frames to MP4, what the MP4 says of itself, and previews. Knows only core."""
