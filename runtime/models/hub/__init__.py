"""Models from a hub: what a repository holds, downloaded file by file, verified against the hub's hashes."""
