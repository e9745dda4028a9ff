"""Settings of this process, each in a process of its own."""

import os
import subprocess
import sys

import pytest

_ARENAS = """
import ctypes, sys, threading
from runtime.core.processes import use_few_arenas
if sys.argv[1:]:
    use_few_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
ready = threading.Barrier(12)
def allocate():
    ready.wait()
    libc.malloc(1000)
    ready.wait()
threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
output = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, output)
libc.fflush(output)
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(os, "confstr"), reason="glibc's malloc")
def test_threads_share_heaps() -> None:
    def heaps(*arguments: str) -> int:
        command = [sys.executable, "-c", _ARENAS, *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.count("<heap nr=")

    assert heaps("few") == 2 < heaps()
