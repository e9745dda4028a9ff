"""Text for people: results on standard output; progress, warnings, errors and questions on standard error."""

import io
import os
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runtime.core.errors import InvalidRequestError, TandemError
from runtime.core.events import Event
from runtime.core.facts import BIDI_CONTROLS
from runtime.core.progress import OF_FRAMES, Progress
from runtime.core.units import duration

# Controls of the terminal, of the direction of text, and bytes of file names that are not UTF-8.
_CONTROLS = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff{BIDI_CONTROLS}]")
# What stays in one piece when lines are wrapped: commands in backticks, which can be copied then, and quantities.
_WORDS = re.compile(r"`[^`]*`\S*|[\d.,]+ (?:m?s|min|h|[KMGT]i?B)\b\S*|\S+")
_GAP = 2
_BAR = 24
_REFRESH_SECONDS = 0.2
# Whether results go to standard error because standard output is for JSON.
_json_only = False


class OutputClosedError(Exception):
    """The program that reads standard output has ended."""


class OutputUnwritableError(TandemError):
    """Standard output cannot be written, for example because its disk is full."""


class _RawOutput(io.FileIO):
    """Standard output, whose errors are named, or standard error, whose errors cannot be shown anywhere."""

    def write(self, data: Any, /) -> int:
        """Write bytes.

        Raises:
            BrokenPipeError, OutputUnwritableError: of standard output only.
        """
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            if self.fileno() == sys.__stdout__.fileno():  # type: ignore[union-attr]  # closed streams were opened
                raise OutputUnwritableError("cli.output_unwritable", error=error.strerror or str(error)) from error
        return len(data)


def name_output_errors() -> None:
    """Have prompts that do not fit the terminal's encoding escaped, and errors of writing to it named."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.reconfigure(errors="backslashreplace")
        if sys.platform == "win32":  # consoles have streams of their own
            continue
        stream.flush()
        raw = _RawOutput(stream.fileno(), "wb", closefd=False)
        options = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        buffered = io.BufferedWriter(raw)
        setattr(sys, name, io.TextIOWrapper(buffered, stream.encoding, "backslashreplace", "\n", **options))


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """See `Console`, which would exit with code 1."""
        self.quiet = True
        if not self.stderr:
            raise OutputClosedError
        # Work continues without a reader of its progress.


def console() -> Console:
    """Return a console on the current standard error."""
    return _Output(stderr=True, highlight=False, soft_wrap=True)


def _results() -> Console:
    return _Output(stderr=_json_only, highlight=False, soft_wrap=True)


@contextmanager
def results_on_standard_error() -> Iterator[None]:
    """Print results on standard error while the body runs, because standard output is for JSON."""
    global _json_only  # noqa: PLW0603 - as standard output, one per process
    before, _json_only = _json_only, True
    try:
        yield
    finally:
        _json_only = before


def line(text: str) -> None:
    """Print one line of progress or advice on standard error."""
    _print(console(), text)


def result(text: str) -> None:
    """Print one line of a command's result on standard output."""
    _print(_results(), text)


def result_path(path: Path) -> None:
    """Print a path alone on one line of standard output; programs receive its exact bytes."""
    if _json_only or sys.stdout.isatty():
        result(str(path))
        return
    write(b"%s\n" % os.fsencode(path))


def write(data: bytes) -> None:
    """Write bytes to standard output.

    Raises:
        OutputClosedError: if nothing reads it any more.
    """
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError as error:
        raise OutputClosedError from error


def _print(on: Console, text: str, label: str = "", style: str = "") -> None:
    """Print text after a label; on a terminal, break it between words."""
    content = Text(_wrapped(on, f"{label}{visible(text)}"))
    content.stylize(style, 0, len(label))
    on.print(content)


def _wrapped(on: Console, text: str) -> str:
    return "\n".join(_wrapped_line(line, on.width) for line in text.split("\n")) if on.is_terminal else text


def _wrapped_line(text: str, width: int) -> str:
    indent = text[: len(text) - len(text.lstrip())]
    if cell_len(text) <= width:
        return text
    lines: list[str] = []
    for word in _WORDS.findall(text):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{indent}{word}")
    return "\n".join(lines)


def visible(text: str) -> str:
    """Return text with its control characters, other than line breaks and tabs, as escapes."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def error(what: str, remedy: str) -> None:
    """Print one line with the problem and one with the remedy."""
    _print(console(), _one_line(what), "Error: ", "bold red")
    _print(console(), _one_line(remedy), "To do: ", "bold")


def warning(text: str) -> None:
    """Print a warning."""
    _print(console(), _one_line(text), "Note: ", "yellow")


def ask(question: str, cannot: InvalidRequestError | None = None) -> None:
    """Ask a yes-or-no question and return if the answer is yes.

    Args:
        cannot: raised if standard input is not a terminal.

    Raises:
        typer.Abort: for any other answer.
    """
    if cannot is not None and not sys.stdin.isatty():
        raise cannot
    line(f"{question} [y/N]")
    try:
        answer = input()
    except EOFError:
        answer = ""
    if answer.strip().lower() not in {"y", "yes"}:
        raise typer.Abort


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on standard output: each row on one line of a pipe, and without broken words on a terminal."""
    on = _results()
    cells = [[_one_line(cell) for cell in row] for row in rows]
    columns = list(zip(headings, *cells, strict=True))
    longest = [max(map(cell_len, column)) for column in columns]
    if not on.is_terminal:
        for row in (headings, *cells):
            spaces = (" " * (width - cell_len(cell) + _GAP) for cell, width in zip(row, longest, strict=True))
            on.print(Text("".join(map("".join, zip(row, spaces, strict=True))).rstrip()))
        return
    words = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    widths = _fitted(longest, words, on.width - _GAP * (len(columns) - 1))
    if widths is None:
        for row in cells:
            for heading, cell in zip(headings, row, strict=True):
                if cell:
                    _print(on, cell, f"{heading}: " if heading else "", "bold")
            on.print()
        return
    grid = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for heading, width in zip(headings, widths, strict=True):
        # Rich searches a string for emoji codes, and importing their table takes 25 ms.
        grid.add_column(Text(heading), width=width)
    for row in cells:
        grid.add_row(*map(Text, row))
    on.print(grid)


def _fitted(longest: Sequence[int], least: Sequence[int], width: int) -> list[int] | None:
    """Return the widths of columns: the longest ones give way, to no less than `least`; `None` if that is too wide."""
    widths = list(longest)
    while sum(widths) > width:
        spare = [column for column, size in enumerate(widths) if size > least[column]]
        if not spare:
            return None
        widths[max(spare, key=widths.__getitem__)] -= 1
    return widths


def bar(share: float) -> str:
    """Return a progress bar for a fraction from 0 to 1."""
    done = round(share * _BAR)
    return f"{'━' * done}{'╌' * (_BAR - done)}"


def end_live() -> None:
    """Show the cursor, which a live line hides, before the process ends at once."""
    on = console()
    if on.is_terminal:
        on.show_cursor()
        on.print()


class LiveLine(ABC):
    """A progress line that is redrawn on a terminal; on a pipe, `print_on_pipe` prints separate lines instead."""

    def __init__(self) -> None:
        self._console = console()
        self._live = self._console.is_terminal
        self._lock = threading.Lock()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the line while the body runs."""
        if not self._live:
            yield
            return
        with Live(
            get_renderable=self._render, console=self._console, refresh_per_second=1 / _REFRESH_SECONDS, transient=True
        ):
            yield

    def print_on_pipe(self, text: str) -> None:
        """Print a line if standard error is not a terminal."""
        if not self._live:
            self._console.print(Text(f"{visible(text)}…"))

    @abstractmethod
    def text(self) -> str:
        """Return the current text of the line."""

    def _render(self) -> Text:
        return Text(visible(self.text()), no_wrap=True, overflow="ellipsis")


class ProgressLine(LiveLine):
    """Progress of one job: a live line on a terminal; on a pipe, one line per stage."""

    def __init__(self) -> None:
        super().__init__()
        self._progress = Progress()
        self._last_title = ""

    def event(self, event: Event) -> None:
        """Update the progress with an event of the job."""
        with self._lock:
            self._progress = self._progress.after(event, time.monotonic())
            title = self._progress.title
        if self._progress.stage and title != self._last_title:
            self._last_title = title
            self.print_on_pipe(title)

    def text(self) -> str:
        """See `LiveLine`."""
        with self._lock:
            progress = self._progress.at(time.monotonic())
        return progress_text(progress)


def progress_text(progress: Progress) -> str:
    """Return the progress line: bar, stage, step, seconds per step, time left."""
    parts = [f"{bar(progress.fraction)} {progress.title}"]
    if progress.building is not None:
        parts.append(str(progress.building.progress))
    if progress.section and progress.plan is not None:
        parts.append(f"section {progress.section}/{progress.plan.sections}")
    if progress.stage == "denoise":
        parts.append(f"step {progress.step}/{progress.steps}")
        if progress.seconds_per_step is not None:
            parts.append(f"{progress.seconds_per_step:.2f} s/step")
    if progress.stage in OF_FRAMES:
        parts.append(f"{progress.frames}/{progress.frame_count or '?'} frames")
    if progress.seconds_left is not None:
        parts.append(f"{duration(progress.seconds_left)} left")
    return " · ".join(parts)


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))
