"""How the numeric libraries' threads wait for each other. Call before torch is imported."""

import os

# Measured on 2 cores, diorama's denoising, seconds: alone 3.2 with libgomp's default, 3.5 with this, 4.1 with no
# spinning at all; while another program is busy more than 11, 2.0 and 1.5 (of a shorter clip).
_SPINS = "1000"


def let_waiting_threads_sleep() -> None:
    """Have OpenMP's threads (libgomp: PyTorch on Linux) sleep after a short wait, unless the user decided otherwise.

    By default they spin for milliseconds, which takes the cores from the thread they wait for once another program
    wants them too.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
