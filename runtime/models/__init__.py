"""The catalogue of models: what a model folder holds and what its architecture asks for. No torch but in weights.py."""
