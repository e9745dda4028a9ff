"""A table of what was checked on Windows or under Wine: the case, what was expected and what was found."""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

WINE = sys.platform == "win32" and hasattr(ctypes.windll.ntdll, "wine_get_version")
Check = Callable[[str, object, object], None]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    expected: object
    found: object

    @property
    def passed(self) -> bool:
        return self.expected == self.found


_CASES = pytest.StashKey[list[Case]]()
_WIDTH = 70


def pytest_configure(config: pytest.Config) -> None:
    """Begin with an empty table."""
    config.stash[_CASES] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder on other systems."""
    if sys.platform != "win32":
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason="needs Windows or Wine: tests/windows/run.sh"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table."""
    cases = config.stash[_CASES]
    if cases:
        terminalreporter.section("cases")
        terminalreporter.write_line("| case | expected | found | passed |")
        terminalreporter.write_line("| --- | --- | --- | --- |")
    for case in cases:
        cells = [case.name, _cell(case.expected), _cell(case.found), "yes" if case.passed else "**no**"]
        terminalreporter.write_line("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")


def _cell(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return ascii(text)[1:-1] if len(text) <= _WIDTH else f"{ascii(text)[1 : _WIDTH - 2]}..."


@pytest.fixture
def check(request: pytest.FixtureRequest, subtests: pytest.Subtests) -> Check:
    """Return a function that adds a case to the table: its name, what is expected and what was found.

    A case that differs fails the test, and the next ones are run.
    """

    def record(name: str, expected: object, found: object) -> None:
        request.config.stash[_CASES].append(Case(name, expected, found))
        with subtests.test(msg=name):
            assert found == expected

    return record
