"""A model from a hub into the weights folder: one file after the other, in a folder beside, offered once it is whole.

`weights/.NAME.partial` holds what is here of a model that is not whole: files that came whole and right under their own
names, the one that is on its way under its hash. It becomes `weights/NAME` at the end. A model that is there already
stays in use meanwhile, and lends the files that are right.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.core.cancel import Cancel
from runtime.core.errors import DownloadError, ModelError, OutputError
from runtime.core.locks import held
from runtime.core.units import byte_size
from runtime.models.catalogue import folders
from runtime.models.hub.http_stream import RevisionError
from runtime.models.hub.listing import Listing, RemoteFile
from runtime.models.hub.manifest import MANIFEST, Manifest, difference, read_manifest
from runtime.models.hub.progress import Said, Tell
from runtime.models.hub.remote import Hub, check_repository
from runtime.models.hub.transfer import fetch
from runtime.models.known import known_as
from runtime.models.spec import ModelSpec
from runtime.models.wan import check_family, read_spec

MAIN = "main"
# Left free on the disk: other programs want some too.
_SPARE_BYTES = 1 << 28
_PARTS = ".coming"


@dataclass(frozen=True)
class Wanted:
    """What is to be fetched.

    Attributes:
        folder: what its folder is called; `names`, in lower case, is what else it may be called.
        license: where it is known before the hub is asked.
        revision: that was asked for, if one was.
    """

    repository: str
    folder: str
    license: str
    revision: str | None
    names: frozenset[str] = frozenset()


def wanted(name: str, revision: str | None) -> Wanted:
    """Return what a name of `models list`, or OWNER/REPOSITORY, stands for.

    Raises:
        InvalidRequestError: for a name that is none.
    """
    known = known_as(name)
    if known is not None:
        return Wanted(known.repository, known.folder, known.license, revision, known.names)
    repository = check_repository(name)
    return Wanted(repository, repository.rpartition("/")[2], "", revision)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a download would do.

    Attributes:
        folder: the model's, once it is whole.
        missing: the files that are to be fetched, the first ones of which may be here in part.
        here_bytes: of the model that are here already.
        free_bytes: on the disk.
    """

    listing: Listing
    folder: Path
    missing: tuple[RemoteFile, ...]
    here_bytes: int
    free_bytes: int

    @property
    def fetched_bytes(self) -> int:
        """What is still to come."""
        return self.listing.total_bytes - self.here_bytes


class Download:
    """One model's download. Enter it, and nobody else fetches the same model; `look`, then `run`.

    Args:
        tell: is given how far it is, a few times a second.
    """

    def __init__(self, what: Wanted, weights_dir: Path, hub: Hub, tell: Tell) -> None:
        self._what = what
        self._hub = hub
        self._folder = weights_dir / what.folder
        self._partial = _partial_of(weights_dir, what.folder)
        self._before = weights_dir / f".{what.folder}.before"
        self._lock = weights_dir / f".{what.folder}.lock"
        self._said = Said(tell)
        self._right: dict[str, Path] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Download":
        """Take the model's lock.

        Raises:
            DownloadError: if somebody else fetches it.
            OutputError: if the folder cannot be written.
        """
        with _writing(self._folder):
            self._lock.parent.mkdir(parents=True, exist_ok=True)
            self._be_alone()
            self._recover()
        return self

    def __exit__(self, *_: object) -> None:
        """Give the lock back."""
        self._stack.close()

    def _be_alone(self) -> None:
        try:
            self._stack.enter_context(held(self._lock, seconds=0))
        except TimeoutError:
            raise DownloadError(
                f"{self._what.folder} is being fetched already, by another Tandem or command.",
                "Wait for it, or cancel it there.",
            ) from None

    def look(self, cancel: Cancel) -> Offer:
        """Find out what is to be fetched: ask the hub, and read what is here through.

        Raises:
            DownloadError: if the hub does not give it, the disk is too small, or the folder is not a download's.
            CancelledError: when asked to cancel.
        """
        self._check_place()
        whole, begun = self._manifest(self._folder), self._begun()
        if whole is None and self._folder.exists():
            raise DownloadError(
                f"{self._folder.name} is here already, and was not put there by `models download`.",
                f"Use it as it is, or move {self._folder} away to fetch it anew.",
            )
        for manifest in filter(None, (whole, begun)):
            if manifest.repository != self._what.repository:
                raise DownloadError(
                    f"{self._folder.name} is here already, from {manifest.repository}.",
                    f"Move {self._folder if manifest is whole else self._partial} away to fetch another of that name.",
                )
        listing = self._listing(begun or whole, cancel)
        self._right = self._whole_files(listing, whole, begun, cancel)
        missing = [file for file in listing.files if file.path not in self._right]
        came = sum(_size(self._part(file)) for file in missing)
        here = sum(file.size for file in listing.files if file.path in self._right) + came
        with _writing(self._folder):
            free = shutil.disk_usage(self._folder.parent).free
        offer = Offer(listing=listing, folder=self._folder, missing=tuple(missing), here_bytes=here, free_bytes=free)
        if offer.fetched_bytes > max(free - _SPARE_BYTES, 0) and missing:
            raise DownloadError(
                f"The disk is too small: {byte_size(offer.fetched_bytes)} are to come, {byte_size(free)} are free in "
                f"{self._folder.parent}.",
                "Free some space, or set TANDEM_CACHE_DIR to a folder on another disk.",
            )
        return offer

    def run(self, offer: Offer, cancel: Cancel) -> ModelSpec:
        """Fetch what is missing, and put the model into its place; return what it is.

        Raises:
            DownloadError: if the hub does not give it or gives it wrong; what came right stays.
            ModelError: if it is no model that Tandem runs.
            OutputError: if the disk is full or cannot be written.
            CancelledError: when asked to cancel; what came stays.
        """
        listing = offer.listing
        missing = {file.path for file in offer.missing}
        whole = sum(file.size for file in listing.files if file.path not in missing)
        self._said.begin(whole, offer.here_bytes, listing.total_bytes)
        with _writing(self._folder):
            if not self._is_whole(listing):
                self._fetch_all(listing, cancel)
                self._finish(listing)
        return read_spec(self._folder, self._folder.name)

    def _check_place(self) -> None:
        """Refuse to fetch what is here under another name, and to exchange a link for a folder."""
        if self._folder.is_symlink():
            raise DownloadError(
                f"{self._folder} is a link.",
                "Remove it, or set TANDEM_CACHE_DIR to a folder on the disk that is meant.",
            )
        others = [folder for name, folder in folders(self._folder.parent).items() if name.lower() in self._what.names]
        if others and self._folder not in others:
            raise DownloadError(
                f"The model is here already, as {others[0].name}, and was not put there by `models download`.",
                f"Use it as it is, or move {others[0]} away to fetch it anew.",
            )

    def _is_whole(self, listing: Listing) -> bool:
        """Whether the folder is the model already, of that commit."""
        manifest = self._manifest(self._folder)
        places = {self._folder / file.path for file in listing.files}
        same = manifest is not None and manifest.commit == listing.commit and len(manifest.files) == len(places)
        return same and set(self._right.values()) == places

    def _fetch_all(self, listing: Listing, cancel: Cancel) -> None:
        parts = self._partial / _PARTS
        for folder in (self._partial, parts):
            _make_real(folder)
        manifest = Manifest.of(listing)
        for number, file in enumerate(listing.files, start=1):
            cancel.check()
            self._said.file(file, number, len(listing.files))
            place = self._partial / file.path
            _make_real(place.parent)
            source = self._right.get(file.path)
            if source is None:
                part = self._part(file)
                fetch(self._hub, listing, file, part, cancel, self._said.held, self._said.note)
                part.replace(place)
                self._said.whole(file)
            elif source != place:
                place.unlink(missing_ok=True)
                _link(source, place)
            manifest = manifest.with_file(file)
            manifest.write(self._partial, lasting=file.is_weights)
            if not file.is_weights and (number == len(listing.files) or listing.files[number].is_weights):
                # All that is small is here: what the rest would be of no use for is found now.
                check_family(self._partial, listing.repository)

    def _finish(self, listing: Listing) -> None:
        """Put the folder into its place, but for what belongs to no model."""
        self._said.note("looking whether the model is whole")
        shutil.rmtree(self._partial / _PARTS, ignore_errors=True)
        ours = {file.path for file in listing.files} | {MANIFEST}
        for path in sorted(self._partial.rglob("*")):
            if path.is_file() and path.relative_to(self._partial).as_posix() not in ours:
                path.unlink()
        try:
            read_spec(self._partial, self._folder.name)
        except ModelError as error:
            raise ModelError(
                f"{listing.repository} came as the hub has it, and cannot be used: {error.what}",
                f"Take another repository. {self._partial} may be deleted.",
            ) from error
        if self._folder.exists():
            self._keep_others(ours)
            self._folder.rename(self._before)
        self._partial.rename(self._folder)
        shutil.rmtree(self._before, ignore_errors=True)

    def _keep_others(self, ours: set[str]) -> None:
        """Keep what somebody put beside the model's files, such as a `tandem.json`."""
        before = self._manifest(self._folder)
        known = ours | set(before.files if before else ())
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if path.is_file() and name not in known:
                place = self._partial / name
                place.parent.mkdir(parents=True, exist_ok=True)
                _link(path, place)

    def _recover(self) -> None:
        """Undo an exchange of folders in the middle of which Tandem was killed."""
        if self._before.exists() and not self._folder.exists():
            self._before.rename(self._folder)
        shutil.rmtree(self._before, ignore_errors=True)

    def _listing(self, here: Manifest | None, cancel: Cancel) -> Listing:
        """Ask for the revision that was asked for; else for the one that is here, so that files go together."""
        self._said.note(f"asking {self._hub.address.partition('://')[2]}")
        asked = self._what.revision or (here.commit if here else MAIN)
        arguments = (self._what.license, cancel, self._said.note)
        try:
            return self._hub.listing(self._what.repository, asked, *arguments)
        except RevisionError:
            if self._what.revision or here is None:
                raise
            # Its history was rewritten: what is still the same is kept by its hash.
            return self._hub.listing(self._what.repository, MAIN, *arguments)

    def _whole_files(
        self, listing: Listing, whole: Manifest | None, begun: Manifest | None, cancel: Cancel
    ) -> dict[str, Path]:
        """Return where the files are that are here and right, by path.

        Those of the folder that was begun were checked when they came; those of a model that is there are read now.
        """
        right: dict[str, Path] = {}
        for file in listing.files:
            came = self._partial / file.path
            if begun is not None and begun.files.get(file.path) == file and _size(came) == file.size:
                right[file.path] = came
            elif whole is not None:
                place = self._folder / file.path
                self._said.note(f"reading {file.path}")
                if not difference(place, file, cancel, lambda _: None):
                    right[file.path] = place
        return right

    def _manifest(self, folder: Path) -> Manifest | None:
        return read_manifest(folder) if folder.is_dir() else None

    def _begun(self) -> Manifest | None:
        """Return what is known of a folder that was begun; where that is damaged its files are fetched anew."""
        try:
            return self._manifest(self._partial)
        except ModelError:
            return None

    def _part(self, file: RemoteFile) -> Path:
        return self._partial / _PARTS / file.digest.partition(":")[2]


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say in two lines what the disk does not do."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{folder.parent} cannot be written: {error.strerror or error}.",
            "Free some space or set TANDEM_CACHE_DIR to another folder, then try again: what came is kept.",
        ) from error


def _make_real(folder: Path) -> None:
    """Make a folder; refuse a link in its place, which would lead what is written elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink():
        raise OutputError(f"{folder} is a link.", "Remove it, and try again.")


def _link(source: Path, place: Path) -> None:
    """Let a file be at a second place: the same one where the disk can, else a copy."""
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def begun_bytes(weights_dir: Path, folder: str) -> int:
    """Return what is here of a model whose download was stopped."""
    partial = _partial_of(weights_dir, folder)
    return sum(path.stat().st_size for path in partial.rglob("*") if path.is_file() and path.name != MANIFEST)


def _partial_of(weights_dir: Path, folder: str) -> Path:
    return weights_dir / f".{folder}.partial"


def fetched(weights_dir: Path) -> list[Path]:
    """Return the folders in which `models download` put models."""
    return [folder for folder in folders(weights_dir).values() if (folder / MANIFEST).is_file()]
