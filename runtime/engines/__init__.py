"""Engines: components exported, built, proven, kept and run by TensorRT, Inductor or ONNX Runtime."""
