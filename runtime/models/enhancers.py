"""What enhances prompts: a chat model in a folder, or an OpenAI-compatible server, as the setting `enhancer` names it.

Chat models that were downloaded are in `weights/enhancers`. Imports no torch, and connects to nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from runtime.core.errors import EnhancerError, ModelError, TandemError
from runtime.core.facts import shortened
from runtime.core.settings import LOOPBACK, Settings, is_address
from runtime.models.folder import check_files, count_parameters, read_object, tensor_shapes
from runtime.models.registry import Part

# Their folder in the weights folder, and the folder of the model in that of a download.
ENHANCERS, CHAT_MODEL = "enhancers", "chat_model"
_CAUSAL = "ForCausalLM"
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class PublishedEnhancer:
    """A published chat model that enhances prompts.

    Attributes:
        name: in `models download` and in the setting, and of its folder.
        title: for people.
        license: of its weights.
        repository: on the hub.
        size: bytes of its download, to 0.1 GB.
    """

    name: str
    title: str
    license: str
    repository: str
    size: int

    @property
    def repositories(self) -> list[str]:
        """Those that its parts are downloaded from."""
        return [self.repository]

    @property
    def names(self) -> frozenset[str]:
        """All names that mean it, in lower case."""
        return frozenset({self.name, self.repository.lower()})

    @property
    def about(self) -> str:
        """What it does."""
        return f"Enhances prompts; start Tandem with TANDEM_ENHANCER={self.name}."


PUBLISHED: tuple[PublishedEnhancer, ...] = (
    PublishedEnhancer(
        name="qwen2.5-1.5b-instruct",
        title="Qwen2.5 1.5B Instruct",
        license="Apache-2.0",
        repository="Qwen/Qwen2.5-1.5B-Instruct",
        size=3_100_000_000,
    ),
    PublishedEnhancer(
        name="qwen3-4b-instruct-2507",
        title="Qwen3 4B Instruct 2507",
        license="Apache-2.0",
        repository="Qwen/Qwen3-4B-Instruct-2507",
        size=8_100_000_000,
    ),
)


@dataclass(frozen=True)
class LocalEnhancer:
    """A chat model in a folder.

    Attributes:
        folder: with its configuration, weights and tokenizer.
        title: for people.
        parameters: its number of weights.
    """

    folder: Path
    title: str
    parameters: int


@dataclass(frozen=True)
class RemoteEnhancer:
    """A chat model at an OpenAI-compatible server.

    Attributes:
        address: such as http://127.0.0.1:11434/v1.
        model: its name there.
        key: that the server asks for; empty sends none.
    """

    address: str
    model: str
    key: str = field(default="", repr=False)

    @property
    def title(self) -> str:
        """The model and the server, for people."""
        return f"{self.model} ({urlsplit(self.address).netloc})"


Enhancer = LocalEnhancer | RemoteEnhancer


def part_of(repository: str) -> Part:
    """Return the only part of a chat model that is published in a repository."""
    return Part(repository=repository, at_root=CHAT_MODEL)


def published_enhancer(name: str) -> PublishedEnhancer | None:
    """Return the published chat model with a name, in any case."""
    return next((model for model in PUBLISHED if name.strip().lower() in model.names), None)


def folder_of_enhancer(name: str, weights_dir: Path) -> Path:
    """Return the folder of a download of a chat model."""
    return weights_dir / ENHANCERS / name


def enhancer_of(settings: Settings) -> Enhancer:
    """Return what enhances prompts, checked as far as that needs neither torch nor a connection.

    Raises:
        EnhancerError: if none is set, it is not downloaded, or it may not be used.
        ModelError: if its folder is incomplete, damaged or pickled, or not of a chat model.
    """
    name = settings.enhancer
    if name is None:
        raise EnhancerError("enhancer.none", model=PUBLISHED[0].name)
    if not is_address(name):
        folder = _folder(name, settings.weights_dir)
        return LocalEnhancer(folder, _title(folder), check_chat_model(folder))
    if settings.enhancer_model is None:
        raise EnhancerError("enhancer.no_model_name", address=name)
    if settings.offline and urlsplit(name).hostname not in LOOPBACK:
        raise EnhancerError("enhancer.offline", address=name, offline=settings.offline)
    return RemoteEnhancer(name, settings.enhancer_model, settings.enhancer_key or "")


def check_download(folder: Path) -> None:
    """Check a downloaded chat model.

    Raises:
        ModelError: if it is incomplete or damaged, or none.
    """
    check_chat_model(folder / CHAT_MODEL)


def check_chat_model(folder: Path) -> int:
    """Check the folder of a chat model as far as that needs no torch; return its number of weights.

    Raises:
        ModelError: if it is incomplete, damaged, pickled or quantized, or not of a chat model.
    """
    check_files(folder)
    # Bases of rotary embeddings are beyond the numbers of other configurations.
    config = read_object(folder / "config.json")
    names = config.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith(_CAUSAL) for name in names):
        raise ModelError("enhancer.not_a_chat_model", model=_title(folder), architecture=shortened(names))
    if config.get("quantization_config"):
        raise ModelError("enhancer.quantized", model=_title(folder))
    tokenizer = read_object(folder / "tokenizer_config.json")
    if "auto_map" in tokenizer:
        raise ModelError("model.tokenizer_runs_code")
    if not _has_template(folder, tokenizer):
        raise ModelError("enhancer.no_chat_template", model=_title(folder))
    tensor_shapes(folder)  # names a truncated file
    return count_parameters(folder)


def _has_template(folder: Path, tokenizer: Mapping[str, Any]) -> bool:
    return bool(tokenizer.get("chat_template")) or any((folder / name).is_file() for name in _TEMPLATES)


def _folder(name: str, weights_dir: Path) -> Path:
    """Return the folder of a chat model by its path, the name of a published one, OWNER/REPOSITORY, or its folder's."""
    model = published_enhancer(name)
    downloaded = folder_of_enhancer(name.rpartition("/")[2] if model is None else model.name, weights_dir)
    for folder in (Path(name).expanduser(), downloaded):
        if folder.is_dir() and (model is None or folder == downloaded):
            inner = folder / CHAT_MODEL
            return inner if inner.is_dir() else folder
    if model is not None:
        data = {"name": model.name, "license": model.license, "size": model.size}
        raise EnhancerError("enhancer.not_downloaded", model=model.title, **data)
    owner, slash, repository = name.partition("/")
    if slash and owner and repository and "/" not in repository and not owner.startswith((".", "~")):
        raise EnhancerError("enhancer.repository_not_downloaded", name=name)
    raise EnhancerError("enhancer.no_such_folder", name=shortened(name), folder=weights_dir / ENHANCERS)


def _title(folder: Path) -> str:
    name = folder.parent.name if folder.name == CHAT_MODEL else folder.name
    model = published_enhancer(name)
    return name if model is None else model.title


def problem_of(settings: Settings) -> TandemError | None:
    """Return why no prompt can be enhanced; `None` if `enhancer_of` returns what enhances them."""
    try:
        enhancer_of(settings)
    except TandemError as error:
        return error
    return None
