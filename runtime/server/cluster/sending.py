"""Sends what a job needs to a node that lacks it: model, LoRAs, images, video, engines, and the job's progress."""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from runtime.core.errors import EngineError, OutputError
from runtime.core.loras import LoraUse
from runtime.core.settings import Settings
from runtime.engines import manifest
from runtime.engines.store import EngineStore
from runtime.models.loras import stated
from runtime.models.requested import model_for
from runtime.models.spec import ModelSpec
from runtime.pipeline.files import stamps
from runtime.planner.choice.engine_index import SWAPPED, EngineRecord
from runtime.queue.records import JobRecord
from runtime.queue.store import JobStore
from runtime.server.cluster import transfer
from runtime.server.cluster.node_worker import Order
from runtime.server.cluster.transfer import FileEntry

# Parts of a file that are sent and not written yet.
_MOST_PENDING = 2

logger = logging.getLogger(__name__)


class Remote(Protocol):
    """Calls the methods of a `NodeWorker`. All but `begin` may raise that the job is to stop."""

    def begin(self, method: str, *values: Any) -> Any:
        """Begin a call; return what `end` takes."""

    def end(self, begun: Any) -> Any:
        """Wait for a call and return its result, or raise its error."""

    def check(self) -> None:
        """Raise if the job is to stop."""


class Sender:
    """Sends files to one node's worker.

    Attributes:
        models: names of models that the node has.
        engines: ids of engines that it has.
    """

    def __init__(
        self,
        remote: Remote,
        settings: Settings,
        library: EngineStore,
        models: frozenset[str],
        engines: frozenset[str],
    ) -> None:
        self.models, self.engines = models, engines
        self._remote, self._settings, self._library = remote, settings, library
        # Models with the engines that the node was asked about.
        self._offered: set[tuple[str, frozenset[str]]] = set()

    def prepare(self, record: JobRecord, store: JobStore, sharing: "contextlib.AbstractContextManager[Any]") -> Order:
        """Send what a job needs.

        Args:
            sharing: held while files are sent that workers of a node share.

        Raises:
            TandemError: if something is missing here, or the node refuses it.
        """
        check = self._remote.check
        spec = model_for(record.generation_request(), self._settings.weights_dir, self._settings.cache_dir, check=check)
        try:
            with sharing:
                model = self._send_model(spec)
                self._send("lora", "loras", self._entries({_lora_name(use): use.path for use in spec.loras}))
                self._send("image", "images", transfer.entries({use.digest: use.path for use in spec.inputs}, None))
                self._send_engines(spec, model)
            self._send("job", record.id, transfer.entries(transfer.job_files(store.folder(record.id)), None))
        except OSError as error:
            raise OutputError("server.cluster_not_sent", error=error.strerror or str(error)) from error
        return Order(
            record=record.replace(request=stated(record.request, spec)),
            deaths=store.log.deaths(record.id),
            model=model,
            loras=tuple((_lora_name(use), use.expert) for use in spec.loras),
            files=stamps(spec),
        )

    def _send_model(self, spec: ModelSpec) -> str:
        """Send a model; return its name on the node: of its folder, or of a file in `transfer.BUNDLES`."""
        name = spec.location.name
        if not spec.single_files:
            if self._send("model", name, self._entries(transfer.model_files(spec.directory))):
                self._call("install", name)
        else:
            files = transfer.bundle_files(spec)
            self._send("bundle", name, self._entries(files))
            name = next(f"{transfer.BUNDLES}/{name}/{file}" for file, path in files.items() if path == spec.location)
        self.models |= {spec.location.name}
        return name

    def _send_engines(self, spec: ModelSpec, model: str) -> None:
        """Send the engines that the node would build in the same way; without them it uses PyTorch."""
        offered = {record.id: record for record in self._library.index() if _may_serve(record, spec)}
        offer = (model, frozenset(offered))
        if not offered or offer in self._offered:
            return
        self._offered.add(offer)
        for name in self._call("wanted_engines", model, list(offered.values())):
            record = offered[name]
            try:
                with self._library.using(name) as folder:
                    files = {
                        FileEntry(name=file.name, size=file.bytes, digest=file.sha256): folder / file.name
                        for file in record.files
                    }
                    files |= self._entries({manifest.NAME: folder / manifest.NAME})
                    self._send("engine", name, files)
                self._call("install_engine", name)
            except (EngineError, OutputError, OSError) as error:
                logger.warning("engine %s could not be sent: %s", name, error)
            else:
                self.engines |= {name}

    def _entries(self, files: Mapping[str, Path]) -> dict[FileEntry, Path]:
        return transfer.entries(files, self._settings.cache_dir, self._remote.check)

    def _send(self, kind: str, name: str, files: Mapping[FileEntry, Path]) -> bool:
        """Send the files that the node lacks; return whether there were any."""
        if not files:
            return False
        missing = self._call("missing", kind, name, list(files))
        for entry, path in files.items():
            if entry.name not in missing:
                continue
            offset = min(missing[entry.name], entry.size)
            pending: list[Any] = []
            for data in transfer.parts(path, offset):
                pending.append(self._remote.begin("receive", kind, name, entry.name, offset, data))
                offset += len(data)
                if len(pending) >= _MOST_PENDING:  # one is written while the next one is sent
                    self._remote.end(pending.pop(0))
            for call in pending:
                self._remote.end(call)
            self._call("complete", kind, name, entry.name, entry.digest)
        return bool(missing)

    def _call(self, method: str, *values: Any) -> Any:
        return self._remote.end(self._remote.begin(method, *values))


def _lora_name(use: LoraUse) -> str:
    """Return the name of a LoRA's file on a node."""
    return f"{use.digest[:16]}/{use.path.name}"


def _may_serve(record: EngineRecord, spec: ModelSpec) -> bool:
    """Return whether an engine may be for a model; the node compares everything else."""
    return record.usable and not record.loras and (record.model == spec.name or record.key.weights == SWAPPED)
