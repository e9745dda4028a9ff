"""`models download` and `models verify`: for people on standard error, returned for programs."""

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
from runtime.models.hub.download import Download, DownloadPlan, downloaded, source_of
from runtime.models.hub.manifest import Verification
from runtime.models.hub.manifest import verify as verify_folder
from runtime.models.hub.progress import Progress


def download(name: str, revision: str | None, mirror: str | None, *, agreed: bool) -> dict[str, Any]:
    """Fetch a model; name its licence first, and ask unless it is agreed to.

    Raises:
        TandemError: if it is not to be had, the disk is too small, or nothing may be fetched.
        CancelledError: on Ctrl-C; what came stays.
    """
    loaded = settings.load()
    hub = hub_of(loaded, mirror)
    if revision is not None and not (revision.strip() and revision.isprintable()):
        raise InvalidRequestError("revision", "cli.revision_unreadable")
    line = _Line()
    with Download(source_of(name, revision), loaded.weights_dir, hub, line.take) as fetching:
        with cancel_on_signals() as cancel, line.shown():
            plan = fetching.plan(cancel)
        terminal.line(_offered(plan))
        if plan.missing:
            terminal.line(_licensed(plan, hub.address))
            if not agreed:
                _ask(plan)
        with cancel_on_signals() as cancel, line.shown():
            spec = fetching.run(plan, cancel)
    done = f"{plan.folder.name} is downloaded and verified"
    terminal.line(
        f"{done}: {byte_size(plan.fetched_bytes)} fetched." if plan.missing else f"{done}; nothing was fetched."
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
    """Compare models with the hashes that were noted when they were fetched, all of them where none is named.

    Raises:
        ModelError: for one that is not here, or was not fetched.
        CancelledError: on Ctrl-C.
    """
    weights_dir = settings.load().weights_dir
    chosen = [_folder(name, weights_dir) for name in names] if names else downloaded(weights_dir)
    if not chosen:
        terminal.line("No model was downloaded yet.")
    rows, line = [], _Line()
    with cancel_on_signals() as cancel:
        for folder in chosen:

            def tell(path: str, done: int, total: int, folder: Path = folder) -> None:
                line.take(
                    Progress(note=Fact("hub.verifying", {"file": f"{folder.name}/{path}"}), done=done, total=total)
                )

            with line.shown():
                found = verify_folder(folder, cancel, tell)
            _say_verified(found)
            rows.append(_row(found))
    return {"ok": all(not row["wrong"] for row in rows), "models": rows}


def _folder(name: str, weights_dir: Path) -> Path:
    """Return the folder of a model by any of its names, even where a file is missing and it cannot be used."""
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


def _say_verified(found: Verification) -> None:
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


def _offered(plan: DownloadPlan) -> str:
    listing = plan.listing
    what = (
        f"{listing.repository} at {listing.commit[:12]}: {len(listing.files)} files, {byte_size(listing.total_bytes)}"
    )
    if not plan.missing:
        return f"{what}."
    here = f", {byte_size(plan.here_bytes)} of it are here" if plan.here_bytes else ""
    return f"{what}{here}; {byte_size(plan.fetched_bytes)} to fetch, {byte_size(plan.free_bytes)} free."


def _licensed(plan: DownloadPlan, address: str) -> str:
    if plan.listing.license:
        return f"Licence: {plan.listing.license}. Its text: {address}/{plan.listing.repository}"
    return f"The repository names no licence: see {address}/{plan.listing.repository}"


def _ask(plan: DownloadPlan) -> None:
    cannot = InvalidRequestError("yes", "cli.license_not_confirmed")
    terminal.ask(f"Fetch {plan.listing.repository}?", cannot)


class _Line(terminal.LiveLine):
    """The live line of a download; on a pipe, a line for each file and for what is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._progress = Progress()
        self._last = ""

    def take(self, progress: Progress) -> None:
        """Take news in."""
        with self._lock:
            self._progress = progress
            said = progress.note_text or (f"{progress.file}, {byte_size(progress.file_size)}" if progress.file else "")
            new = bool(said) and said != self._last
            self._last = said or self._last
        if new:
            number = f"{progress.number} of {progress.count}: " if progress.file and not progress.note else ""
            self.tell(f"{number}{said}")

    def text(self) -> str:
        """See `show.LiveLine`."""
        with self._lock:
            progress = self._progress
        return progress_text(progress)


def progress_text(progress: Progress) -> str:
    """Return a download's line, after a bar where it is known how much is to come."""
    if progress.share is None:
        return progress.line
    return f"{terminal.bar(progress.share)} {progress.line}"
