"""Which variables of other programs stay, and which downloads are refused because of one."""

import os
from pathlib import Path

import certifi
import httpx
import httpx2
import pytest

from runtime.core.foreign_variables import prepare, problem_of_downloads, use_no_proxy_for_this_machine

HUB = "https://huggingface.co"


def prepared(**values: str) -> dict[str, str]:
    environ = dict(values)
    prepare(environ)
    return environ


def test_values_that_stop_libraries_are_dropped_and_others_stay(tmp_path: Path, subtests: pytest.Subtests) -> None:
    file = tmp_path / "file"
    file.touch()
    for name, stays, dropped in (
        ("GRADIO_DEBUG", [], ["", "0", "1"]),
        ("GRADIO_TEMP_DIR", [], [str(tmp_path)]),
        ("GRADIO_SHARE_SERVER_ADDRESS", ["example.org:7000"], [""]),
        ("WEB_CONCURRENCY", [], ["4"]),
        ("HF_HUB_DOWNLOAD_TIMEOUT", ["30"], ["", "x", "0", "1.5", "-1"]),
        ("TRANSFORMERS_VERBOSITY", ["INFO"], ["x", ""]),
        ("TORCHINDUCTOR_CACHE_DIR", [str(tmp_path / "new")], ["", str(file), str(file / "none"), "a\0b"]),
        ("TORCHINDUCTOR_COMPILE_THREADS", ["2"], ["x"]),
        ("TORCH_LOGS", [], ["inductor"]),
        ("OMP_NUM_THREADS", ["4", "4,2"], ["x", "0", ""]),
        ("GOMP_CPU_AFFINITY", ["0", "0 3 1-2", "4-15:2,1", ""], ["x", "0-x", "0 x"]),
        ("SSLKEYLOGFILE", [str(file)], [str(tmp_path)]),
        ("COLUMNS", ["80"], ["0", "x"]),
        ("HF_ENDPOINT", ["https://hub.example", "x", ""], ["http://[", "http://[x]", "http://h:x"]),
        ("CUDA_VISIBLE_DEVICES", ["x", "", "0"], []),
        ("TORCH_HOME", ["x"], []),
        ("HF_HOME", ["x"], []),
    ):
        with subtests.test(msg=name):
            assert [value for value in stays + dropped if name in prepared(**{name: value})] == stays


def test_no_proxy_applies_to_this_machine_and_the_user_s_exceptions_stay() -> None:
    environ = prepared(NO_PROXY="[::1], .corp.example,10.0.0.0/8,fe80::/10,host:99999999,http://[x,é,a b,[fd00::5]")
    assert environ["NO_PROXY"] == environ["no_proxy"] == "::1,.corp.example,10.0.0.0/8,fd00::5,localhost,127.0.0.1"
    use_no_proxy_for_this_machine(environ)
    assert environ["NO_PROXY"] == "::1,.corp.example,10.0.0.0/8,fd00::5,localhost,127.0.0.1"
    assert prepared()["NO_PROXY"] == "localhost,127.0.0.1,::1"
    assert prepared(no_proxy="*")["NO_PROXY"].startswith("*,")


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith("SSL_CERT"):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_variables")
def test_httpx_accepts_what_stays(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    proxies = (
        *("http://proxy.example:3128", "proxy:3128", "HTTPS://u:p%40@h", "http://[::1]:3128", "http://u:p@ss@h:3", ""),
        *(
            "socks://h:1",
            "socks5://h:1",
            "socks4://h:1",
            "ftp://h",
            "http://h:port",
            "http://[::1",
            "://",
            "\x01",
            "x y",
        ),
    )
    exceptions = (
        "*",
        "*.x.org",
        ".x.org",
        "h:8080",
        "::1/128",
        "<local>",
        "xn--a",
        "[fe80::1%eth0]",
        "..",
        "1.2.3.4:80",
    )
    for name, value in [("ALL_PROXY", proxy) for proxy in proxies] + [("NO_PROXY", entry) for entry in exceptions]:
        with subtests.test(msg=ascii(value)), monkeypatch.context() as patch:
            for known, text in prepared(**{"HTTPS_PROXY": "http://h:1", name: value}).items():
                patch.setenv(known, text)
            httpx.Client(verify=False).close()
            httpx2.Client(verify=False).close()


def test_only_downloads_that_need_an_unusable_variable_are_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    folder, text = str(tmp_path), tmp_path / "no.pem"
    text.write_text("no certificate")
    socks, proxy = "socks://h:1", "http://h:1"
    for values, address, expected in (
        ({"ALL_PROXY": socks}, HUB, "ALL_PROXY"),
        ({"all_proxy": socks}, "http://mirror.example", "all_proxy"),
        ({"ALL_PROXY": socks}, "http://127.0.0.1:8000", None),
        ({"ALL_PROXY": socks}, "http://[::1]:8000", None),
        ({"ALL_PROXY": socks, "HTTPS_PROXY": proxy}, HUB, None),
        ({"ALL_PROXY": proxy, "HTTPS_PROXY": socks}, HUB, "HTTPS_PROXY"),
        ({"HTTP_PROXY": socks}, HUB, None),
        ({"ALL_PROXY": socks, "NO_PROXY": "huggingface.co"}, HUB, None),
        ({"ALL_PROXY": socks, "NO_PROXY": "example.org"}, HUB, "ALL_PROXY"),
        ({"SSL_CERT_FILE": str(text)}, HUB, "SSL_CERT_FILE"),
        ({"SSL_CERT_FILE": "/nonexistent"}, HUB, "SSL_CERT_FILE"),
        ({"SSL_CERT_FILE": "/nonexistent"}, "http://localhost", None),
        ({"SSL_CERT_FILE": certifi.where(), "SSL_CERT_DIR": folder}, HUB, None),
        ({"SSL_CERT_DIR": str(text)}, HUB, "SSL_CERT_DIR"),
        ({"HF_TOKEN": "hf_é"}, HUB, "HF_TOKEN"),
        ({"HF_TOKEN": "hf_abc\n"}, HUB, None),
        ({}, HUB, None),
    ):
        with subtests.test(msg=f"{values} {address}"):
            environ = prepared(**values)
            assert problem_of_downloads(address, environ, with_token=True) == expected
            assert expected is None or expected not in environ
