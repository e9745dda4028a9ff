"""How the numeric libraries' threads wait for each other. Call before torch is imported."""

import os


def let_waiting_threads_sleep() -> None:
    """Have OpenMP's threads sleep while they wait, unless the user decided otherwise.

    By default they spin. Alone on the machine that makes no difference that could be measured; beside one other busy
    program on two cores it made a clip ten times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
