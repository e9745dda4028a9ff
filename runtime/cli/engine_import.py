"""`engines import`: asks, imports, and says what the engine is, serves and costs."""

from pathlib import Path
from typing import Any

from runtime.cli import terminal
from runtime.cli.engines import engine_row, progress
from runtime.cli.interrupts import cancel_on_signals
from runtime.core import settings
from runtime.core.errors import InvalidRequestError
from runtime.core.facts import shortened
from runtime.engines.imported.importing import (
    WARNING,
    check_disk_space,
    check_library,
    device_here,
    import_engine,
    read_source,
)
from runtime.engines.service import EngineService
from runtime.machine.probe import probe
from runtime.models.catalogue import find


def import_file(file: str, component: str | None, model: str | None, *, trusted: bool) -> dict[str, Any]:
    """Import an engine file; ask before anything of it is run, unless it is trusted.

    Raises:
        TandemError: if it is none, or cannot be used with the model.
        CancelledError: on Ctrl-C, or if the answer is no.
    """
    loaded = settings.load()
    machine = probe()
    service = EngineService.from_settings(loaded, machine)
    spec = find(loaded.model if model is None else model, loaded.weights_dir)
    if component is not None and component not in spec.component_names:
        raise InvalidRequestError(
            "component",
            "cli.no_such_component",
            model=spec.title,
            component=shortened(component),
            choices=spec.component_names,
        )
    source = read_source(_path(file))
    check_library(source, machine)
    check_disk_space(source, service.store.folder)
    terminal.warning(str(WARNING))
    if not trusted:
        _ask(source.path)
    with cancel_on_signals() as cancel:
        done = import_engine(source.path, spec, component, service, device_here(machine), progress(), cancel)
    for fact in done.describe():
        terminal.line(str(fact))
    record = done.engine
    if done.compared:
        terminal.line(f"Imported as {record.id}: {record.detail}")
    else:
        terminal.warning(
            f"Imported as {record.id}, and not used before it was compared with PyTorch, which memory did not allow. "
            f"Close other programs, then: engines verify {record.id}"
        )
    return {
        "engine": engine_row(record),
        "contract": done.contract.to_json(),
        "serves": str(done.serves),
        "exact": done.match.exact,
        "adapters": list(map(str, done.match.describe())),
        "compared": done.compared,
    }


def _path(text: str) -> Path:
    if not text.strip() or not text.isprintable():
        raise InvalidRequestError("file", "cli.file_unreadable")
    return Path(text).expanduser()


def _ask(path: Path) -> None:
    cannot = InvalidRequestError("yes", "cli.trust_not_confirmed", file=path.name)
    terminal.ask(f"Open {path}?", cannot)
