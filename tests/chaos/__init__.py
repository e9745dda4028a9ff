"""A run of the whole app under attacks and faults in random order: `python -m tests.chaos`."""
