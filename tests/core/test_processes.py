"""Settings of this process, each in a process of its own."""

import os
import re
import subprocess
import sys

import pytest

_HEAPS = """
import ctypes, sys, threading
from runtime.core.processes import return_freed_memory
if sys.argv[1:]:
    return_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
libc.free(ctypes.c_void_p(libc.malloc(1 << 20)))
libc.malloc(1 << 20)
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
def test_threads_share_a_heap_and_large_blocks_are_outside() -> None:
    def found(*arguments: str) -> tuple[int, int]:
        """Return the number of heaps, and of blocks that are mapped by themselves."""
        command = [sys.executable, "-c", _HEAPS, *arguments]
        text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        return text.count("<heap nr="), int(re.findall(r'<total type="mmap" count="(\d+)"', text)[-1])

    (heaps, blocks), (default_heaps, default_blocks) = found("set"), found()
    assert heaps == 1 < default_heaps
    assert blocks > default_blocks


def test_ctrl_c_does_not_reach_a_process_that_leads_its_group(subtests: pytest.Subtests) -> None:
    code = (
        "import os, signal, sys; from runtime.core.processes import lead_own_group\n"
        "if sys.argv[1:]: sys.platform = sys.argv[1]\n"
        "lead_own_group()\n"
        "print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN or os.getpgid(0) == os.getpid())"
    )
    for system in [sys.platform, "win32"]:
        with subtests.test(msg=system):
            command = [sys.executable, "-c", code, system]
            assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == "True\n"
