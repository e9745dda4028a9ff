"""Random requests against the running app."""
