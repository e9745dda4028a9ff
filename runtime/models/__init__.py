"""The catalogue of models, their folders and their architectures. Only weights.py imports torch."""
