"""Actions planted in the worker processes of a test: they kill themselves, fail or use tqdm after a chosen event.

A `sitecustomize` module in `PYTHONPATH` wraps `JobRecorder.record` in each process that `multiprocessing` spawns.
"""

import json
import os
from pathlib import Path
from typing import Literal

import pytest

Action = Literal["kill", "allocate", "illegal access", "use tqdm"]

_ROOT = Path(__file__).parents[2]
_SITE = '''
import json, os, signal, sys
from pathlib import Path


def kill(folder):
    os.kill(os.getpid(), signal.SIGKILL)


def allocate(folder):
    blocks = []
    while True:
        blocks.append(b"x" * (64 << 20))


def illegal_access(folder):
    import torch
    torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]


def use_tqdm(folder):
    from tqdm import tqdm
    list(tqdm(range(3)))


ACTIONS = {"kill": kill, "allocate": allocate, "illegal access": illegal_access, "use tqdm": use_tqdm}


def plant(folder):
    from runtime.queue.job_runner import JobRecorder
    record = JobRecorder.record

    def recorded(self, event):
        warnings = record(self, event)
        for path in sorted(folder.glob("*.json"))[:1]:
            planted = json.loads(path.read_text())
            same = all(getattr(event, name, None) == value for name, value in planted["at"].items())
            if same:
                path.unlink()
                ACTIONS[planted["action"]](folder)
        return warnings

    JobRecorder.record = recorded


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
    plant(Path(os.environ["TANDEM_TEST_ACTIONS"]))
'''


class Planted:
    """Actions for the workers that are started after this.

    Args:
        folder: for the module and the actions that are still to happen.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        site = folder / "site"
        self._actions = folder / "actions"
        for made in (site, self._actions):
            made.mkdir(parents=True)
        (site / "sitecustomize.py").write_text(_SITE)
        path = [str(site), str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        monkeypatch.setenv("TANDEM_TEST_ACTIONS", str(self._actions))

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
