"""Run `app.py` with a share link on loopback, with a local replacement for gradio's tunnel server and program.

`python -m tests.sharing_app …` equals `python app.py …`, except for the tunnel program, which is this file: a relay
from a port of 127.0.0.1 to the visitors' page, under a host name that browsers resolve to this machine.
"""

import os
import re
import sys
import threading
from pathlib import Path

from tests.waiting import until

HOST = "stranger.localhost"


def relay_to(port: int) -> None:
    """Print the address, as gradio's program does, and relay requests to a port."""
    from tests.browser.relay import Relay

    relay = Relay(port)
    print(f"start proxy success: http://{HOST}:{relay.port}", flush=True)  # noqa: T201 - as gradio's program does
    threading.Event().wait()


def link_of(cache_dir: Path) -> tuple[int, str, str]:
    """Wait until the app has printed its link, and return the port, user and password."""
    found: list[tuple[str, str, str]] = []

    def printed() -> object:
        log = (cache_dir / "server.txt").read_text(encoding="utf-8")
        found[:] = re.findall(rf"Shared at http://{HOST}:(\d+) - user (\S+), password (\S+)", log)
        return found

    until(printed, pause=0.1)
    ((port, user, password),) = found
    return int(port), user, password


def main() -> None:
    """Start the app."""
    from gradio import networking, tunneling

    from runtime.cli import main as run
    from runtime.server import tunnel

    folder = Path(os.environ["TANDEM_CACHE_DIR"])
    program = folder / "frpc"
    root = Path(__file__).parents[1]
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(root)!r})\n"
        "from tests.sharing_app import relay_to\nrelay_to(int(sys.argv[sys.argv.index('-l') + 1]))\n"
    )
    program.chmod(0o700)
    networking.GRADIO_SHARE_SERVER_ADDRESS = "127.0.0.1:9"
    tunneling.BINARY_PATH = str(program)
    tunneling.CHECKSUMS[tunneling.BINARY_URL] = tunnel._digest(program)
    run()


if __name__ == "__main__":
    main()
