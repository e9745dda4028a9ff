"""Tests. Like the app itself, waiting threads are told to sleep before anything imports torch."""

from runtime.core.cpu_threads import let_waiting_threads_sleep

let_waiting_threads_sleep()
