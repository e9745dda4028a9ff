"""Selection of tests, their requirements, and shared fixtures."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
from filelock import FileLock

from runtime.engines import child
from runtime.machine.probe import compiles_all_vector_instructions, cpp_compiler
from runtime.models.registry import read_spec
from runtime.models.spec import ModelSpec
from tests import full_disk

if TYPE_CHECKING:  # PyTorch, which takes seconds to import, is not needed where tests are only distributed
    from tests.engine_library import EngineLibrary

os.environ.pop("TANDEM_PROGRAM", None)  # set by `./install.sh test`; messages name it
# Apps build no engines that a test does not ask for; those that a test starts in other processes, see `app_server`.
os.environ["TANDEM_IDLE_BUILDS"] = "0"
# Inductor otherwise compiles a program for each vector instruction set wherever its cache is new, which takes 7 s.
if compiles_all_vector_instructions():
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"

Result = TypeVar("Result")
DESELECTED = ("slow", "gpu")

# Of each test process, one process is forked for all that tests start by "forkserver": it has imported what any of them
# needs, also if the first are those of several GPUs, for which `execution.parallel.group` names less.
forkserver.set_forkserver_preload(["tests.engines.child_imports"])


def _keep_preloaded(modules_names: list[str]) -> None:
    """Ignore what else is to be imported."""


forkserver.set_forkserver_preload = _keep_preloaded


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--all`."""
    parser.addoption("--all", action="store_true", help=f"also run tests marked {', '.join(DESELECTED)}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `DESELECTED`, except in files named on the command line; skip `compiler` tests without one.

    With `--all` or `-m` nothing is deselected. A browser test that fails is run twice more, which the summary lists:
    what it waits for may take longer on a busy machine.
    """
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.flaky(reruns=2))
    if cpp_compiler() is None:
        for item in items:
            if item.get_closest_marker("compiler"):
                item.add_marker(pytest.mark.skip(reason="needs a C++ compiler (on Debian: apt install g++)"))
    if config.option.all or config.option.markexpr:
        return
    folder = config.invocation_params.dir
    named = {(folder / argument.split("::")[0]).resolve() for argument in config.args}
    deselected = [item for item in items if item.path not in named and any(map(item.get_closest_marker, DESELECTED))]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        dropped = set(deselected)
        items[:] = [item for item in items if item not in dropped]


def pytest_collection_finish() -> None:
    """Let collections of garbage skip the objects of modules and tests, hundreds of thousands that stay to the end."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """End this process if it is still there in five minutes, and print where each thread was."""
    faulthandler.dump_traceback_later(300, exit=True, file=2)


def shared_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder shared by all processes of this test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"shared-{name}"
    folder.mkdir(exist_ok=True)
    return folder


def build_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, build: Callable[[Path], Result]
) -> tuple[Path, Result]:
    """Call `build` with a new folder, in one process of this test run only; return the folder and the result.

    Other processes wait and read the result, which must be picklable. For module and session fixtures.
    """
    folder = shared_folder(tmp_path_factory, name)
    result = folder / "result.pickle"
    with FileLock(f"{folder}.lock"):
        if not result.exists():
            result.write_bytes(pickle.dumps(build(folder)))
    return folder, pickle.loads(result.read_bytes())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelSpec]:
    """Return a function that returns the tiny model of an architecture, built once."""
    from tests import tiny_models

    def get(architecture: str) -> ModelSpec:
        name = f"model-{architecture}"
        _, directory = build_once(
            tmp_path_factory, name, lambda folder: tiny_models.build(architecture, folder / architecture)
        )
        return read_spec(directory, architecture)

    return get


@pytest.fixture(scope="session")
def engine_library(tmp_path_factory: pytest.TempPathFactory) -> "EngineLibrary":
    """Engines of tiny models, built when the first test of this run asks for them."""
    from tests.engine_library import EngineLibrary

    return EngineLibrary(shared_folder(tmp_path_factory, "engines"))


@pytest.fixture(scope="module")
def forked_children() -> Iterator[None]:
    """Fork the children of `run_child` from a process that has imported their libraries, which takes seconds.

    For modules whose tests start many. Others start them as the app does.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "forkserver" in multiprocessing.get_all_start_methods():
            patch.setattr(child, "_START_METHOD", "forkserver")
        yield


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace as for Inductor, but let PyTorch run what was traced: C++ takes a minute to compile on a busy core."""
    import torch

    from runtime.execution.compilation import discard_compiled_code

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    discard_compiled_code()
    yield
    discard_compiled_code()


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes; see `full_disk.fill`."""
    with full_disk.small_disk(tmp_path / "disk", "size=2m") as folder:
        yield folder
