"""Selection of tests: by default, with `--all`, and without a compiler."""

from pathlib import Path

import pytest

from tests.conftest import DESELECTED

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).with_name("conftest.py")
TESTS = """
import pytest

def test_quick(): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.browser
def test_browser(): pass
@pytest.mark.browser
@pytest.mark.slow
def test_slow_browser(): pass
@pytest.mark.gpu
def test_gpu(): pass
@pytest.mark.compiler
def test_compiler(): pass
"""
MARKS = ((), ("slow",), ("browser",), ("browser", "slow"), ("gpu",), ("compiler",))
BY_DEFAULT = sum(not set(marks) & set(DESELECTED) for marks in MARKS)
MARKERS = "[pytest]\npythonpath = {root}\nmarkers =\n    slow:\n    browser:\n    gpu:\n    compiler:\n"


@pytest.fixture
def folder(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini(MARKERS.format(root=CONFTEST.parent.parent))
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.mkdir("inner")
    (pytester.path / "inner" / "test_one.py").write_text(TESTS, encoding="utf-8")
    return pytester


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ([], BY_DEFAULT),
        (["--all"], len(MARKS)),
        (["-m", "slow"], 2),
        (["inner"], BY_DEFAULT),
        (["inner/test_one.py"], len(MARKS)),
        (["-k", "slow"], 0),
    ],
)
def test_slow_tests_run_on_request(
    arguments: list[str], passed: int, folder: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "sh")  # any program: nothing is compiled
    result = folder.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
    result.assert_outcomes(passed=passed, deselected=len(MARKS) - passed)


def test_slow_tests_and_those_on_gpus_are_deselected() -> None:
    assert set(DESELECTED) == {"slow", "gpu"}


def test_only_a_browser_test_that_fails_is_run_again(folder: pytest.Pytester) -> None:
    folder.makepyfile(
        test_two="""
        import pytest
        tried = []
        @pytest.mark.browser
        def test_second(): tried.append(1); assert len(tried) == 2
        @pytest.mark.browser
        def test_never(): assert False
        def test_plain(): tried.append(1); assert len(tried) > 9
        """
    )
    result = folder.runpytest_inprocess("-p", "no:cacheprovider", "--all", "test_two.py")
    assert result.parseoutcomes() == {"passed": 1, "failed": 2, "rerun": 3}


def test_a_test_that_needs_a_compiler_is_skipped_with_the_reason(
    folder: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    result = folder.runpytest_inprocess("-p", "no:cacheprovider", "-rs")
    result.assert_outcomes(passed=BY_DEFAULT - 1, skipped=1, deselected=len(MARKS) - BY_DEFAULT)
    result.stdout.fnmatch_lines(["*needs a C++ compiler*"])
