"""Waiting threads sleep, in the app and in these tests, and the user has the last word."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.core.cpu_threads import let_waiting_threads_sleep

ROOT = Path(__file__).parents[2]


def test_it_is_set_before_torch_is_there() -> None:
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    code = (
        "import sys, os, runtime.cli; sys.argv = ['app.py', '--version']\n"
        "try: runtime.cli.main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and os.environ['GOMP_SPINCOUNT'] == '1000'"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, capture_output=True)


def test_the_user_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    let_waiting_threads_sleep()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    let_waiting_threads_sleep()
    assert "GOMP_SPINCOUNT" not in os.environ
