"""FramePack: videos from an image, made in sections by a variant of HunyuanVideo's transformer."""
