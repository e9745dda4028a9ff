"""Shorten busy waiting of OpenMP threads. Call before torch is imported."""

import os

# Seconds to denoise with the shipped model on 2 idle cores: 3.2 with libgomp's default, 3.5 with this value, 4.1
# without spinning. With a shorter clip while another program is busy: more than 11, 2.0 and 1.5.
_SPINS = "1000"


def let_waiting_threads_sleep() -> None:
    """Make OpenMP threads (libgomp, used by PyTorch on Linux) sleep after a short wait, unless the user set a policy.

    By default they spin for milliseconds. If another program is busy, that takes the cores from the threads that they
    wait for.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
