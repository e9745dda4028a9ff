"""HunyuanVideo text-to-video, and models of the same architecture."""
