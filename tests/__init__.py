"""Tests. What must be set before PyTorch is imported is set here."""

import os

from runtime.core.environment import collect_garbage_less_often, limit_thread_spinning

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several test processes share the cores, and tiny models gain nothing from threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
limit_thread_spinning()
collect_garbage_less_often()
