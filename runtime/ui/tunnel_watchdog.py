"""Runs the tunnel's program, and ends it when this app is gone, however it went.

Run by its path, with the program's command line behind it. Standard input is a pipe that the app holds open: its end
says that the app is gone, and a tunnel must not outlive it, for another program may get its port.
"""

import contextlib
import os
import subprocess
import sys
import threading


def main() -> int:
    """Run, and return the program's exit code."""
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)

    def end_with_the_app() -> None:
        # Unbuffered: a thread that waits inside a buffer is in the way of this process's own end.
        while os.read(sys.stdin.fileno(), 1024):
            pass
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=3)
        process.kill()

    threading.Thread(target=end_with_the_app, daemon=True).start()
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
