"""Runs the tunnel's program and stops it when the app ends, even if the app is killed.

Run as a script with the program's command line as arguments. Standard input is a pipe that the app holds open; its end
means that the app is gone. The tunnel must not outlive the app because another program may get its port.
"""

import contextlib
import os
import subprocess
import sys
import threading


def main() -> int:
    """Run the program and return its exit code."""
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)

    def stop_with_the_app() -> None:
        # Unbuffered: a thread blocked in buffered I/O would delay this process's exit.
        while os.read(sys.stdin.fileno(), 1024):
            pass
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=3)
        process.kill()

    threading.Thread(target=stop_with_the_app, daemon=True).start()
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
