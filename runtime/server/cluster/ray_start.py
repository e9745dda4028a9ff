"""Runs `ray start` until the process that started this script ends, even if it is killed.

Run as a script with the arguments of `ray start`. Standard input is a pipe that Tandem holds open. With `--block`, Ray
has the kernel kill its processes as soon as this one ends.
"""

import os
import sys
import threading


def main() -> None:
    """Run Ray in this process."""

    def end_with_tandem() -> None:
        # Unbuffered: a thread blocked in buffered I/O would delay this process's exit.
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os._exit(1)

    threading.Thread(target=end_with_tandem, daemon=True).start()
    from ray.scripts.scripts import main as run_ray

    sys.argv = ["ray", "start", "--block", *sys.argv[1:]]
    run_ray()  # type: ignore[no-untyped-call]  # Ray's command line is not typed


if __name__ == "__main__":
    main()
