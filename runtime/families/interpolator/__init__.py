"""The network that computes frames between those of a video; its weights ship with Tandem."""
