"""Fixtures of the families' jobs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import run

Command = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def command(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command and returns its exit code and JSON."""

    def made(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = run([*arguments, "--json"])
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return made
