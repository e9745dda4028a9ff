"""A run of the whole app under attacks and faults in random order: `python -m tests.chaos`."""

# The environment variable with the file that moves the app's clock.
CLOCK = "TANDEM_CHAOS_CLOCK"
