"""The tunnel of a share link: Gradio's program `frpc`, which forwards requests from Gradio's share server to a port.

It needs the internet for the address of a share server and, the first time, to download `frpc`. Gradio's own
`launch(share=True)` adds a script from another host to the page, runs an existing `frpc` unchecked, and leaves it
running when the app is killed; that is why Tandem opens the tunnel itself.
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

from runtime.core.errors import MachineError, first_line
from runtime.core.facts import Fact
from runtime.core.foreign_variables import problem_of_downloads
from runtime.upstream import gradio as private

_WATCHDOG = Path(__file__).with_name("tunnel_watchdog.py")
_ANSWER_SECONDS = 20
_LINK_SECONDS = 30
_END_SECONDS = 5
_LINES_KEPT = 20
_LINK = re.compile(r"start proxy success: (https?://[A-Za-z0-9.-]+(?::[0-9]+)?)")


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
        """Wait until the tunnel ends or is closed."""
        self._process.wait()

    def close(self) -> None:
        """Close the tunnel."""
        _stop(self._process)


def open_tunnel(port: int, folder: Path) -> Tunnel:
    """Open a tunnel to a port of 127.0.0.1. Takes seconds; the first time, some megabytes are downloaded.

    Args:
        folder: where the share server's certificate is stored.

    Raises:
        MachineError: if it cannot be opened.
    """
    server, flags = _server(folder)
    command = [
        *(sys.executable, "-I", str(_WATCHDOG), str(_program())),
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
        raise _failed("server.tunnel_start", error=error.strerror) from error
    url = _read_link(process)
    # A private share server speaks HTTP and Gradio's HTTPS, whatever the program prints.
    secure = private.share_server_address() is None
    return Tunnel(process, re.sub("^https?", "https" if secure else "http", url))


def _server(folder: Path) -> tuple[str, list[str]]:
    """Return the share server's address and its command-line flags."""
    address = private.share_server_address()
    if address is not None:
        return address, []
    api = private.share_api_address()
    _check_variables(api)
    try:
        answer = httpx.get(api, timeout=_ANSWER_SECONDS)
        answer.raise_for_status()
        server = answer.json()[0]
        host, port, certificate = str(server["host"]), int(server["port"]), str(server["root_ca"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _failed("server.tunnel_unreachable", host=urlsplit(api).hostname) from error
    except (ValueError, LookupError, TypeError) as error:
        raise _failed("server.tunnel_no_server") from error
    path = folder / "share-server.pem"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(certificate, encoding="utf-8")
    except OSError as error:
        raise MachineError("server.tunnel_not_writable", path=path, error=error.strerror) from error
    return f"{host}:{port}", ["--tls_enable", "--tls_trusted_ca_file", str(path)]


def _program() -> Path:
    """Return the tunnel's program with the checksum that Gradio publishes, downloaded if needed."""
    program = private.tunnel_program()
    path = program.path
    if program.checksum is None:
        raise MachineError("server.tunnel_unsupported", program=program.name)
    if path.is_file() and _digest(path) == program.checksum:
        return path
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)  # incomplete, or not what Gradio published
    _check_variables(program.address)
    try:
        genuine = private.download_tunnel_program()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _failed("server.tunnel_download", host=urlsplit(program.address).hostname) from error
    except OSError as error:
        raise _failed("server.tunnel_not_kept", path=path, error=first_line(error)) from error
    if not genuine:
        path.unlink(missing_ok=True)
        raise _failed("server.tunnel_checksum")
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _read_link(process: "subprocess.Popen[str]") -> str:
    """Return the link that the program prints; a thread keeps reading its output so that it never blocks."""
    lines: list[str] = []
    link: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                match = _LINK.search(line)
                if match is not None:
                    link[:] = [match[1]]
                    ready.set()
                lines[:] = [*lines, line.strip()][-_LINES_KEPT:]
                if "login to server failed" in line:
                    break
        ready.set()

    threading.Thread(target=read, name="tunnel", daemon=True).start()
    ready.wait(_LINK_SECONDS)
    if link:
        return link[0]
    _stop(process)
    last = next((line for line in reversed(lines) if line), "no output")
    raise _failed("server.tunnel_no_link", output=last[:160].rstrip("."))


def _stop(process: "subprocess.Popen[str]") -> None:
    """Stop the program by closing its watchdog's standard input."""
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    try:
        process.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _check_variables(address: str) -> None:
    variable = problem_of_downloads(address)
    if variable is not None:
        raise _failed("hub.variable_unusable", variable=variable)


def _failed(code: str, **data: object) -> MachineError:
    return MachineError("server.no_share_link", cause=Fact(code, data))
