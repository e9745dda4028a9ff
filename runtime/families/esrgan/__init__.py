"""Upscalers of single frames: the two networks of Real-ESRGAN, compact ones for videos and RRDBNets for photographs."""
