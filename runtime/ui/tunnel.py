"""The tunnel behind a share link: gradio's program `frpc`, which takes requests from gradio's share server to a port.

The only thing in Tandem that fetches anything from the internet, and only when a link is asked for: the address of a
share server, and `frpc` itself the first time. gradio would serve its page with a script from another host then, run
`frpc` unchecked if it is there already, and leave it running when the app is killed; so the tunnel is made here.
"""

import contextlib
import hashlib
import re
import secrets
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from gradio import networking, tunneling

from runtime.core.errors import MachineError, first_line

_KEEPER = Path(__file__).with_name("tunnel_keeper.py")
_ANSWER_SECONDS = 20
_LINK_SECONDS = 30
_END_SECONDS = 5
_LINES_KEPT = 20
_LINK = re.compile(r"start proxy success: (https?://[A-Za-z0-9.-]+(?::[0-9]+)?)")
_REMEDY = "Check the internet connection and start Tandem again with --share; on this machine it goes on."


class Tunnel:
    """An open tunnel.

    Attributes:
        url: the link.
    """

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self._process = process
        self.url = url

    @property
    def host(self) -> str:
        """The link's host name."""
        return urlsplit(self.url).hostname or ""

    def wait(self) -> None:
        """Wait until the tunnel ends, by itself or because it is closed."""
        self._process.wait()

    def close(self) -> None:
        """End it."""
        _end(self._process)


def open_tunnel(port: int, folder: Path) -> Tunnel:
    """Open a tunnel to a port of 127.0.0.1. Takes seconds, and the first time a download of some megabytes.

    Args:
        folder: for the share server's certificate.

    Raises:
        MachineError: if there is none to be had.
    """
    server, flags = _server(folder)
    command = [
        *(sys.executable, "-I", str(_KEEPER), str(_program())),
        *("http", "-n", secrets.token_urlsafe(32), "-l", str(port), "-i", "127.0.0.1"),
        *("--uc", "--sd", "random", "--ue", "--server_addr", server, "--disable_log_color", *flags),
    ]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise _problem(f"its program does not start: {error.strerror}") from error
    url = _read_link(process)
    # A share server of one's own speaks HTTP, gradio's HTTPS, whatever the program says.
    secure = networking.GRADIO_SHARE_SERVER_ADDRESS is None
    return Tunnel(process, re.sub("^https?", "https" if secure else "http", url))


def _server(folder: Path) -> tuple[str, list[str]]:
    """Return the share server's address, and the flags that go with it."""
    address = networking.GRADIO_SHARE_SERVER_ADDRESS
    if address is not None:
        return address, []
    try:
        answer = httpx.get(networking.GRADIO_API_SERVER, timeout=_ANSWER_SECONDS)
        answer.raise_for_status()
        server = answer.json()[0]
        host, port, certificate = str(server["host"]), int(server["port"]), str(server["root_ca"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _problem(f"gradio's server {urlsplit(networking.GRADIO_API_SERVER).hostname} was not reached") from error
    except (ValueError, LookupError, TypeError) as error:
        raise _problem("gradio's server named no share server") from error
    path = folder / "share-server.pem"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(certificate, encoding="utf-8")
    except OSError as error:
        raise MachineError(
            f"There is no share link: {path} cannot be written: {error.strerror}.",
            "Set TANDEM_CACHE_DIR to a folder that you can write to.",
        ) from error
    return f"{host}:{port}", ["--tls_enable", "--tls_trusted_ca_file", str(path)]


def _program() -> Path:
    """Return the tunnel's program, fetched if it is not here, and checked in any case."""
    path = Path(tunneling.BINARY_PATH)
    expected = tunneling.CHECKSUMS.get(tunneling.BINARY_URL)
    if expected is None:
        raise MachineError(
            f"There is no share link: gradio has no {tunneling.BINARY_REMOTE_NAME} for this machine.",
            "Share from another one; on this machine Tandem goes on.",
        )
    if path.is_file() and _digest(path) == expected:
        return path
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)  # half of one, or not what gradio published
    try:
        tunneling.Tunnel.download_binary()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        host = urlsplit(tunneling.BINARY_URL).hostname
        raise _problem(f"its program frpc could not be fetched from {host}") from error
    except tunneling.ChecksumMismatchError as error:
        path.unlink(missing_ok=True)
        raise _problem("the program that was fetched for it is not the one that gradio published") from error
    except OSError as error:
        raise _problem(f"its program {path} cannot be kept: {first_line(error)}") from error
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _read_link(process: "subprocess.Popen[str]") -> str:
    """Return the link that the program tells, and go on reading what it writes, so that it never has to wait."""
    said: list[str] = []
    link: list[str] = []
    told = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                match = _LINK.search(line)
                if match is not None:
                    link[:] = [match[1]]
                    told.set()
                said[:] = [*said, line.strip()][-_LINES_KEPT:]
                if "login to server failed" in line:
                    break
        told.set()

    threading.Thread(target=read, name="tunnel", daemon=True).start()
    told.wait(_LINK_SECONDS)
    if link:
        return link[0]
    _end(process)
    last = next((line for line in reversed(said) if line), "it said nothing")
    raise _problem(f"the share server gave none ({last[:160].rstrip('.')})")


def _end(process: "subprocess.Popen[str]") -> None:
    """End the program by ending its keeper's input."""
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    try:
        process.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _problem(why: str) -> MachineError:
    return MachineError(f"There is no share link: {why}.", _REMEDY)
