"""Text embeddings of earlier prompts, in memory and on disk.

The key of an entry is the text, the files of text encoders and tokenizers (names, sizes, times), and how the text
encoder runs. Files are safetensors, named by digests; a damaged one is removed.
"""

import contextlib
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch

from runtime.core.errors import ModelError
from runtime.core.files import remove_partial_files, replace_file
from runtime.core.plan import ComponentPlan
from runtime.core.prompt_weights import read_weights
from runtime.core.untrusted_files import parse_json
from runtime.execution.text_encoder import TextEncoding
from runtime.models.spec import CONNECTORS, ModelSpec
from runtime.models.tensor_files import read_tensors

# An entry of UMT5-XXL takes 4 MB in bfloat16.
_MOST_IN_MEMORY = 8
_MOST_ON_DISK = 64
_MAX_BYTES = 64 << 20
_VERSION = 1
_METADATA = "tandem"
# The names of folders and components that embeddings depend on begin with these.
_FOLDERS = ("text_encoder", "tokenizer", CONNECTORS)


class PromptCache:
    """A cache of text embeddings that processes share through a folder.

    Args:
        folder: created with the first entry; `None` caches in this process only.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._encodings: OrderedDict[str, TextEncoding] = OrderedDict()

    def find(self, spec: ModelSpec, part: ComponentPlan, text: str, name: str = "text_encoder") -> TextEncoding | None:
        """Return the cached embeddings of a text, on the CPU, or `None`.

        Args:
            part: how the text encoder runs.
            name: of the text encoder.
        """
        key = _key(spec, part, text, name)
        encoding = self._encodings.get(key) or self._read(key)
        if encoding is not None:
            self._remember(key, encoding)
        return encoding

    def keep(
        self, spec: ModelSpec, part: ComponentPlan, text: str, encoding: TextEncoding, name: str = "text_encoder"
    ) -> None:
        """Cache the embeddings of a text; a folder that cannot be written to is not an error."""
        key = _key(spec, part, text, name)
        here = TextEncoding(encoding.embeds.detach().cpu().contiguous(), encoding.unknown_words, encoding.cut)
        self._remember(key, here)
        if self._folder is None:
            return
        metadata_json = json.dumps({"version": _VERSION, "unknown_words": here.unknown_words, "cut": here.cut})
        target = self._path(key)
        data = safetensors.torch.save({"embeds": here.embeds}, metadata={_METADATA: metadata_json})
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_partial_files(self._folder)
            replace_file(target, data)
            self._sweep()

    def _remember(self, key: str, encoding: TextEncoding) -> None:
        self._encodings[key] = encoding
        self._encodings.move_to_end(key)
        while len(self._encodings) > _MOST_IN_MEMORY:
            self._encodings.popitem(last=False)

    def _read(self, key: str) -> TextEncoding | None:
        if self._folder is None:
            return None
        path = self._path(key)
        try:
            tensors, metadata = read_tensors(path, _MAX_BYTES)
            values = parse_json(metadata[_METADATA].encode())
            if values["version"] != _VERSION:
                return None
            path.touch()
            return TextEncoding(tensors["embeds"], tuple(map(str, values["unknown_words"])), bool(values["cut"]))
        except (ModelError, OSError, ValueError, KeyError, TypeError):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{key}.safetensors"

    def _sweep(self) -> None:
        """Remove the least recently used files."""
        assert self._folder is not None
        files = sorted(self._folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
        for path in files[:-_MOST_ON_DISK]:
            path.unlink(missing_ok=True)


def _key(spec: ModelSpec, part: ComponentPlan, text: str, name: str) -> str:
    parts: list[Any] = [str(spec.directory), name, spec.max_sequence_length, text]
    weighted = read_weights(text)
    # Earlier versions embedded these texts as they are.
    parts += [] if weighted.text == text else [weighted.text, weighted.weights]
    # Only the kind of device: all GPUs compute the same embeddings.
    parts += [part.backend, part.device.partition(":")[0], part.dtype, [use.id for use in part.engines]]
    # A family may have more text encoders and tokenizers, such as `text_encoder_2`.
    folders = sorted(path for path in spec.directory.iterdir() if path.name.startswith(_FOLDERS))
    parts += [list(_files(folder)) for folder in folders]
    for component in sorted(spec.files):
        if component.startswith(_FOLDERS):
            paths = spec.files[component].paths
            parts += [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            stat = path.stat()
            yield path.name, stat.st_size, stat.st_mtime_ns
