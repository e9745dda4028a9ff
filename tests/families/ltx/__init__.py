"""LTX-Video as a second family: the proof that a family is a folder and an entry in `models.registry.FAMILIES`."""
