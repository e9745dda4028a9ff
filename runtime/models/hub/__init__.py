"""Models from a hub: listed, downloaded file by file, and verified against the hub's hashes."""
