"""The log: rotating, shared by processes, without prompts and paths."""

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.core import log
from runtime.core.events import Cancelled, Event, Failed, FellBack, Planned, StageStarted, StepDone, Warned
from runtime.core.facts import Fact
from tests import full_disk
from tests.queue.samples import sample_plan, sample_result

ROOT = Path(__file__).parents[2]
LINES = 400
WRITER = """
import logging, sys
from pathlib import Path
from runtime.core import log

log._MAX_BYTES, log._BACKUPS = 4000, 40
log.start(Path(sys.argv[1]))
for number in range(int(sys.argv[3])):
    logging.getLogger("runtime.test").info("writer %s line %d", sys.argv[2], number)
"""


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (Planned(plan=sample_plan()), "Planned 192x112 frames=33 steps=4 seed=7"),
        (StageStarted(stage="load", part="vae"), "StageStarted stage=load part=vae"),
        (StageStarted(stage="save"), "StageStarted stage=save"),
        (
            StepDone(step=2, of=4, seconds=0.51234, part="transformer", preview=b"webp"),
            "StepDone step=2 of=4 seconds=0.512 part=transformer",
        ),
        (
            FellBack(
                component="vae", backend="inductor", reason=Fact("checkpoint.not_writable", {"folder": "/home/me"})
            ),
            "FellBack code=checkpoint.not_writable component=vae backend=inductor",
        ),
        (
            Warned(fact=Fact("pipeline.unknown_words", {"words": ["zorp"], "field": "prompt"})),
            "Warned code=pipeline.unknown_words",
        ),
        (
            Failed(fact=Fact("queue.store_locked", {"file": "/home/me/a"}), internal=True),
            "Failed code=queue.store_locked internal=True",
        ),
        (sample_result(), "VideoSaved load_seconds=1.500 peak_memory_bytes=1073741824 passes_left_out=0 sound=False"),
        (Cancelled(), "Cancelled"),
    ],
)
def test_an_event_is_one_line_without_prompt_and_paths(event: Event, line: str) -> None:
    assert log.log_line(event) == line


@pytest.mark.skipif(sys.platform == "win32", reason="Windows renames no file that another process has open")
def test_processes_that_rotate_one_file_lose_no_line(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "tandem.log"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, str(name), str(LINES)], cwd=ROOT, stderr=subprocess.PIPE)
        for name in range(3)
    ]
    for writer in writers:
        assert writer.communicate()[1] == b""
    files = list(path.parent.iterdir())
    assert len(files) > 5 and all(file.name.startswith("tandem.log") for file in files)
    assert not path.with_name("tandem.log.rotating").exists()
    lines = [line.partition("writer ")[2] for file in files for line in file.read_text().splitlines()]
    assert sorted(lines) == sorted(f"{name} line {number}" for name in range(3) for number in range(LINES))


def test_a_full_disk_drops_only_the_line(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = log.SharedRotatingHandler(small_disk / "a.log", maxBytes=1_000_000, backupCount=1)
    filler = full_disk.fill(small_disk)
    handler.handle(logging.LogRecord("a", logging.INFO, "", 0, "lost", None, None))
    filler.unlink()
    handler.handle(logging.LogRecord("a", logging.INFO, "", 0, "kept", None, None))
    handler.close()
    assert "kept" in (small_disk / "a.log").read_text()
    assert capsys.readouterr().err == ""


def test_an_interrupted_rotation_is_repeated(tmp_path: Path) -> None:
    path, mark = tmp_path / "a.log", tmp_path / "a.log.rotating"
    handler = log.SharedRotatingHandler(path, maxBytes=20, backupCount=1)

    def write() -> None:
        handler.handle(logging.LogRecord("a", logging.INFO, "", 0, "a line of words", None, None))

    mark.touch()
    for _ in range(3):
        write()
    assert len(path.read_text().splitlines()) == 3
    os.utime(mark, (0, 0))
    write()  # removes the mark
    write()
    handler.close()
    assert len(path.read_text().splitlines()) == 1
    assert len((tmp_path / "a.log.1").read_text().splitlines()) == 4


def test_without_a_file_nothing_is_printed(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    done = subprocess.run(
        [sys.executable, "-c", WRITER.replace(".info(", ".error("), tmp_path / "logs" / "tandem.log", "a", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


def test_python_warnings_are_only_in_the_log(tmp_path: Path) -> None:
    code = "import sys, warnings; from pathlib import Path; from runtime.core import log;"
    code += "log.start(Path(sys.argv[1])); warnings.warn('Argument aux_data is odd'); print('a video')"
    command = [sys.executable, "-c", code, str(tmp_path / "tandem.log")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("a video\n", "")
    assert "UserWarning: Argument aux_data is odd" in (tmp_path / "tandem.log").read_text()


def _boom(path: str) -> None:
    raise OSError(24, "Too many open files", path)


def test_repeated_errors_are_logged_with_their_number() -> None:
    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    handler.addFilter(log.RepeatFilter())
    loggers = [logging.Logger("one"), logging.Logger("two")]
    for logger in loggers:
        logger.addHandler(handler)
        for number in range(1000):
            try:
                _boom(f"/{number}")
            except OSError:
                logger.exception("A page failed\n%d", number)
    for number in range(3):
        loggers[0].error("job %d failed", number)
        loggers[0].info("StepDone")
    text = printed.getvalue()
    assert text.count("Traceback") == 8 and text.count("(1000 times in ") == 2
    assert [text.count(f"job {number} failed\n") for number in range(3)] == [1, 1, 1]
    assert text.count("StepDone") == 3


def test_errors_are_counted_again_after_a_minute() -> None:
    repeats = log.RepeatFilter()
    passed = []
    for second in (0, 1, 2, 61, 62):
        record = logging.makeLogRecord({"name": "asyncio", "levelno": logging.ERROR, "msg": "full", "created": second})
        passed.append(repeats.filter(record))
    assert passed == [True, False, False, True, False]


def test_a_flood_of_errors_is_neither_logged_nor_printed(tmp_path: Path) -> None:
    code = (
        "import logging, sys; from pathlib import Path; from runtime.core import log; log.start(Path(sys.argv[1]))\n"
        "for _ in range(9):\n"
        "    logging.getLogger('asyncio').error('socket.accept() out of system resource')\n"
        "    logging.getLogger('runtime.test').error('no job')"
    )
    path = tmp_path / "tandem.log"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr.count("out of system resource") == 1
    assert path.read_text(encoding="utf-8").count("no job") == 1
