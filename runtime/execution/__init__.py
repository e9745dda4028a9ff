"""Components of a model: a Protocol for each, and its implementations in PyTorch and on engines."""
