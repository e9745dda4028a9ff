"""Tests. The environment variables that PyTorch reads at import are set here, before anything imports it."""

import os

from runtime.core.environment import limit_thread_spinning

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several test processes share the cores, and tiny models gain nothing from threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
limit_thread_spinning()
