"""`models download` and `models verify`: print text on standard error and return the data for `--json`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.cli import terminal
from runtime.cli.interrupts import cancel_on_signals
from runtime.core import settings
from runtime.core.errors import InvalidRequestError
from runtime.core.facts import Fact, render
from runtime.core.units import byte_size
from runtime.models.catalogue import find
from runtime.models.hub.client import hub_of
from runtime.models.hub.download import Download, DownloadPlan, Progress, downloaded, source_of
from runtime.models.hub.files import Verification
from runtime.models.hub.files import verify as verify_folder


def download(name: str, revision: str | None, mirror: str | None, *, agreed: bool) -> dict[str, Any]:
    """Download a model after showing its license and asking for consent.

    Args:
        agreed: skips the question.

    Raises:
        TandemError: if the model is not available, the disk is too small, or downloads are disabled.
        CancelledError: on Ctrl-C; received data is kept.
    """
    loaded = settings.load()
    hub = hub_of(loaded, mirror)
    if revision is not None and not (revision.strip() and revision.isprintable()):
        raise InvalidRequestError("revision", "cli.revision_unreadable")
    line = _Line()
    with Download(source_of(name, revision), loaded.weights_dir, hub, line.update) as transfer:
        with cancel_on_signals() as cancel, line.shown():
            plan = transfer.plan(cancel)
        terminal.line(_summary(plan))
        if plan.missing:
            terminal.line(_license(plan, hub.address))
            if not agreed:
                _ask(plan)
        with cancel_on_signals() as cancel, line.shown():
            spec = transfer.run(plan, cancel)
    done = f"{plan.folder.name} is downloaded and verified"
    terminal.line(
        f"{done}: {byte_size(plan.fetched_bytes)} downloaded." if plan.missing else f"{done}; nothing was missing."
    )
    listing = plan.listing
    return {
        "name": spec.name,
        "folder": str(plan.folder),
        "repository": listing.repository,
        "revision": listing.commit,
        "license": listing.license,
        "bytes": listing.total_bytes,
        "fetched_bytes": plan.fetched_bytes,
        "files": [file.path for file in listing.files],
    }


def verify(names: Sequence[str]) -> dict[str, Any]:
    """Compare the files of downloaded models, by default all, with the hashes recorded at download.

    Raises:
        ModelError: if a model is not installed, or was not downloaded by Tandem.
        CancelledError: on Ctrl-C.
    """
    weights_dir = settings.load().weights_dir
    chosen = [_folder(name, weights_dir) for name in names] if names else downloaded(weights_dir)
    if not chosen:
        terminal.line("No models are downloaded.")
    rows, line = [], _Line()
    with cancel_on_signals() as cancel:
        for folder in chosen:

            def show_progress(path: str, done: int, total: int, folder: Path = folder) -> None:
                line.update(
                    Progress(note=Fact("hub.verifying", {"file": f"{folder.name}/{path}"}), done=done, total=total)
                )

            with line.shown():
                found = verify_folder(folder, cancel, show_progress)
            _print_verified(found)
            rows.append(_row(found))
    return {"ok": all(not row["wrong"] for row in rows), "models": rows}


def _folder(name: str, weights_dir: Path) -> Path:
    """Return a model's folder by any of its names, also if files are missing."""
    fits = {folder.name.lower(): folder for folder in downloaded(weights_dir)}
    try:
        known = source_of(name, None).folder.lower()
    except InvalidRequestError:
        known = name.lower()
    found = fits.get(known) or fits.get(name.lower())
    if found is not None:
        return found
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser().resolve()
    return find(name, weights_dir).directory


def _print_verified(found: Verification) -> None:
    name, count = found.folder.name, len(found.manifest.files)
    if not found.wrong:
        terminal.line(f"{name}: verified, {count} files, {byte_size(found.total_bytes)}.")
        return
    for difference in found.wrong.values():
        terminal.line(f"{name}: {render(difference).what}")
    again = f"models download {found.manifest.repository}"
    terminal.warning(f"{len(found.wrong)} of {count} files are wrong. Download them again: {again}")


def _row(found: Verification) -> dict[str, Any]:
    return {
        "name": found.folder.name,
        "folder": str(found.folder),
        "repository": found.manifest.repository,
        "revision": found.manifest.commit,
        "files": len(found.manifest.files),
        "bytes": found.total_bytes,
        "wrong": {path: render(difference).what for path, difference in found.wrong.items()},
    }


def _summary(plan: DownloadPlan) -> str:
    listing = plan.listing
    what = (
        f"{listing.repository} at {listing.commit[:12]}: {len(listing.files)} files, {byte_size(listing.total_bytes)}"
    )
    if not plan.missing:
        return f"{what}."
    here = f", {byte_size(plan.here_bytes)} already downloaded" if plan.here_bytes else ""
    return (
        f"{what}{here}; {byte_size(plan.fetched_bytes)} to download, {byte_size(plan.free_bytes)} of disk space free."
    )


def _license(plan: DownloadPlan, address: str) -> str:
    if plan.listing.license:
        return f"License: {plan.listing.license}. Text: {address}/{plan.listing.repository}"
    return f"The repository states no license; see {address}/{plan.listing.repository}"


def _ask(plan: DownloadPlan) -> None:
    cannot = InvalidRequestError("yes", "cli.license_not_confirmed")
    terminal.ask(f"Download {plan.listing.repository}?", cannot)


class _Line(terminal.LiveLine):
    """Progress of a download: a live line on a terminal; on a pipe, one line per file and per wait."""

    def __init__(self) -> None:
        super().__init__()
        self._progress = Progress()
        self._last = ""

    def update(self, progress: Progress) -> None:
        """Show new progress."""
        with self._lock:
            self._progress = progress
            text = progress.note_text or (f"{progress.file}, {byte_size(progress.file_size)}" if progress.file else "")
            new = bool(text) and text != self._last
            self._last = text or self._last
        if new:
            number = f"{progress.number} of {progress.count}: " if progress.file and not progress.note else ""
            self.print_on_pipe(f"{number}{text}")

    def text(self) -> str:
        """See `terminal.LiveLine`."""
        with self._lock:
            progress = self._progress
        return progress_text(progress)


def progress_text(progress: Progress) -> str:
    """Return a download's progress as one line, with a bar if the total size is known."""
    if progress.share is None:
        return progress.line
    return f"{terminal.bar(progress.share)} {progress.line}"
