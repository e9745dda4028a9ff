"""Models from a hub: what a repository holds, fetched file by file, checked, and kept under their hashes."""
