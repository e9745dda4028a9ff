"""Freed memory is returned to the system."""

import platform
import subprocess
import sys

import pytest

# Every tenth piece stays, so that glibc cannot shrink its heap by itself.
_SCRIPT = """
import psutil, torch
from runtime.execution.memory import release_cached_memory
pieces = [torch.ones(2**17) for _ in range(400)]
pieces = pieces[::10]
held = psutil.Process().memory_info().rss
release_cached_memory(unreachable=True)
print((held - psutil.Process().memory_info().rss) >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other systems give back by themselves")
def test_freed_memory_is_returned_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    # As it is by then in a process that has allocated larger pieces.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 25))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(1 << 30))
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 100
