"""Variables of other programs: all of the table at once, and what becomes of each."""

import socket
import threading
from pathlib import Path

import pytest

from tests.app_server import ROOT
from tests.cli.refusals import refused
from tests.environment.cases import REFUSED, RUNS, TABLE, broken, command, make_cache, runs_with


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("run", [pytest.param(run, marks=[] if run == "plan" else pytest.mark.slow) for run in RUNS])
def test_variables_of_other_programs_stop_nothing(run: str, cache: Path) -> None:
    if run == "install" and not (ROOT / ".venv" / "tandem-install.json").is_file():
        pytest.skip("needs an installation")
    assert not broken(run, cache, [name for name in TABLE if run in runs_with(name)])


@pytest.mark.slow
def test_nothing_but_the_cache_folder_needs_to_be_set(cache: Path, subtests: pytest.Subtests) -> None:
    for run in ("app", "generate"):
        with subtests.test(msg=run):
            assert RUNS[run](cache, {}) == "works"


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.slow
def test_values_that_are_asked_for_are_refused_by_name(name: str, cache: Path) -> None:
    assert RUNS["generate"](cache, {name: REFUSED[name]}) == "refuses"


@pytest.mark.slow
def test_a_proxy_is_used_for_downloads_which_ask_the_mirror_alone(cache: Path) -> None:
    asked: list[bytes] = []

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                asked.append(connection.recv(1000).partition(b"\r\n")[0])
                connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        proxy = f"http://127.0.0.1:{listener.getsockname()[1]}"
        values = {"HTTPS_PROXY": proxy, "TANDEM_HUB": "https://hub.example", "ALL_PROXY": "socks://h:1"}
        command("models", "download", "a/b", "--yes", cache_dir=cache, values=values | {"HF_HOME": str(cache / "hf")})
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert set(asked) == {b"CONNECT hub.example:443 HTTP/1.1"}


def test_a_download_names_the_proxy_that_it_needs(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "TANDEM_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TANDEM_UNUSABLE_ALL_PROXY", "socks://127.0.0.1:1080")
    found = refused(["models", "download", "a/b"], capsys)
    assert (found.code, found.data) == ("hub.variable_unusable", {"variable": "ALL_PROXY"})
