"""The results of a batch on one picture and one page in the folder for videos. Without torch."""

from collections.abc import Mapping, Sequence
from math import ceil, sqrt
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment

from runtime.core.batches import typed, varied
from runtime.core.errors import OutputError, StoreError
from runtime.core.facts import shortened
from runtime.core.files import replace_file
from runtime.core.images import parse_reference
from runtime.core.request import FIELDS
from runtime.pipeline.files import make_folder
from runtime.queue.records import JobRecord
from runtime.queue.store import JobStore
from runtime.video.contact_sheet import Captioned, draw_sheet

# The videos of a sheet; of a larger batch, the first.
MOST_VIDEOS = 400
_LONGEST = 120
# The most videos of the only row.
_IN_ONE_ROW = 6
_PAGE = Environment(autoescape=True).from_string("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ title }}</title>
<style>
body { font: 15px/1.4 system-ui, sans-serif; margin: 24px; background: #fff; color: #1c1c1c; }
main { display: grid; gap: 16px; grid-template-columns: repeat({{ columns }}, minmax(160px, 1fr)); }
figure { margin: 0; } video { width: 100%; background: #e6e6e6; } figcaption { overflow-wrap: anywhere; }
</style>
<h1>{{ title }}</h1>
<main>
{% for figure in figures -%}
<figure>
{% if figure.video %}<video src="{{ figure.video }}" controls loop muted preload="metadata"></video>
{% else %}<p>{{ figure.state }}</p>
{% endif %}<figcaption>{{ figure.caption }}</figcaption>
</figure>
{% endfor -%}
</main>
""")


class Sheet(NamedTuple):
    """The files of a sheet, and how many of its videos are made."""

    picture: Path
    page: Path
    made: int
    videos: int


def write_sheet(store: JobStore, batch: str, outputs_dir: Path) -> Sheet:
    """Write, or write again, the contact sheet of a batch (PNG) and a page with its videos (HTML).

    Raises:
        StoreError: if there is no such batch.
        OutputError: if the files cannot be written.
        MachineError: if there is no ffmpeg.
    """
    jobs = _jobs(store, batch)
    labels, columns = captions(jobs), columns_of(jobs)
    videos = [_video(job) for job in jobs]
    make_folder(outputs_dir)
    picture, page = (outputs_dir / f"grid-{batch}{suffix}" for suffix in (".png", ".html"))
    png = _drawn(videos, jobs)
    figures = [
        {"video": None if video is None else _address(video, outputs_dir), "caption": label, "state": job.state}
        for job, video, label in zip(jobs, videos, labels, strict=True)
    ]
    html = _PAGE.render(title=shortened(jobs[0].prompt), columns=columns, figures=figures)
    try:
        replace_file(picture, png)
        replace_file(page, html.encode())
    except OSError as error:
        raise OutputError("pipeline.outputs_folder", folder=outputs_dir, reason=error.strerror) from error
    return Sheet(picture, page, sum(video is not None for video in videos), len(videos))


def sheet_png(store: JobStore, batch: str) -> bytes:
    """Return the contact sheet of a batch.

    Raises:
        StoreError: if there is no such batch.
        MachineError: if there is no ffmpeg.
    """
    jobs = _jobs(store, batch)
    return _drawn([_video(job) for job in jobs], jobs)


def captions(jobs: Sequence[JobRecord]) -> list[str]:
    """Return what distinguishes each video of a batch: the values of the fields that vary."""
    fields = list(varied([job.request for job in jobs]))
    return [" · ".join(_caption(name, job.request) for name in fields) or job.prompt[:_LONGEST] for job in jobs]


def columns_of(jobs: Sequence[JobRecord]) -> int:
    """Return how many videos a row has: one for each value of what varies first, or a square's."""
    for name, values in varied([job.request for job in jobs]).items():
        first = [typed(job.request, name) for job in jobs[: len(values)]]
        if first == values and len(values) < len(jobs):
            return len(values)
    return len(jobs) if len(jobs) <= _IN_ONE_ROW else ceil(sqrt(len(jobs)))


def _jobs(store: JobStore, batch: str) -> Sequence[JobRecord]:
    jobs = store.list(batches=[batch], oldest_first=True, limit=MOST_VIDEOS)
    if not jobs:
        raise StoreError("queue.no_batch", batch=batch)
    return jobs


def _drawn(videos: Sequence[Path | None], jobs: Sequence[JobRecord]) -> bytes:
    return draw_sheet(list(map(Captioned, videos, captions(jobs))), columns_of(jobs))


def _video(job: JobRecord) -> Path | None:
    saved = job.saved
    return saved.video if saved is not None and saved.video.is_file() else None


def _address(video: Path, folder: Path) -> str:
    """Return a video's address from a page in a folder."""
    return video.name if video.parent == folder else video.as_uri()


def _caption(name: str, request: Mapping[str, Any]) -> str:
    value = request.get(name)
    if name == "prompt":
        return str(value)[:_LONGEST]
    if isinstance(value, str):
        reference = parse_reference(value)
        value = value if reference is None else reference.name
    return f"{FIELDS[name].label}: {shortened(value) if not isinstance(value, str) else value[:_LONGEST]}"
