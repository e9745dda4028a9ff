"""Engines of tiny models: each is built once per test run, by its real builder, and copied to where a test needs it.

Building an engine in a test takes seconds to minutes. Only tests of building itself build; others ask the fixture
`engine_library`.
"""

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from runtime.core.plan import ExecutionPlan
from runtime.engines import manifest
from runtime.engines.builders import BUILDERS, Builder
from runtime.engines.key_parts import tokens_of
from runtime.engines.programs import load_program
from runtime.engines.service import EngineService
from runtime.models.spec import ModelSpec
from runtime.planner.choice.engine_index import SWAPPED, EngineKey, EngineRecord
from tests.engines import engine_files


@dataclass(frozen=True)
class EngineLibrary:
    """Engines of this test run.

    Attributes:
        folder: shared by all processes of the run.
    """

    folder: Path

    def files(self, spec: ModelSpec, component: str, key: EngineKey, builder: Builder | None = None) -> Path:
        """Return the folder with the files of an engine, built on the CPU if no test has asked for it before.

        Args:
            builder: instead of the one that the key names, for one with arguments of its own.
        """
        maker = builder or BUILDERS[key.builder]
        # ONNX Runtime's providers take the same file, which depends on the number of tokens.
        same = replace(key, options=(("tokens", str(tokens_of(key))),)) if maker.backend == "onnxruntime" else key
        folder = self.folder / same.digest()
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                new = folder.with_suffix(".new")
                shutil.rmtree(new, ignore_errors=True)
                new.mkdir()
                program = load_program(
                    spec, component, key.program, device="cpu", dtype=key.precision, tokens=tokens_of(key)
                )
                maker.build(program, key, new, lambda fact, share: None)
                new.rename(folder)
        return folder

    def write(
        self,
        spec: ModelSpec,
        component: str,
        key: EngineKey,
        folder: Path,
        builder: Builder | None = None,
        **changes: Any,
    ) -> EngineRecord:
        """Copy an engine into an existing folder, with a record that says it was verified and faster than PyTorch.

        Args:
            builder: see `files`.
            changes: other values of the record's fields.
        """
        maker = builder or BUILDERS[key.builder]
        for file in self.files(spec, component, key, builder).iterdir():
            shutil.copy(file, folder)
        (folder / manifest.LOG_NAME).write_text("built\n")
        hashed = manifest.hashed_files(folder, maker.file_name)
        about: dict[str, Any] = {
            "model": spec.name,
            "component": component,
            "files": hashed,
            "file_bytes": sum(file.bytes for file in hashed),
            "loras": () if key.weights == SWAPPED else spec.loras_of(component),
            "built_at": time.time(),
            "last_used": time.time(),
        }
        record = engine_files.record(key, **(about | changes))
        manifest.write(folder, record)
        return record

    def add(
        self,
        service: EngineService,
        spec: ModelSpec,
        component: str,
        key: EngineKey,
        builder: Builder | None = None,
        **changes: Any,
    ) -> EngineRecord:
        """Put a copy of an engine into a service's store, as `EngineService.build` does; see `write`."""
        store, engine_id = service.store, key.digest()
        store.folder.mkdir(parents=True, exist_ok=True)
        with store.building(engine_id, wait=lambda: None), store.workspace(engine_id) as work:
            self.write(spec, component, key, work.engine, builder, **changes)
            return store.insert(work.engine, engine_id)

    def stock(self, service: EngineService, spec: ModelSpec, plan: ExecutionPlan, **changes: Any) -> list[EngineRecord]:
        """Put copies of all engines that a plan would build into a service's store; plan again to use them.

        Args:
            spec: the plan's model, with its LoRAs.
            changes: see `write`.
        """
        offers = service.offers(spec)
        added: dict[str, EngineRecord] = {}
        for component, part in plan.components.items():
            for use in part.engines:
                if use.build and use.id not in added:
                    key = offers.key(BUILDERS[use.builder], component, use, part.device)
                    added[use.id] = self.add(service, spec, component, key, **changes)
        return list(added.values())
