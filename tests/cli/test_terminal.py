"""What goes to standard output and to standard error, tables, wrapped lines, and commands in messages."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.cli import terminal
from runtime.cli.main import run
from runtime.core.environment import program
from runtime.queue.store import open_store
from tests.cli.test_engines import stock
from tests.queue.samples import add_job

ROOT = Path(__file__).parents[2]
WIDE_PROMPT = "a red boat sails left on a calm sea while the sun goes down"
CONTROLS = "\u202egnp.exe\u2066 \u200f \x1b[31m"


@pytest.fixture
def filled(cache_dir: Path) -> str:
    """Add an engine and a job; return the job's id."""
    stock(cache_dir, 1)
    return add_job(open_store(cache_dir), WIDE_PROMPT).id


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes Rich write as to a terminal of some columns."""

    def narrow(columns: int) -> None:
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(columns))

    return narrow


def test_results_are_on_standard_output(
    filled: str, few_models: None, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for arguments, shows in (
        (["plan", "a red boat"], "Peak memory: about"),
        (["models", "list"], "wan2.2-t2v-a14b"),
        (["jobs", "list"], WIDE_PROMPT),
        (["engines", "list"], "Inductor"),
        (["--version"], "."),
    ):
        with subtests.test(msg=" ".join(arguments)):
            assert run(arguments) == 0
            out, err = capsys.readouterr()
            assert shows in out
            assert "\x1b" not in out
            assert shows not in err
    run(["jobs", "list", "--json"])
    json, text = capsys.readouterr()
    assert len(json.splitlines()) == 1
    assert WIDE_PROMPT in text


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["jobs", "list"], ["jobs", "list", "--json"], ["--help"]])
def test_a_closed_pipe_ends_a_command_quietly(arguments: list[str], filled: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "app.py", *arguments], cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 141
    assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr


def test_a_prompt_that_the_encoding_lacks_is_escaped(cache_dir: Path) -> None:
    add_job(open_store(cache_dir), "红船 on the sea")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    arguments = [sys.executable, "app.py", "jobs", "list"]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "\\u7ea2\\u8239 on the sea" in done.stdout


@pytest.mark.slow
def test_no_word_is_broken_on_a_terminal(
    filled: str, few_models: None, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for arguments in (["plan", "a red boat", "--seed", "1"], ["jobs", "list"], ["models", "list"], ["engines", "list"]):
        run(arguments)
        words = set(capsys.readouterr().out.split())
        for columns in (40, 60, 140):
            with subtests.test(msg=f"{arguments[0]} {columns}"), pytest.MonkeyPatch.context() as patch:
                patch.setenv("TTY_COMPATIBLE", "1")
                patch.setenv("TERM", "xterm")
                patch.setenv("COLUMNS", str(columns))
                run(arguments)
                shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
                lines = [line.strip() for line in shown.splitlines()]
                assert not [line for line in lines if len(line) > columns and " " in line and "`" not in line]
                # Narrow terminals show records, whose labels have a colon. Amounts of free memory change.
                shown_words = {word for word in shown.split() if not word.endswith(":") and word.isalpha()}
                assert shown_words <= words


def test_a_row_is_one_line_of_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.table(("Name", "Text"), [("a", "word " * 100), ("红船", "two\nlines")])
    heading, first, second = capsys.readouterr().out.splitlines()
    assert (heading, second) == ("Name  Text", "红船  two lines")
    assert first == f"a     {'word ' * 100}".rstrip()


def test_a_command_in_backticks_stays_in_one_piece(
    on_terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal(30)
    terminal.error("It is not here.", "Run `./install.sh models download wan2.1-t2v-1.3b` to download it.")
    assert "\n`./install.sh models download wan2.1-t2v-1.3b`\n" in capsys.readouterr().err


@pytest.mark.parametrize("terminal_columns", [None, 40, 140])
def test_text_cannot_control_the_terminal_or_its_direction(
    terminal_columns: int | None, on_terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    if terminal_columns is not None:
        on_terminal(terminal_columns)
    terminal.table(("A", "B"), [(CONTROLS, f"a {CONTROLS}")])
    terminal.line(CONTROLS)
    terminal.result(CONTROLS)
    terminal.warning(CONTROLS)
    terminal.error(CONTROLS, CONTROLS)
    out, err = capsys.readouterr()
    assert "\\u202egnp.exe\\u2066" in out and "\\u202egnp.exe\\u2066" in err
    assert not {"\u202e", "\u2066", "\u200f"} & set(out + err)
    assert "\x1b[31m" not in out + err


@pytest.mark.parametrize(
    ("arguments", "says", "to_do"),
    [
        (["generat"], "No such command 'generat'. Did you mean 'generate'?", "`./install.sh --help`"),
        (["jobs"], "Missing command.", "`./install.sh jobs --help`"),
        (["jobs", "list", "--stat", "done"], "--state", "`./install.sh jobs list --help`"),
        (["plan", "a", "red", "boat"], "(red boat)", '`./install.sh plan "a red boat"`'),
        (["bench", "a", "red", "boat"], "(red boat)", '`./install.sh bench "a red boat"`'),
        (["engines", "prune", "--max-size", "20"], "--max-size is '20'", "20GB"),
        (["jobs", "show", "1a2b3c4d"], "no job", "`./install.sh jobs list`"),
    ],
)
def test_remedies_can_be_pasted(
    arguments: list[str], says: str, to_do: str, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    what, remedy = capsys.readouterr().err.splitlines()
    assert says in what
    assert to_do in remedy


def test_messages_and_help_name_the_program_as_it_was_started(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_PROGRAM", "bash install.sh")
    assert run(["jobs", "show", "1a2b3c4d"]) == 2
    assert "`bash install.sh jobs list`" in capsys.readouterr().err
    assert run(["jobs", "list", "--help"]) == 0
    assert capsys.readouterr().out.split("\n")[0].startswith("Usage: bash install.sh jobs list")
    monkeypatch.delenv("TANDEM_PROGRAM")
    monkeypatch.setattr(sys, "orig_argv", ["/a b/python", "-X", "utf8", "app.py", "jobs", "list"])
    monkeypatch.setattr(sys, "argv", ["app.py", "jobs", "list"])
    assert shlex.split(program()) == ["/a b/python", "-X", "utf8", "app.py"]
