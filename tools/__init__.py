"""Developer tools: installer, generated docs, measurements of forward passes, and the training of the shipped model."""
