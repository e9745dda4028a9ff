"""`jobs export` and `jobs join`: finished videos in another format, a part of one, or several in a row."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.cli import terminal
from runtime.cli.conversion import read_path
from runtime.cli.exit_codes import cancel_on_signals
from runtime.cli.jobs import check_stored
from runtime.core import settings
from runtime.core.errors import InvalidRequestError, MachineError
from runtime.core.facts import render
from runtime.core.files import give_usual_permissions
from runtime.core.settings import Settings
from runtime.core.units import byte_size, estimated_size, latency
from runtime.pipeline.files import make_folder
from runtime.queue.store import open_store
from runtime.video.export import (
    MOST_CLIPS,
    ZIP,
    Clip,
    ExportPlan,
    check_export_target,
    default_target,
    export,
)
from runtime.video.export_formats import FORMATS, MP4, find_format

_ID = re.compile(r"[0-9a-f]{1,8}")


def export_clip(
    clip: str,
    out: str | None,
    *,
    kind: str | None,
    start: float | None,
    end: float | None,
    width: int | None,
    lossless_sound: bool,
    only_plan: bool,
) -> dict[str, Any]:
    """Export a video, or a part of it; print the path of the file and return what was done.

    Args:
        clip: the ID of a job or a prefix of it, or a file.
        kind: name of the format; `None` for that of `out`.
        start, end: of the part, in seconds.
        lossless_sound: see `ExportPlan.of`.
        only_plan: whether to print what each format would need instead.

    Raises:
        TandemError: if the video cannot be read, or the file cannot be written.
        CancelledError: on Ctrl-C; nothing is left.
    """
    loaded = settings.load()
    part = Clip.read(_path_of(clip, loaded)).cut(start, end)
    if only_plan:
        return _show_plans([part], kind, width, lossless_sound=lossless_sound)
    return _write([part], out, kind, width, loaded, lossless_sound=lossless_sound)


def join_clips(clips: Sequence[str], out: str | None, *, kind: str | None, lossless_sound: bool) -> dict[str, Any]:
    """Write several videos in a row to one file; see `export_clip`."""
    if len(clips) == 1:
        raise InvalidRequestError("files", "export.too_few")
    if len(clips) > MOST_CLIPS:
        raise InvalidRequestError("files", "export.too_many", count=len(clips), most=MOST_CLIPS)
    loaded = settings.load()
    parts = [Clip.read(_path_of(clip, loaded)) for clip in clips]
    return _write(parts, out, kind, None, loaded, lossless_sound=lossless_sound)


def _path_of(clip: str, loaded: Settings) -> Path:
    """Return the file that an argument names, or the video of the job.

    Raises:
        InvalidRequestError: if it names nothing, or the job has no video.
        StoreError: if there is no such job.
    """
    path = read_path("file", clip, "source.path_unreadable")
    if not _ID.fullmatch(clip) or path.exists():
        return path
    store = open_store(loaded.cache_dir)
    check_stored(store)
    job = store.find(clip)
    if job.state != "done":
        raise InvalidRequestError("file", "export.no_job_video", job=job.id, state=job.state)
    return job.output


def _show_plans(clips: Sequence[Clip], kind: str | None, width: int | None, *, lossless_sound: bool) -> dict[str, Any]:
    """Print and return size and time of each format, or of the chosen one."""
    rows, plans = [], []
    for entry in FORMATS.values() if kind is None else [find_format(kind)]:
        try:
            lossless = lossless_sound and (kind is not None or bool(entry.lossless))
            plan = ExportPlan.of(clips, entry, width, lossless_sound=lossless)
        except MachineError as error:  # this ffmpeg lacks the encoder
            rows.append((entry.name, "", "", "", error.what))
            continue
        notes = " ".join([entry.about, *(render(note).what for note in plan.notes)])
        size = f"{plan.width}×{plan.height}"
        rows.append((entry.name, size, estimated_size(plan.bytes), latency(plan.seconds), notes))
        plans.append(_plan_json(plan))
    terminal.table(("Format", "Frames", "About", "Takes", "For"), rows)
    return {"plans": plans}


def _plan_json(plan: ExportPlan) -> dict[str, Any]:
    return {
        "format": plan.format.name,
        "width": plan.width,
        "height": plan.height,
        "frames": plan.frames,
        "fps": float(plan.rate),
        "sound": bool(plan.sound),
        "estimated_bytes": plan.bytes,
        "estimated_seconds": plan.seconds,
        "notes": [note.model_dump(mode="json") for note in plan.notes],
    }


def _write(
    clips: Sequence[Clip],
    out: str | None,
    kind: str | None,
    width: int | None,
    loaded: Settings,
    *,
    lossless_sound: bool,
) -> dict[str, Any]:
    path = None if out is None else read_path("out", out, "export.out_unreadable")
    chosen = find_format(_format_of(path) if kind is None else kind)
    plan = ExportPlan.of(clips, chosen, width, lossless_sound=lossless_sound)
    if path is None:
        make_folder(loaded.outputs_dir)
        path = default_target(plan, loaded.outputs_dir)
    check_export_target(plan, path)
    terminal.line(
        f"{plan.format.title}: {plan.width}×{plan.height}, {plan.frames} frames at {float(plan.rate):.4g} fps, "
        f"about {estimated_size(plan.bytes)}, {latency(plan.seconds)} (estimates)"
    )
    for note in plan.notes:
        terminal.line(render(note).what)
    line, began = _ExportLine(), time.monotonic()
    with cancel_on_signals() as cancel, line.shown():
        line.print_on_pipe("Exporting")
        damage = export(plan, path, line.report, cancel.check)
    if damage:
        damaged = InvalidRequestError("file", "source.damaged", file=clips[0].info.path.name, line=damage)
        terminal.warning(damaged.what)
    if loaded.outputs_dir not in path.parents:
        for entry in [path, *path.iterdir()] if path.is_dir() else [path]:
            give_usual_permissions(entry)
    size = sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size
    seconds = time.monotonic() - began
    terminal.line(f"Saved. {plan.frames} frames, {byte_size(size)}, {latency(seconds)}")
    terminal.result_path(path)
    return {"file": str(path), "bytes": size, "seconds": seconds, "damage": damage, **_plan_json(plan)}


def _format_of(path: Path | None) -> str:
    """Return the format that the name of a file stands for."""
    if path is None:
        return MP4
    suffix = path.suffix.lower()
    if suffix == ZIP:
        return "png"
    names = [entry.name for entry in FORMATS.values() if suffix and entry.suffix == suffix]
    return names[0] if names else MP4


class _ExportLine(terminal.LiveLine):
    """The progress of an export."""

    def __init__(self) -> None:
        super().__init__()
        self._share = 0.0

    def report(self, share: float) -> None:
        """Take the share that is done."""
        self._share = share

    def text(self) -> str:
        """See `LiveLine`."""
        return f"{terminal.bar(self._share)} Exporting · {self._share:.0%}"
