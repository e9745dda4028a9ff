"""Frames and MP4 files: encoding, metadata, previews, similarity. Imports only `core`."""
