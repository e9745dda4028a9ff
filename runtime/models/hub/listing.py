"""Which files of a hub's repository make a model. Pure: nothing is fetched or written.

Only the files that Tandem loads are listed: configurations, tokenizers and safetensors of the pipeline's components,
under the names that diffusers and transformers give them. Everything else is skipped, pickled weights included.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from runtime.core.errors import DownloadError

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo
    from huggingface_hub.hf_api import RepoSibling

INDEX = "model_index.json"
_SETTINGS = ("scheduler",)
_TOKENIZERS = ("tokenizer", "tokenizer_2")
_WITH_WEIGHTS = ("text_encoder", "text_encoder_2", "transformer", "transformer_2", "vae")
_OPTIONAL = frozenset({"text_encoder_2", "transformer_2"})
# A file name that is valid on every system: no path, no device, no hidden file.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_WEIGHTS = re.compile(r"(diffusion_pytorch_model|model)(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_TOKENIZER_SUFFIXES = (".json", ".model", ".txt")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_BYTES = 1 << 50
_MAX_LICENSE_LENGTH = 80

Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


def _inside(path: str) -> str:
    """Return a path if it stays inside the folder it is joined to, on every system."""
    if path.startswith(("/", "~")) or "\\" in path or ":" in path or not path.isprintable() or ".." in path.split("/"):
        raise ValueError(path)
    return path


class RemoteFile(BaseModel):
    """One file of a repository.

    Attributes:
        path: relative to the repository, with slashes.
        size: in bytes.
        digest: "sha256:" and the content's hash (Git LFS), or "git:" and the SHA-1 of the git object.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    path: Annotated[str, Field(min_length=1), AfterValidator(_inside)]
    size: int = Field(ge=0, le=_MAX_BYTES)
    digest: str = Field(pattern=r"^(sha256:[0-9a-f]{64}|git:[0-9a-f]{40})$")

    @property
    def is_weights(self) -> bool:
        """Whether the file holds weights."""
        return self.path.endswith(".safetensors")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The files of a model in a repository at one commit, in download order: small files first."""

    repository: str
    commit: str
    license: str
    files: tuple[RemoteFile, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def read_listing(repository: str, info: "ModelInfo", license_name: str = "") -> Listing:
    """Return the files to download of a repository.

    Args:
        info: the hub's answer, with files' metadata.
        license_name: if the licence is known already.

    Raises:
        DownloadError: if the answer is malformed, a file name leads out of the folder, or it is not a pipeline.
    """
    entries: dict[str, RepoSibling] = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    if not (isinstance(info.sha, str) and re.fullmatch(r"[0-9a-f]{40}", info.sha)):
        raise DownloadError("hub.malformed_answer")
    for path in entries:
        try:
            _inside(path)
        except ValueError:  # a repository with such a name is malicious: none of its files is downloaded
            raise DownloadError("hub.path_outside", repository=repository, path=path[:80]) from None
    selected = [path for path in entries if path == INDEX or _is_loaded(path, entries)]
    _check_complete(repository, selected, entries)
    files = sorted((_file(entries[path]) for path in selected), key=_order)
    return Listing(repository=repository, commit=info.sha, license=license_name or _license(info), files=tuple(files))


def _is_loaded(path: str, paths: Collection[str]) -> bool:
    component, _, name = path.partition("/")
    if not _NAME.fullmatch(name):
        return False
    if component in _TOKENIZERS:
        return name.endswith(_TOKENIZER_SUFFIXES)
    if component not in (*_SETTINGS, *_WITH_WEIGHTS):
        return False
    if name.endswith(".json"):
        return not name.endswith(".index.json") or path == _index(component, name.split(".")[0])
    match = _WEIGHTS.fullmatch(name)
    # If an index lists shards, a single file with the same weights is not loaded.
    return component in _WITH_WEIGHTS and match is not None and bool(match[2]) == (_index(component, match[1]) in paths)


def _index(component: str, base: str) -> str:
    return f"{component}/{base}.safetensors.index.json"


def _check_complete(repository: str, selected: list[str], paths: Iterable[str]) -> None:
    if INDEX not in selected:
        raise DownloadError("hub.not_a_pipeline", repository=repository, file=INDEX)
    if len({path.lower() for path in selected}) < len(selected):
        raise DownloadError("hub.names_differ_in_case", repository=repository)
    for component in _WITH_WEIGHTS:
        own = [path for path in selected if path.startswith(f"{component}/")]
        if any(path.endswith(".safetensors") for path in own) or (component in _OPTIONAL and not own):
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
    return file.path != INDEX, file.is_weights, file.path


def _license(info: "ModelInfo") -> str:
    name = getattr(info.card_data, "license", None)
    if not isinstance(name, str):
        tags = [tag for tag in info.tags if isinstance(tag, str)] if isinstance(info.tags, list) else []
        name = next((tag.partition(":")[2] for tag in tags if tag.startswith("license:")), "")
    return name[:_MAX_LICENSE_LENGTH] if name.isprintable() else ""
