"""Actions planted in the worker processes of a test: they kill themselves, hang, fail or use tqdm after a chosen event.

They wrap `Run.emit` in the workers: in those of this process, which can then be forked, or by a
`sitecustomize` module in `PYTHONPATH` in each process that `multiprocessing` spawns.
"""

import json
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pytest

    from runtime.core.events import Event
    from runtime.queue.run import Run
    from runtime.queue.worker import WorkerConfig

Action = Literal["kill", "hang", "allocate", "illegal access", "use tqdm"]

_ROOT = Path(__file__).parents[2]
_SITE = '''
import os, sys
from pathlib import Path


def run_hidden_module():
    """Run the `sitecustomize` module that this one hides, if there is one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    own = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in sys.path if Path(entry).resolve() != own])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


run_hidden_module()
if any("spawn_main" in argument for argument in sys.orig_argv):
    from tests.queue.planted import plant
    plant(Path(os.environ["TANDEM_TEST_ACTIONS"]))
'''


class Planted:
    """Actions for the workers that are started after this.

    Args:
        folder: for the module and the actions that are still to happen.
    """

    def __init__(self, folder: Path, monkeypatch: "pytest.MonkeyPatch") -> None:
        site = folder / "site"
        self._actions = folder / "actions"
        for made in (site, self._actions):
            made.mkdir(parents=True)
        (site / "sitecustomize.py").write_text(_SITE)
        path = [str(site), str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        monkeypatch.setenv("TANDEM_TEST_ACTIONS", str(self._actions))
        # Forked workers do not run `sitecustomize`.
        monkeypatch.setattr("runtime.queue.supervisor.main", partial(_main, self._actions))

    def add(self, action: Action, **at: object) -> None:
        """Plant an action, after those that were planted before.

        Args:
            at: fields of the event after which it happens, once.
        """
        number = len(list(self._actions.glob("*.json")))
        planted = {"action": action, "at": at}
        written = self._actions / f"{number}.tmp"
        written.write_text(json.dumps(planted))
        written.rename(written.with_suffix(".json"))

    def pending(self) -> int:
        """Return how many actions have not happened."""
        return len(list(self._actions.glob("*.json")))


def plant(folder: Path) -> None:
    """Let the jobs of this process do the actions in a folder; safe to call twice."""
    from runtime.queue.run import Run

    emit = Run.emit
    if emit.__name__ == "planted_emit":
        return

    def planted_emit(self: "Run", event: "Event") -> None:
        emit(self, event)
        for path in sorted(folder.glob("*.json"))[:1]:
            planted = json.loads(path.read_text())
            same = all(getattr(event, name, None) == value for name, value in planted["at"].items())
            if same:
                path.unlink()
                _ACTIONS[planted["action"]]()

    Run.emit = planted_emit  # type: ignore[method-assign]


def _main(actions: Path, config: "WorkerConfig", supervisor: Connection) -> None:
    from runtime.queue.worker import main

    plant(actions)
    main(config, supervisor)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    threading.Event().wait()


def _allocate() -> None:
    blocks = []
    while True:
        blocks.append(b"x" * (64 << 20))


def _illegal_access() -> None:
    import torch

    torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]


def _use_tqdm() -> None:
    from tqdm import tqdm

    list(tqdm(range(3)))


_ACTIONS: dict[Action, Callable[[], None]] = {
    "kill": _kill,
    "hang": _hang,
    "allocate": _allocate,
    "illegal access": _illegal_access,
    "use tqdm": _use_tqdm,
}
