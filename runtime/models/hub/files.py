"""The files of a model: those of a hub's repository that Tandem loads, the manifest of a downloaded model, and
verification of a folder against it. Nothing is fetched.

Listed are configurations, tokenizers and safetensors of the pipeline's components, under the names that diffusers and
transformers give them. Everything else is skipped, pickled weights included.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from runtime.core.cancel import Cancel
from runtime.core.errors import DownloadError, ModelError
from runtime.core.facts import Fact
from runtime.core.files import replace_file
from runtime.core.untrusted_files import open_file, read_json
from runtime.models.enhancers import CHAT_MODEL
from runtime.models.folder import MAX_SMALL_FILE_BYTES
from runtime.models.preprocessors import CLASSES
from runtime.models.registry import Part

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo
    from huggingface_hub.hf_api import RepoSibling

MANIFEST = "tandem-files.json"
_INDEX = "model_index.json"
_SETTINGS = ("scheduler", "image_processor", "feature_extractor")
_TOKENIZERS = ("tokenizer", "tokenizer_2")
_WITH_WEIGHTS = (
    "text_encoder", "text_encoder_2", "connectors", "image_encoder", "transformer", "transformer_2",
    "latent_upsampler", "vae", "audio_vae", "vocoder", *CLASSES, CHAT_MODEL,
)  # fmt: skip
_OPTIONAL = frozenset({
    "text_encoder_2", "connectors", "image_encoder", "transformer_2", "latent_upsampler", "audio_vae", "vocoder",
    *CLASSES, CHAT_MODEL,
})  # fmt: skip
# A file name that is valid on every system: no path, no device, no hidden file.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_WEIGHTS = re.compile(r"(diffusion_pytorch_model|model)(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_TOKENIZER_SUFFIXES = (".json", ".model", ".txt", ".jinja")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_BYTES = 1 << 50
_MAX_LICENSE_LENGTH = 80
_READ_BYTES = 1 << 20

_COMMIT = r"^[0-9a-f]{40}$"


def _inside(path: str) -> str:
    """Return a path if it stays inside the folder it is joined to, on every system."""
    if path.startswith(("/", "~")) or "\\" in path or ":" in path or not path.isprintable() or ".." in path.split("/"):
        raise ValueError(path)
    return path


class Origin(BaseModel):
    """The repository, commit and path of a file of a model that is published in several repositories."""

    model_config = ConfigDict(frozen=True, strict=True)

    repository: str
    commit: str = Field(pattern=_COMMIT)
    path: str


class RemoteFile(BaseModel):
    """One file of a model.

    Attributes:
        path: relative to the model's folder, with slashes.
        size: in bytes.
        digest: "sha256:" and the content's hash (Git LFS), or "git:" and the SHA-1 of the git object.
        origin: where it comes from, unless that is the listing's repository and the same path.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    path: Annotated[str, Field(min_length=1), AfterValidator(_inside)]
    size: int = Field(ge=0, le=_MAX_BYTES)
    digest: str = Field(pattern=r"^(sha256:[0-9a-f]{64}|git:[0-9a-f]{40})$")
    origin: Origin | None = None

    @property
    def sha256(self) -> str | None:
        """The SHA-256 of its content; `None` if only the hash of its git object is known."""
        kind, _, value = self.digest.partition(":")
        return value if kind == "sha256" else None

    @property
    def is_weights(self) -> bool:
        """Whether the file holds weights."""
        return self.path.endswith((".safetensors", ".gguf"))


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The files of a model in a repository at one commit, in download order: small files first.

    Attributes:
        generated: content of the files that no repository has, by path.
    """

    repository: str
    commit: str
    license: str
    files: tuple[RemoteFile, ...]
    generated: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def repositories(self) -> tuple[str, ...]:
        """The repositories of the files, the listing's own first."""
        origins = (file.origin.repository for file in self.files if file.origin)
        return tuple(dict.fromkeys((self.repository, *origins)))

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def combined(listings: Sequence[Listing], license_name: str, index: Mapping[str, Any]) -> Listing:
    """Return the listing of a model that is published in several repositories, under the first one's name.

    Args:
        index: content of `model_index.json`, which no repository has.
    """
    return joined(listings, license_name, {_INDEX: json.dumps(index, indent=2).encode()})


def joined(listings: Sequence[Listing], license_name: str, generated: Mapping[str, bytes]) -> Listing:
    """Return one listing of the files of several, under the first one's name.

    Args:
        generated: content of the files that no repository has, by path.
    """
    generated = {**generated, **{path: data for listing in listings for path, data in listing.generated.items()}}
    files = [file for listing in listings for file in listing.files if file.path not in generated]
    for path, content in generated.items():
        digest = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        files.append(RemoteFile(path=path, size=len(content), digest=f"git:{digest}"))
    return Listing(
        repository=listings[0].repository,
        commit=listings[0].commit,
        license=license_name,
        files=tuple(sorted(files, key=_order)),
        generated=generated,
    )


def read_listing(repository: str, info: "ModelInfo", license_name: str = "", part: Part | None = None) -> Listing:
    """Return the files to download of a repository.

    Args:
        info: the hub's answer, with files' metadata.
        license_name: if the licence is known already.
        part: what the model has of the repository, if it is published in several.

    Raises:
        DownloadError: if the answer is malformed, a file name leads out of the folder, or it is not a pipeline.
    """
    entries: dict[str, RepoSibling] = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    if not (isinstance(info.sha, str) and re.fullmatch(_COMMIT, info.sha)):
        raise DownloadError("hub.malformed_answer")
    for path in entries:
        try:
            _inside(path)
        except ValueError:  # a repository with such a name is malicious: none of its files is downloaded
            raise DownloadError("hub.path_outside", repository=repository, path=path[:80]) from None
    if part is not None and part.files:
        by_path = {place: _file(_published(repository, path, entries)) for place, path in part.files.items()}
        return Listing(
            repository=repository, commit=info.sha, license=license_name, files=_of_part(by_path, repository, info.sha)
        )
    if part is not None:
        entries = {place: sibling for path, sibling in entries.items() if (place := part.place(path))}
    selected = [path for path in entries if (path == _INDEX and part is None) or _is_loaded(path, entries)]
    _check_complete(repository, selected, entries, part)
    by_path = {path: _file(entries[path]) for path in selected}
    files = list(by_path.values()) if part is None else _of_part(by_path, repository, info.sha)
    files = sorted(files, key=_order)
    for file in files:
        if not file.is_weights and file.size > MAX_SMALL_FILE_BYTES:
            raise DownloadError("hub.file_too_large", file=file.path, size=file.size)
    return Listing(repository=repository, commit=info.sha, license=license_name or _license(info), files=tuple(files))


def _of_part(by_path: Mapping[str, RemoteFile], repository: str, commit: str) -> tuple[RemoteFile, ...]:
    """Return files of a repository with their places in a model's folder."""
    return tuple(
        file.model_copy(update={"path": path, "origin": Origin(repository=repository, commit=commit, path=file.path)})
        for path, file in by_path.items()
    )


def _published(repository: str, path: str, entries: "Mapping[str, RepoSibling]") -> "RepoSibling":
    if path not in entries:
        raise DownloadError("hub.no_file", repository=repository, file=path)
    return entries[path]


def _is_loaded(path: str, paths: Collection[str]) -> bool:
    component, _, name = path.partition("/")
    if not _NAME.fullmatch(name):
        return False
    of_tokenizer = name.endswith(_TOKENIZER_SUFFIXES)
    if component in _TOKENIZERS:
        return of_tokenizer
    # A chat model has its tokenizer in the same folder.
    if component == CHAT_MODEL and of_tokenizer and not name.endswith(".index.json"):
        return True
    if component not in (*_SETTINGS, *_WITH_WEIGHTS):
        return False
    if name.endswith(".json"):
        return not name.endswith(".index.json") or path == _index(component, name.split(".")[0])
    match = _WEIGHTS.fullmatch(name)
    # If an index lists shards, a single file with the same weights is not loaded.
    return component in _WITH_WEIGHTS and match is not None and bool(match[2]) == (_index(component, match[1]) in paths)


def _index(component: str, base: str) -> str:
    return f"{component}/{base}.safetensors.index.json"


def _check_complete(repository: str, selected: list[str], paths: Iterable[str], part: Part | None) -> None:
    if part is None and _INDEX not in selected:
        raise DownloadError("hub.not_a_pipeline", repository=repository, file=_INDEX)
    if len({path.lower() for path in selected}) < len(selected):
        raise DownloadError("hub.names_differ_in_case", repository=repository)
    components = _WITH_WEIGHTS if part is None else {*part.folders, part.at_root}.intersection(_WITH_WEIGHTS)
    for component in sorted(components):
        files = [path for path in selected if path.startswith(f"{component}/")]
        if any(path.endswith(".safetensors") for path in files) or (
            part is None and component in _OPTIONAL and not files
        ):
            continue
        pickled = any(path.startswith(f"{component}/") and path.endswith(_PICKLES) for path in paths)
        code = "hub.only_pickled_weights" if pickled else "hub.no_safetensors"
        raise DownloadError(code, repository=repository, component=component)


def _file(sibling: "RepoSibling") -> RemoteFile:
    try:
        if sibling.lfs is not None:
            return RemoteFile(path=sibling.rfilename, size=sibling.lfs.size, digest=f"sha256:{sibling.lfs.sha256}")
        return RemoteFile.model_validate(
            {"path": sibling.rfilename, "size": sibling.size, "digest": f"git:{sibling.blob_id}"}
        )
    except ValidationError:
        raise DownloadError("hub.no_hash", file=sibling.rfilename) from None


def _order(file: RemoteFile) -> tuple[bool, bool, str]:
    """Sort the index first, then small files: an unusable model is found before gigabytes are fetched."""
    return file.path != _INDEX, file.is_weights, file.path


def _license(info: "ModelInfo") -> str:
    name = getattr(info.card_data, "license", None)
    if not isinstance(name, str):
        tags = [tag for tag in info.tags if isinstance(tag, str)] if isinstance(info.tags, list) else []
        name = next((tag.partition(":")[2] for tag in tags if tag.startswith("license:")), "")
    return name[:_MAX_LICENSE_LENGTH] if name.isprintable() else ""


class Hasher(Protocol):
    """A hashlib object."""

    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class Manifest(BaseModel):
    """A model as it was downloaded: repository, commit, licence, and files by path. Stored in the model's folder."""

    model_config = ConfigDict(frozen=True, strict=True)

    repository: str
    commit: str = Field(pattern=_COMMIT)
    license: str
    files: dict[str, RemoteFile] = Field(default_factory=dict)

    @field_validator("files", mode="before")
    @classmethod
    def _with_paths(cls, files: Any) -> Any:
        """Accept files as they are stored, where the key is the path."""
        return {path: file if isinstance(file, RemoteFile) else {**file, "path": path} for path, file in files.items()}

    @classmethod
    def of(cls, listing: Listing) -> "Manifest":
        """Return the manifest of a model of which no file is complete yet."""
        return cls(repository=listing.repository, commit=listing.commit, license=listing.license)

    def commit_of(self, repository: str) -> str | None:
        """Return the commit of the files of a repository; `None` if none is complete."""
        if repository == self.repository:
            return self.commit
        origins = (file.origin for file in self.files.values() if file.origin)
        return next((origin.commit for origin in origins if origin.repository == repository), None)

    def with_file(self, file: RemoteFile) -> "Manifest":
        """Return the manifest with one more file."""
        return self.model_copy(update={"files": {**self.files, file.path: file}})

    def write(self, folder: Path, *, sync: bool = True) -> None:
        """Write atomically into `folder`; with `sync`, wait until it is on the disk."""
        values = self.model_dump_json(indent=1, exclude={"files": {"__all__": {"path"}}}, exclude_none=True)
        replace_file(folder / MANIFEST, values.encode(), sync=sync)


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder; `None` if it has none.

    Raises:
        ModelError: if it is damaged.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        return Manifest.model_validate(read_json(path))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelError("hub.manifest_damaged", file=f"{folder.name}/{MANIFEST}") from error


def hasher_of(file: RemoteFile) -> Hasher:
    """Return a hasher that hashes a file as its hub does; git prefixes an object with its size."""
    if file.sha256 is None:
        hasher = hashlib.sha1(usedforsecurity=False)
        hasher.update(f"blob {file.size}\0".encode())
        return hasher
    return hashlib.sha256()


def matches(hasher: Hasher, file: RemoteFile) -> bool:
    """Return whether the hashed content is the file's."""
    return hasher.hexdigest() == file.digest.partition(":")[2]


def chunks(path: Path, cancel: Cancel) -> Iterator[bytes]:
    """Yield a file's content, a megabyte at a time.

    Raises:
        CancelledError: on cancel.
    """
    with open_file(path) as stream:
        while chunk := stream.read(_READ_BYTES):
            cancel.check()
            yield chunk


def difference(
    path: Path, file: RemoteFile, cancel: Cancel, on_bytes: Callable[[int], None] = lambda _: None
) -> Fact | None:
    """Read a file and return how it differs from the downloaded one; `None` if it does not.

    Args:
        on_bytes: called with the bytes of each chunk that was read.

    Raises:
        CancelledError: on cancel.
    """
    try:
        if not path.is_file():
            return Fact("hub.file_missing", {"file": file.path})
        if (size := path.stat().st_size) != file.size:
            return Fact("hub.file_size", {"file": file.path, "size": size, "expected": file.size})
        hasher = hasher_of(file)
        for chunk in chunks(path, cancel):
            hasher.update(chunk)
            on_bytes(len(chunk))
    except OSError as error:
        return Fact("hub.file_unreadable", {"file": file.path, "reason": error.strerror or str(error)})
    return None if matches(hasher, file) else Fact("hub.file_hash", {"file": file.path})


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of verifying a model: how files differ from the downloaded ones, by path."""

    folder: Path
    manifest: Manifest
    differences: dict[str, Fact]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, if they are complete."""
        return sum(file.size for file in self.manifest.files.values())


def verify(folder: Path, cancel: Cancel, on_progress: Callable[[str, int, int], None]) -> Verification:
    """Compare a folder's files with the sizes and hashes of its manifest.

    Args:
        on_progress: called with the current file, the bytes read, and the bytes to read in all.

    Raises:
        ModelError: if there is no manifest, or it is damaged.
        CancelledError: on cancel.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise ModelError("hub.no_manifest", model=folder.name)
    before, differences = 0, {}
    total = sum(file.size for file in manifest.files.values())
    for path, file in manifest.files.items():
        done = before

        def read(count: int, path: str = path) -> None:
            nonlocal done
            done += count
            on_progress(path, done, total)

        if mismatch := difference(folder / path, file, cancel, read):
            differences[path] = mismatch
        before += file.size
        on_progress(path, before, total)
    return Verification(folder=folder, manifest=manifest, differences=differences)
