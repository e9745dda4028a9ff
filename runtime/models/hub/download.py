"""Download a model from a hub into the weights folder, file by file; it is listed once it is complete.

`weights/.NAME.partial` holds an incomplete model: complete, verified files under their own names, and the file in
transit under its hash. It becomes `weights/NAME` at the end. An earlier version of the model stays
usable meanwhile, and its unchanged files are reused.
"""

import contextlib
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

from runtime.core.cancel import Cancel
from runtime.core.digests import store_digests
from runtime.core.errors import DownloadError, InvalidRequestError, ModelError, OutputError
from runtime.core.facts import Fact, render
from runtime.core.locks import held
from runtime.core.units import byte_size, duration
from runtime.models.catalogue import KnownVariant, folders, known_as, known_variant, read_model
from runtime.models.enhancers import ENHANCERS, check_download, part_of, published_enhancer
from runtime.models.hub.client import Hub, RevisionError, check_repository
from runtime.models.hub.files import (
    MANIFEST,
    Listing,
    Manifest,
    RemoteFile,
    combined,
    difference,
    joined,
    read_manifest,
)
from runtime.models.preprocessors import (
    PREPROCESSORS,
    PUBLISHED,
    check_preprocessor,
    folder_of_preprocessor,
    published_preprocessor,
)
from runtime.models.registry import Part, check_companions, check_folder
from runtime.models.spec import ModelSpec, is_transformer
from runtime.models.variants import DESCRIPTION

MAIN = "main"
# Left free on the disk for other programs.
_RESERVED_BYTES = 1 << 28
_IN_TRANSIT = ".coming"
_PARTIAL = ".partial"
_REPORT_SECONDS = 0.2
_RATE_SECONDS = 10.0


@dataclass(frozen=True)
class Source:
    """A request to download a model.

    Attributes:
        folder: name of the model's folder; `names`, in lower case, are its other names.
        license: if it is known before the hub is asked.
        revision: if one was asked for.
        parts, index: as in `KnownModel`.
        without_transformers: whether their weights are left out, for models whose transformers are in single files.
        preprocessor: whether it makes control frames; see `models.preprocessors`.
        enhancer: whether it enhances prompts; see `models.enhancers`.
        variant: the variant of a published model, whose files replace some of the model's weights.
    """

    repository: str
    folder: str
    license: str
    revision: str | None
    names: frozenset[str] = frozenset()
    parts: tuple[Part, ...] = ()
    index: Mapping[str, Any] = field(default_factory=dict)
    without_transformers: bool = False
    preprocessor: bool = False
    enhancer: bool = False
    variant: KnownVariant | None = None

    @property
    def makes_videos(self) -> bool:
        """Whether it is a model of videos."""
        return not (self.preprocessor or self.enhancer)

    def leaves_out(self, path: str) -> bool:
        """Return whether weights of the model's repositories are not needed."""
        if self.variant is not None:
            return path.partition("/")[0] in self.variant.variant.replaced
        return self.without_transformers and is_transformer(path)

    def place(self, weights_dir: Path) -> Path:
        """Return the folder that its folder is in."""
        return weights_dir / (PREPROCESSORS if self.preprocessor else ENHANCERS if self.enhancer else "")


def source_of(name: str, revision: str | None, *, enhancer: bool = False) -> Source:
    """Return the source for a name of `models list`, that of a variant's folder, or OWNER/REPOSITORY.

    Args:
        enhancer: whether a repository is that of a chat model.

    Raises:
        InvalidRequestError: if the name is invalid, or a revision is given of a model in several repositories.
    """
    variant, model = known_variant(name), known_as(name)
    if variant is not None:
        model = variant.model
    if model is not None:
        if (model.parts or variant is not None) and revision is not None:
            raise InvalidRequestError("revision", "hub.revision_of_parts", model=model.title)
        folder, names = (model.folder, model.names) if variant is None else (variant.folder, {variant.folder})
        return Source(
            model.repository,
            folder,
            model.license,
            revision,
            frozenset(names),
            model.parts,
            model.index,
            variant=variant,
        )
    maker = published_preprocessor(name)
    if maker is not None:
        if revision is not None:
            raise InvalidRequestError("revision", "hub.revision_of_parts", model=maker.title)
        repository = maker.parts[0].repository
        return Source(repository, maker.name, maker.license, None, maker.names, maker.parts, preprocessor=True)
    chat = published_enhancer(name)
    if chat is not None:
        return Source(
            chat.repository, chat.name, chat.license, revision, chat.names, (part_of(chat.repository),), enhancer=True
        )
    repository = check_repository(name)
    parts = (part_of(repository),) if enhancer else ()
    return Source(repository, repository.rpartition("/")[2], "", revision, parts=parts, enhancer=enhancer)


@dataclass(frozen=True, kw_only=True)
class DownloadPlan:
    """The plan of a download.

    Attributes:
        folder: of the model, once it is complete.
        missing: the files to fetch, some of which may be downloaded in part.
        downloaded_bytes: of the model, already on disk.
        free_bytes: on the disk.
    """

    listing: Listing
    folder: Path
    missing: tuple[RemoteFile, ...]
    downloaded_bytes: int
    free_bytes: int

    @property
    def fetched_bytes(self) -> int:
        """Bytes to fetch."""
        return self.listing.total_bytes - self.downloaded_bytes


@dataclass(frozen=True, kw_only=True)
class DownloadProgress:
    """DownloadProgress of a download.

    Attributes:
        file: the current file, the `number`-th of `count`; `file_done` of its `file_size` bytes have arrived.
        done, total: bytes of all files.
        rate: current bytes per second, `seconds_left` at that rate; `None` until both are known.
        note: what happens while no bytes arrive.
    """

    file: str = ""
    number: int = 0
    count: int = 0
    file_done: int = 0
    file_size: int = 0
    done: int = 0
    total: int = 0
    rate: float | None = None
    seconds_left: float | None = None
    note: Fact | None = None

    @property
    def share(self) -> float | None:
        """The share of the model that has arrived, 0 to 1; `None` until the size is known."""
        return self.done / self.total if self.total else None

    @property
    def note_text(self) -> str:
        """The note as a clause, without its full stop."""
        return render(self.note).what.rstrip(".") if self.note else ""

    @property
    def line(self) -> str:
        """Bytes, rate, time left, and the current file or note."""
        parts = [f"{byte_size(self.done)} of {byte_size(self.total)}"] if self.total else []
        if self.rate is not None:
            parts.append(f"{byte_size(int(self.rate))}/s")
        if self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        if self.note:
            parts.append(self.note_text)
        elif self.file:
            parts.append(f"{self.number}/{self.count} {self.file}")
        return " · ".join(parts)


ReportProgress = Callable[[DownloadProgress], None]


def is_disk_short(needed: int, free: int) -> bool:
    """Return whether a disk with `free` bytes is too small to fetch `needed` bytes; some space stays for others."""
    return needed > max(free - _RESERVED_BYTES, 0)


class ProgressReporter:
    """Reports a download's progress, at most a few times a second, with the rate of the last seconds."""

    def __init__(self, report: ReportProgress) -> None:
        self._report = report
        self._progress = DownloadProgress()
        self._complete_bytes = 0
        self._reported = 0.0
        self._marks: deque[tuple[float, int]] = deque()

    def begin(self, complete: int, downloaded: int, total: int) -> None:
        """Start: `complete` bytes of complete files are on disk, `downloaded` bytes with partial files."""
        self._complete_bytes = complete
        self._progress = DownloadProgress(done=downloaded, total=total)
        self._marks.clear()

    def start_file(self, file: RemoteFile, number: int, count: int) -> None:
        """Start the next file."""
        progress = replace(self._progress, file=file.path, number=number, count=count)
        self._update(replace(progress, file_size=file.size, file_done=0))

    def file_size(self, size: int) -> None:
        """Set the bytes of the current file that have arrived."""
        now = time.monotonic()
        if self._reported and now - self._reported < _REPORT_SECONDS and size < self._progress.file_size:
            return
        done = self._complete_bytes + size
        while self._marks and (done < self._marks[-1][1] or now - self._marks[0][0] > _RATE_SECONDS):
            self._marks.popleft()
        self._marks.append((now, done))
        (then, was), rate = self._marks[0], None
        if now - then > _REPORT_SECONDS and done > was:
            rate = (done - was) / (now - then)
        seconds = (self._progress.total - done) / rate if rate else None
        self._update(replace(self._progress, file_done=size, done=done, rate=rate, seconds_left=seconds, note=None))

    def end_file(self, file: RemoteFile) -> None:
        """Count a file as complete."""
        self._complete_bytes += file.size

    def note(self, note: Fact) -> None:
        """Report what happens while no bytes arrive."""
        self._update(replace(self._progress, note=note, rate=None, seconds_left=None))

    def _update(self, progress: DownloadProgress) -> None:
        self._progress, self._reported = progress, time.monotonic()
        self._report(progress)


class Download:
    """One model's download. A context that excludes other downloads of the same model; call `plan`, then `run`.

    Args:
        report: called with the progress, a few times a second.
        cache_dir: stores the digests of weights, so that they need not be read again; see `core.digests`.
    """

    def __init__(
        self, source: Source, weights_dir: Path, hub: Hub, report: ReportProgress, cache_dir: Path | None = None
    ) -> None:
        self._source = source
        self._hub = hub
        self._cache_dir = cache_dir
        weights_dir = source.place(weights_dir)
        self._folder = weights_dir / source.folder
        self._partial = _partial_of(weights_dir, source.folder)
        self._previous = weights_dir / f".{source.folder}.before"
        self._lock = _lock_of(weights_dir, source.folder)
        self._progress = ProgressReporter(report)
        self._complete: dict[str, Path] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Download":
        """Acquire the model's lock.

        Raises:
            DownloadError: if the model is being downloaded already.
            OutputError: if the folder cannot be written.
        """
        with _disk_errors(self._folder):
            self._lock.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._stack.enter_context(held(self._lock, seconds=0))
            except TimeoutError:
                raise DownloadError("hub.download_running", model=self._source.folder) from None
            # Undo an exchange of folders that was interrupted.
            if self._previous.exists() and not self._folder.exists():
                self._previous.rename(self._folder)
            shutil.rmtree(self._previous, ignore_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self._stack.close()

    def plan(self, cancel: Cancel) -> DownloadPlan:
        """Ask the hub for the model's files and verify those on disk.

        Raises:
            DownloadError: if the hub does not have it, the disk is too small, or the folder is not a download's.
            CancelledError: on cancel.
        """
        self._check_place()
        existing, partial = read_manifest(self._folder), self._partial_manifest()
        if existing is None and self._folder.exists():
            raise DownloadError("hub.not_a_download", model=self._folder.name, folder=self._folder)
        for manifest, folder in ((existing, self._folder), (partial, self._partial)):
            if manifest is not None and manifest.repository != self._source.repository:
                raise DownloadError(
                    "hub.other_repository", model=self._folder.name, repository=manifest.repository, folder=folder
                )
        listing = self._listing(partial or existing, cancel)
        self._complete = self._complete_files(listing, existing, partial, cancel)
        missing = [file for file in listing.files if file.path not in self._complete]
        downloaded = sum(file.size for file in listing.files if file.path in self._complete)
        downloaded += sum(_size(self._part(file)) for file in missing)
        with _disk_errors(self._folder):
            free = shutil.disk_usage(self._folder.parent).free
        plan = DownloadPlan(
            listing=listing, folder=self._folder, missing=tuple(missing), downloaded_bytes=downloaded, free_bytes=free
        )
        if missing and is_disk_short(plan.fetched_bytes, free):
            raise DownloadError("hub.disk_full", needed=plan.fetched_bytes, free=free, folder=self._folder.parent)
        return plan

    def run(self, plan: DownloadPlan, cancel: Cancel) -> ModelSpec | None:
        """Fetch missing files, move the model's folder into place and return the model.

        `None` without transformers, and for one that makes no videos.

        Raises:
            DownloadError: if the hub fails or sends other content; complete files are kept.
            ModelError: if Tandem cannot run the model.
            OutputError: if the disk is full or cannot be written.
            CancelledError: on cancel; received data is kept.
        """
        listing = plan.listing
        missing = {file.path for file in plan.missing}
        complete = sum(file.size for file in listing.files if file.path not in missing)
        self._progress.begin(complete, plan.downloaded_bytes, listing.total_bytes)
        with _disk_errors(self._folder):
            if not self._is_complete(listing):
                self._fetch_all(listing, cancel)
                self._finish(listing)
            if self._cache_dir is not None:
                weights = [file for file in listing.files if file.is_weights]
                store_digests(
                    {self._folder / file.path: file.sha256 for file in weights if file.sha256}, self._cache_dir
                )
        if self._source.without_transformers or not self._source.makes_videos:
            return None
        return read_model(self._folder, self._folder.name)

    def _check_place(self) -> None:
        """Refuse to download a model that is installed under another name, or to replace a link."""
        if self._folder.is_symlink():
            raise DownloadError("hub.folder_is_link", folder=self._folder)
        copies = [folder for name, folder in folders(self._folder.parent).items() if name.lower() in self._source.names]
        if copies and self._folder not in copies:
            raise DownloadError("hub.not_a_download", model=copies[0].name, folder=copies[0])

    def _is_complete(self, listing: Listing) -> bool:
        """Return whether the folder is the model at that commit already."""
        manifest = read_manifest(self._folder)
        places = {self._folder / file.path for file in listing.files}
        same = manifest is not None and manifest.commit == listing.commit and len(manifest.files) == len(places)
        return same and set(self._complete.values()) == places

    def _fetch_all(self, listing: Listing, cancel: Cancel) -> None:
        for folder in (self._partial, self._partial / _IN_TRANSIT):
            _make_folder(folder)
        manifest = Manifest.of(listing)
        for number, file in enumerate(listing.files, start=1):
            cancel.check()
            self._progress.start_file(file, number, len(listing.files))
            place = self._partial / file.path
            _make_folder(place.parent)
            source = self._complete.get(file.path)
            if source is None:
                part = self._part(file)
                if file.path in listing.generated:
                    part.write_bytes(listing.generated[file.path])
                else:
                    self._hub.fetch(listing, file, part, cancel, self._progress.file_size, self._progress.note)
                part.replace(place)
                self._progress.end_file(file)
            elif source != place:
                place.unlink(missing_ok=True)
                _link(source, place)
            manifest = manifest.with_file(file)
            manifest.write(self._partial, sync=file.is_weights)
            last_small = not file.is_weights and (number == len(listing.files) or listing.files[number].is_weights)
            if last_small and self._source.makes_videos:
                # All small files are complete: refuse an unsupported model before its weights are fetched.
                check_folder(self._partial, listing.repository)

    def _finish(self, listing: Listing) -> None:
        """Put the folder into its place, without files that are not the model's."""
        self._progress.note(Fact("hub.checking_model"))
        shutil.rmtree(self._partial / _IN_TRANSIT, ignore_errors=True)
        paths = {file.path for file in listing.files} | {MANIFEST}
        for path in sorted(self._partial.rglob("*")):
            if path.is_file() and path.relative_to(self._partial).as_posix() not in paths:
                path.unlink()
        try:
            if self._source.preprocessor:
                check_preprocessor(self._partial)
            elif self._source.enhancer:
                check_download(self._partial)
            elif self._source.without_transformers:
                check_companions(self._partial)
                check_folder(self._partial, self._folder.name)
            else:
                read_model(self._partial, self._folder.name)
        except ModelError as error:
            raise ModelError(
                "hub.model_unusable", repository=listing.repository, cause=error.fact, folder=self._partial
            ) from error
        if self._folder.exists():
            self._keep_added_files(paths)
            self._folder.rename(self._previous)
        self._partial.rename(self._folder)
        shutil.rmtree(self._previous, ignore_errors=True)

    def _keep_added_files(self, paths: set[str]) -> None:
        """Keep files that the user added to the model's folder, such as `tandem.json`."""
        previous = read_manifest(self._folder)
        model_paths = paths | set(previous.files if previous else ())
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if path.is_file() and name not in model_paths:
                place = self._partial / name
                place.parent.mkdir(parents=True, exist_ok=True)
                _link(path, place)

    def _listing(self, manifest: Manifest | None, cancel: Cancel) -> Listing:
        """Ask for the requested revision, else for the downloaded one, so that all files are of one commit."""
        listing = self._whole_listing(manifest, cancel)
        files = (file for file in listing.files if not (file.is_weights and self._source.leaves_out(file.path)))
        listing = replace(listing, files=tuple(files))
        if self._source.variant is None:
            return listing
        added = [self._listing_of(part.repository, manifest, cancel, part) for part in _parts(self._source.variant)]
        _check_published(self._source.variant, added)
        description = {DESCRIPTION: self._source.variant.description.content}
        return joined([listing, *added], self._source.license, description)

    def _whole_listing(self, manifest: Manifest | None, cancel: Cancel) -> Listing:
        self._progress.note(Fact("hub.asking", {"host": self._hub.address.partition("://")[2]}))
        if not self._source.parts:
            return self._listing_of(self._source.repository, manifest, cancel)
        listings = [self._listing_of(part.repository, manifest, cancel, part) for part in self._source.parts]
        return combined(listings, self._source.license or listings[0].license, self._source.index)

    def _listing_of(
        self, repository: str, manifest: Manifest | None, cancel: Cancel, part: Part | None = None
    ) -> Listing:
        commit = manifest.commit_of(repository) if manifest else None
        arguments = (self._source.license, cancel, self._progress.note, part)
        try:
            return self._hub.listing(repository, self._source.revision or commit or MAIN, *arguments)
        except RevisionError:
            if self._source.revision or commit is None:
                raise
            # The repository's history was rewritten: unchanged files are recognized by their hash.
            return self._hub.listing(repository, MAIN, *arguments)

    def _complete_files(
        self, listing: Listing, existing: Manifest | None, partial: Manifest | None, cancel: Cancel
    ) -> dict[str, Path]:
        """Return the files that are on disk and verified, by path.

        Files of a partial download were verified when they arrived; files of an existing model, and equal ones of other
        models, are verified now.
        """
        complete: dict[str, Path] = {}
        elsewhere = self._of_other_models()
        for file in listing.files:
            arrived = self._partial / file.path
            if partial is not None and partial.files.get(file.path) == file and _size(arrived) == file.size:
                complete[file.path] = arrived
                continue
            places = [self._folder / file.path] if existing is not None else []
            for place in (*places, *elsewhere.get(file.digest, ())):
                self._progress.note(Fact("hub.verifying", {"file": file.path}))
                if difference(place, file, cancel) is None:
                    complete[file.path] = place
                    break
        return complete

    def _of_other_models(self) -> dict[str, list[Path]]:
        """Return the weights of other downloaded models by digest: models share text encoders and VAEs."""
        places: dict[str, list[Path]] = {}
        for folder in downloaded(self._folder.parent):
            manifest = _manifest_of(folder) if folder != self._folder else None
            for path, file in manifest.files.items() if manifest is not None else ():
                if file.is_weights:
                    places.setdefault(file.digest, []).append(folder / path)
        return places

    def _partial_manifest(self) -> Manifest | None:
        """Return the partial download's manifest; if it is damaged, the files are fetched again."""
        return _manifest_of(self._partial)

    def _part(self, file: RemoteFile) -> Path:
        return self._partial / _IN_TRANSIT / file.digest.partition(":")[2]


def _manifest_of(folder: Path) -> Manifest | None:
    """Return the manifest of a folder; `None` if it has none, or a damaged one."""
    try:
        return read_manifest(folder)
    except ModelError:
        return None


def _parts(known: KnownVariant) -> list[Part]:
    """Return the repositories of a variant's files."""
    by_repository: dict[str, dict[str, str]] = {}
    for place, file in known.variant.files.items():
        by_repository.setdefault(file.repository, {})[place] = file.path
    return [Part(repository=repository, files=files) for repository, files in by_repository.items()]


def _check_published(known: KnownVariant, listings: Sequence[Listing]) -> None:
    """Check that a hub has the files with which a variant was published, as far as their hashes are known.

    Raises:
        DownloadError: if it has another one.
    """
    published = known.variant.files
    for file in (file for listing in listings for file in listing.files):
        expected = published[file.path]
        if expected.sha256 and file.sha256 != expected.sha256:
            raise DownloadError("hub.other_file", file=expected.path, repository=expected.repository)


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError("hub.cannot_write", folder=folder.parent, reason=error.strerror or str(error)) from error


def _make_folder(folder: Path) -> None:
    """Create a folder; refuse a link in its place, which would redirect written files."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink():
        raise OutputError("hub.partial_is_link", folder=folder)


def _link(source: Path, place: Path) -> None:
    """Hard-link a file to a second place, or copy it if the disk has no hard links."""
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def partial_bytes(weights_dir: Path, folder: str) -> int:
    """Return the bytes of an incomplete download."""
    return bytes_in(_partial_of(weights_dir, folder))


def bytes_in(folder: Path) -> int:
    """Return the bytes of a model's files. Files may disappear meanwhile, at the end of a download."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            stat = path.lstat()
            total += stat.st_size if S_ISREG(stat.st_mode) and path.name != MANIFEST else 0
    return total


def _partial_of(weights_dir: Path, folder: str) -> Path:
    return weights_dir / f".{folder}{_PARTIAL}"


def _lock_of(weights_dir: Path, folder: str) -> Path:
    return weights_dir / f".{folder}.lock"


def partial_downloads(weights_dir: Path) -> dict[str, Manifest]:
    """Return the manifests of incomplete downloads by the name of the model's folder; damaged ones are left out."""
    manifests = {}
    for partial in sorted(weights_dir.glob(f".*{_PARTIAL}")):
        manifest = _manifest_of(partial)
        if manifest is not None:
            manifests[partial.name.removesuffix(_PARTIAL)[1:]] = manifest
    return manifests


def delete_model(weights_dir: Path, name: str) -> int:
    """Delete a model's folder; return the freed bytes. Of a link only the link is deleted.

    Raises:
        DownloadError: if the model is being downloaded.
        OutputError: if it cannot be deleted.
    """
    folder = weights_dir / name
    with _exclusive(weights_dir, name):
        if folder.is_symlink():
            folder.unlink()
            return 0
        freed = bytes_in(folder)
        # A model that is deleted only in part would be listed as damaged.
        doomed = weights_dir / f".{name}.deleted"
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)
    return freed


def discard_partial(weights_dir: Path, name: str) -> int:
    """Delete what an incomplete download has received; return the freed bytes. Raises as `delete_model`."""
    with _exclusive(weights_dir, name):
        freed = partial_bytes(weights_dir, name)
        partial = _partial_of(weights_dir, name)
        if partial.is_dir() and not partial.is_symlink():
            shutil.rmtree(partial)
    return freed


@contextlib.contextmanager
def _exclusive(weights_dir: Path, name: str) -> Iterator[None]:
    """Exclude downloads of a model."""
    with _disk_errors(weights_dir / name), contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(_lock_of(weights_dir, name), seconds=0))
        except TimeoutError:
            raise DownloadError("hub.download_running", model=name) from None
        yield


def downloaded(weights_dir: Path) -> list[Path]:
    """Return the folders of downloaded models, then of those that make control frames, then of chat models."""
    helper_folders = [folder_of_preprocessor(model.name, weights_dir) for model in PUBLISHED]
    helper_folders += sorted((weights_dir / ENHANCERS).glob("[!.]*"))
    return [folder for folder in (*folders(weights_dir).values(), *helper_folders) if (folder / MANIFEST).is_file()]
