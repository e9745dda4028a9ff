"""Environment variables of this process that libraries read, such as the waiting time of OpenMP threads."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Seconds to denoise with the shipped model on 2 idle cores: 3.2 with libgomp's default, 3.5 with this value, 4.1
# without spinning. With a shorter clip while another program is busy: more than 11, 2.0 and 1.5.
_SPINS = "1000"


def limit_thread_spinning() -> None:
    """Make OpenMP threads (libgomp, used by PyTorch on Linux) sleep after a short wait, unless the user set a policy.

    By default they spin for milliseconds. If another program is busy, that takes the cores from the threads that they
    wait for. Call before torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


@contextmanager
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while the body runs, for this process and its children."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
