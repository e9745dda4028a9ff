"""Engines: components exported, built, verified, stored and run by TensorRT, Inductor or ONNX Runtime."""
