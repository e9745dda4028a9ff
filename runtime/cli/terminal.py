"""Text for people on standard error: lines, tables, questions and live progress."""

import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runtime.core.errors import InvalidRequestError
from runtime.core.events import Event
from runtime.core.facts import BIDI_CONTROLS
from runtime.core.progress import Progress
from runtime.core.units import duration

# Controls of the terminal, of the direction of text, and bytes of file names that are not UTF-8.
_CONTROLS = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff{BIDI_CONTROLS}]")
_BAR = 24
_PIPE_WIDTH = 160
_REFRESH_SECONDS = 0.2


def console() -> Console:
    """Return a console on the current standard error."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def line(text: str) -> None:
    """Print one line."""
    console().print(Text(visible(text)))


def visible(text: str) -> str:
    """Return text with its control characters, other than line breaks and tabs, as escapes."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def error(what: str, remedy: str) -> None:
    """Print one line with the problem and one with the remedy."""
    console().print(Text("Error: ", style="bold red") + Text(_one_line(what)))
    console().print(Text("To do: ", style="bold") + Text(_one_line(remedy)))


def warning(text: str) -> None:
    """Print a warning."""
    console().print(Text("Note: ", style="yellow") + Text(_one_line(text)))


def ask(question: str, cannot: InvalidRequestError) -> None:
    """Ask a yes-or-no question and return if the answer is yes.

    Args:
        cannot: raised if standard input is not a terminal.

    Raises:
        typer.Abort: for any other answer.
    """
    if not sys.stdin.isatty():
        raise cannot
    line(f"{question} [y/N]")
    try:
        answer = input()
    except EOFError:
        answer = ""
    if answer.strip().lower() not in {"y", "yes"}:
        raise typer.Abort


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    grid = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for number, heading in enumerate(headings):
        # Rich searches a string for emoji codes, and importing their table takes 25 ms.
        grid.add_column(Text(heading), overflow="fold", no_wrap=number == 0)
    for row in rows:
        grid.add_row(*(Text(visible(cell)) for cell in row))
    # A pipe has no width of its own.
    width = None if console().is_terminal else _PIPE_WIDTH
    Console(file=sys.stderr, highlight=False, width=width).print(grid)


def bar(share: float) -> str:
    """Return a progress bar for a fraction from 0 to 1."""
    done = round(share * _BAR)
    return f"{'━' * done}{'╌' * (_BAR - done)}"


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
    if progress.stage == "denoise":
        parts.append(f"step {progress.step}/{progress.steps}")
        if progress.seconds_per_step is not None:
            parts.append(f"{progress.seconds_per_step:.2f} s/step")
    if progress.stage == "decode":
        parts.append(f"{progress.frames}/{progress.frame_count} frames")
    if progress.seconds_left is not None:
        parts.append(f"{duration(progress.seconds_left)} left")
    return " · ".join(parts)


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))
