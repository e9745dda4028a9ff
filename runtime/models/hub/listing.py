"""What a repository on a hub holds, and which of its files make the model. Pure: nothing is fetched or written.

Only the files that Tandem loads are taken: configurations, tokenizer and safetensors of the pipeline's own parts, under
the names that diffusers and transformers give them. All else is passed over, pickled weights among it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.core.errors import DownloadError

INDEX = "model_index.json"
_PARTS = ("scheduler", "tokenizer", "text_encoder", "transformer", "transformer_2", "vae")
_WITH_WEIGHTS = _PARTS[2:]
_OPTIONAL = frozenset({"transformer_2"})
# A name that is the same file on every system: no path, no device, no hidden file.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_WEIGHTS = re.compile(r"(diffusion_pytorch_model|model)(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_SETTINGS_SUFFIX = ".json"
_TOKENIZER_SUFFIXES = (".json", ".model", ".txt")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
COMMIT = _SHA1
# No part of a model is a hundredth of that, and no disk holds it.
_MOST_BYTES = 1 << 50


@dataclass(frozen=True)
class RemoteFile:
    """One file: its path in the repository, size in bytes, and hash as the hub has it.

    `digest` is "sha256:" of the content (Git LFS) or "git:" and the SHA-1 of the git object.
    """

    path: str
    size: int
    digest: str

    @property
    def is_weights(self) -> bool:
        """Whether it holds weights."""
        return self.path.endswith(".safetensors")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A repository at one commit: the files that make the model, in the order they are fetched, small ones first."""

    repository: str
    commit: str
    license: str
    files: tuple[RemoteFile, ...]

    @property
    def total_bytes(self) -> int:
        """What the files take together."""
        return sum(file.size for file in self.files)


def read_listing(repository: str, answer: Mapping[str, Any], license_name: str = "") -> Listing:
    """Read what a hub answers to `/api/models/REPOSITORY?blobs=true`.

    Args:
        answer: its JSON: "sha", "siblings" with "rfilename", "size", "blobId" and "lfs", "cardData", "tags".
        license_name: where it is known already.

    Raises:
        DownloadError: if that is no such answer, a name leads out of the folder, or it is no pipeline.
    """
    commit = answer.get("sha")
    siblings = answer.get("siblings")
    if not (isinstance(commit, str) and COMMIT.fullmatch(commit) and isinstance(siblings, list)):
        raise DownloadError(
            "The hub does not answer as one does: it names no commit and no files.", "Check its address."
        )
    entries: dict[str, Mapping[str, Any]] = {}
    for sibling in siblings:
        path = sibling.get("rfilename") if isinstance(sibling, dict) else None
        if not isinstance(path, str):
            raise DownloadError("The hub does not answer as one does: a file has no name.", "Check its address.")
        _check_inside(repository, path)
        entries[path] = sibling
    wanted = _wanted(entries)
    _check_whole(repository, wanted, entries)
    files = sorted((_file(path, entries[path]) for path in wanted), key=_order)
    return Listing(repository=repository, commit=commit, license=license_name or _license(answer), files=tuple(files))


def _check_inside(repository: str, path: str) -> None:
    """Refuse a whole repository for one name that leads elsewhere: nobody means well by that."""
    if path.startswith(("/", "~")) or "\\" in path or ":" in path or not path.isprintable() or ".." in path.split("/"):
        raise DownloadError(
            f"{repository} holds a file whose name leads out of its folder: {path[:80]!r}.",
            "Take another repository; nothing was fetched of this one.",
        )


def _wanted(paths: Iterable[str]) -> list[str]:
    paths = list(paths)
    return [path for path in paths if path == INDEX or _is_part(path, paths)]


def _is_part(path: str, paths: list[str]) -> bool:
    part, _, name = path.partition("/")
    if part not in _PARTS or not _NAME.fullmatch(name):
        return False
    if part == "tokenizer":
        return name.endswith(_TOKENIZER_SUFFIXES)
    if name.endswith(_SETTINGS_SUFFIX):
        return not name.endswith(".index.json") or f"{part}/{name}" == _index(part, name.split(".")[0])
    match = _WEIGHTS.fullmatch(name)
    if part not in _WITH_WEIGHTS or match is None:
        return False
    # Where an index names shards, the same weights in one file are not read.
    return bool(match[2]) == (_index(part, match[1]) in paths)


def _index(part: str, base: str) -> str:
    return f"{part}/{base}.safetensors.index.json"


def _check_whole(repository: str, wanted: list[str], entries: Mapping[str, Any]) -> None:
    if INDEX not in wanted:
        raise DownloadError(
            f"{repository} has no {INDEX}: it is not a pipeline in diffusers' format.",
            "Take the repository whose name ends with -Diffusers, or another model.",
        )
    if len({path.lower() for path in wanted}) < len(wanted):
        raise DownloadError(
            f"{repository} has two files whose names differ in upper and lower case alone.", "Take another repository."
        )
    for part in _WITH_WEIGHTS:
        own = [path for path in wanted if path.startswith(f"{part}/")]
        if any(path.endswith(".safetensors") for path in own) or (part in _OPTIONAL and not own):
            continue
        pickled = any(path.startswith(f"{part}/") and path.endswith(_PICKLES) for path in entries)
        why = "only pickled weights, which can run code when loaded" if pickled else "no safetensors"
        raise DownloadError(
            f"{repository} has {why} for its {part}.", "Take a repository with safetensors in diffusers' format."
        )


def _file(path: str, entry: Mapping[str, Any]) -> RemoteFile:
    lfs = entry.get("lfs")
    if isinstance(lfs, dict):
        size, digest, form, kind = lfs.get("size"), lfs.get("sha256"), _SHA256, "sha256"
    else:
        size, digest, form, kind = entry.get("size"), entry.get("blobId"), _SHA1, "git"
    sized = isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= _MOST_BYTES
    if not (sized and isinstance(digest, str) and form.fullmatch(digest)):
        raise DownloadError(
            f"The hub does not say the size and hash of {path}, so that it could not be checked.",
            "Fetch it from another hub.",
        )
    assert isinstance(size, int)
    return RemoteFile(path, size, f"{kind}:{digest}")


def _order(file: RemoteFile) -> tuple[bool, bool, str]:
    """Small files first, the index before all: what makes the rest useless is found before gigabytes were fetched."""
    return file.path != INDEX, file.is_weights, file.path


def _license(answer: Mapping[str, Any]) -> str:
    card = answer.get("cardData")
    said = card.get("license") if isinstance(card, dict) else None
    if not isinstance(said, str):
        tags = answer.get("tags")
        marked = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
        said = next((tag.partition(":")[2] for tag in marked if tag.startswith("license:")), "")
    return said[:80] if said.isprintable() else ""
