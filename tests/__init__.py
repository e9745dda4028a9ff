"""Tests. As in the app, waiting OpenMP threads sleep instead of spinning; set before torch is imported."""

from runtime.core.cpu_threads import let_waiting_threads_sleep

let_waiting_threads_sleep()
