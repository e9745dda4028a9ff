"""What is set before torch is imported; the user's own environment variables take precedence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.core.environment import environment_variables, installer, limit_thread_spinning, program, quoted

ROOT = Path(__file__).parents[2]


def test_the_command_line_limits_spinning_and_collections_before_torch_is_imported() -> None:
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    code = (
        "import gc, sys, os, runtime.cli; sys.argv = ['app.py', '--version']\n"
        "try: runtime.cli.main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and os.environ['GOMP_SPINCOUNT'] == '1000'\n"
        "assert gc.get_threshold()[0] == 50_000\n"
        "runtime.core.environment.collect_garbage_as_usual()\n"
        "assert gc.get_threshold()[0] < 50_000 and gc.get_freeze_count() > 1000"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True)


def test_variables_of_the_user_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_thread_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    limit_thread_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ


def test_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_SET", "before")
    monkeypatch.delenv("TANDEM_TEST_UNSET", raising=False)
    with pytest.raises(RuntimeError), environment_variables({"TANDEM_TEST_SET": "1", "TANDEM_TEST_UNSET": "2"}):
        assert (os.environ["TANDEM_TEST_SET"], os.environ["TANDEM_TEST_UNSET"]) == ("1", "2")
        raise RuntimeError
    assert os.environ["TANDEM_TEST_SET"] == "before"
    assert "TANDEM_TEST_UNSET" not in os.environ


def test_commands_to_paste_are_quoted_for_the_users_shell(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    folder = "C:\\Program Files (x86)\\a&b"
    tables = {
        "linux": {"plain/a.b": "plain/a.b", "a b": "'a b'", "a&b": "'a&b'", "it's": "'it'\"'\"'s'"},
        "win32": {"C:\\a\\b.bat": "C:\\a\\b.bat", folder: f'"{folder}"', "it's": '"it\'s"', "a=b": '"a=b"', "": '""'},
    }
    for system, words in tables.items():
        monkeypatch.setattr(sys, "platform", system)
        for word, expected in words.items():
            with subtests.test(msg=f"{system} {word}"):
                assert quoted(word) == expected
    monkeypatch.setenv("TANDEM_PROGRAM", f"{folder}\\install.bat")  # as install.bat sets it
    assert program() == installer() == f'"{folder}\\install.bat"'
