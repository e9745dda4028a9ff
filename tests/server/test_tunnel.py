"""The tunnel behind a share link, with a stand-in for gradio's program: what it needs, how it ends, what goes wrong."""

import inspect
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gradio import networking, tunneling

from runtime.core.errors import MachineError
from runtime.core.facts import Fact, render
from runtime.server import tunnel
from runtime.server.tunnel import open_tunnel
from tests.app_server import make_cache, serving_here
from tests.facts import fact
from tests.fuzz.raw_http import send
from tests.waiting import until

UNREACHABLE = "http://127.0.0.1:9"


def no_link(code: str, **data: str) -> Fact:
    """Return the error for a link that was not opened."""
    return fact("server.no_share_link", cause=fact(code, **data))


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Path:
    """Put a Python program in the place of gradio's."""
    program = folder / "frpc"
    program.write_text(f"#!{sys.executable}\nimport sys, time\n{code}\n")
    program.chmod(0o700)
    monkeypatch.setattr(networking, "GRADIO_SHARE_SERVER_ADDRESS", "127.0.0.1:9")
    monkeypatch.setattr(tunneling, "BINARY_PATH", str(program))
    monkeypatch.setattr(tunneling, "BINARY_FOLDER", folder)
    monkeypatch.setitem(tunneling.CHECKSUMS, tunneling.BINARY_URL, tunnel._digest(program))
    return program


def test_a_link_is_read_and_the_program_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "alive"
    code = (
        "print('start proxy success: https://abc.example.org', flush=True)\n"
        f"while True: open({str(note)!r}, 'w').write(str(time.time())); print('x' * 9000, flush=True); time.sleep(0.01)"
    )
    stand_in(tmp_path, monkeypatch, code)
    opened = open_tunnel(7860, tmp_path)
    assert (opened.url, opened.host) == ("http://abc.example.org", "abc.example.org")
    until(note.exists)
    # It keeps running although it writes more than a pipe holds, 65,536 bytes on Linux.
    for _ in range(10):
        before = note.stat().st_mtime_ns
        until(lambda before=before: note.stat().st_mtime_ns > before)  # type: ignore[misc]
    opened.close()
    after = note.stat().st_mtime_ns
    time.sleep(0.3)
    assert note.stat().st_mtime_ns == after


def test_the_tunnel_program_does_not_outlive_the_app(tmp_path: Path) -> None:
    note = tmp_path / "alive"
    code = f"import time\nwhile True: open({str(note)!r}, 'w').write(str(time.time())); time.sleep(0.01)"
    # An app that is killed says no goodbye; its end of the pipe closes all the same.
    app = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, {str(tunnel._WATCHDOG)!r}, sys.executable, '-c', {code!r}], "
        "stdin=subprocess.PIPE, start_new_session=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", app])
    until(note.exists)
    process.kill()
    process.wait()

    def quiet() -> bool:
        before = note.stat().st_mtime_ns
        time.sleep(0.5)
        return note.stat().st_mtime_ns == before

    until(quiet)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("sys.exit(1)", "no output"),
        ("print('login to server failed: no route to host')", "login to server failed: no route to host"),
    ],
)
def test_a_program_without_a_link_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, output: str
) -> None:
    stand_in(tmp_path, monkeypatch, code)
    with pytest.raises(MachineError) as failed:
        open_tunnel(7860, tmp_path)
    assert failed.value.fact == no_link("server.tunnel_no_link", output=output)


def test_the_tunnel_command_is_gradios() -> None:
    command = inspect.getsource(tunneling.Tunnel._start_tunnel) + inspect.getsource(
        tunneling.Tunnel._read_url_from_tunnel_stream
    )
    for word in ("http", "-n", "-l", "-i", "--uc", "--sd", "random", "--ue", "--server_addr", "--disable_log_color"):
        assert f'"{word}"' in command and f'"{word}"' in inspect.getsource(open_tunnel), word
    for word in ("--tls_enable", "--tls_trusted_ca_file"):
        assert f'"{word}"' in command and f'"{word}"' in inspect.getsource(tunnel._server), word
    assert "start proxy success: " in command
    answer = inspect.getsource(networking.setup_tunnel)
    assert all(f'["{key}"]' in answer for key in ("host", "port", "root_ca"))


def test_without_a_network_the_unreachable_host_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networking, "GRADIO_SHARE_SERVER_ADDRESS", None)
    monkeypatch.setattr(networking, "GRADIO_API_SERVER", f"{UNREACHABLE}/v3/tunnel-request")
    with pytest.raises(MachineError) as failed:
        open_tunnel(7860, tmp_path)
    assert failed.value.fact == no_link("server.tunnel_unreachable", host="127.0.0.1")


def test_a_program_with_another_checksum_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"
    program = stand_in(tmp_path, monkeypatch, f"open({str(ran)!r}, 'w')")
    address = f"{UNREACHABLE}/frpc"
    monkeypatch.setattr(tunneling, "BINARY_URL", address)
    monkeypatch.setitem(tunneling.CHECKSUMS, address, "0" * 64)
    with pytest.raises(MachineError) as failed:
        open_tunnel(7860, tmp_path)
    assert failed.value.fact == no_link("server.tunnel_download", host="127.0.0.1")
    assert not program.exists() and not ran.exists()


@pytest.mark.slow
def test_the_app_runs_without_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networking, "GRADIO_SHARE_SERVER_ADDRESS", None)
    monkeypatch.setattr(networking, "GRADIO_API_SERVER", f"{UNREACHABLE}/v3/tunnel-request")
    lines: list[str] = []
    with serving_here(make_cache(tmp_path), share=True, notify=lines.append) as app:
        until(lambda: len(lines) == 2)
        assert send(app.port, b"GET", b"/config").status == 200
    expected = render(no_link("server.tunnel_unreachable", host="127.0.0.1"))
    assert expected.what in lines[0] and expected.remedy in lines[1]
