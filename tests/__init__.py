"""Tests. As in the app, waiting OpenMP threads sleep instead of spinning; set before torch is imported."""

from runtime.core.environment import limit_thread_spinning

limit_thread_spinning()
