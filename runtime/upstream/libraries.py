"""diffusers and transformers, imported without packages and modules that no model here uses.

Import them from this module: what they import is decided when they are first imported. `tests/pipeline/test_start.py`
lists what a job may import.

Reasons, none of which has a setting:

- Both import optional packages wherever these are installed, and fail if one of them does not suit PyTorch.
- Both decorate functions with TorchDynamo's decorators, so that it is imported although nothing is compiled.
- diffusers reads the metadata of every installed package, and imports all models of a kind where one is needed.
- transformers reads the source of all its models, and imports DTensor.
"""

import functools
import importlib.abc
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# Packages that are hidden from both libraries. bitsandbytes, torchao and scipy are imported where they are used.
_UNUSED = ("peft", "bitsandbytes", "torchao", "sklearn", "scipy", "torchvision", "torchaudio")
# Functions of `transformers.utils` that keep their first answer.
_ASKED = tuple(f"is_{name}_available" for name in (*_UNUSED, "torch_distributed"))
# Packages of diffusers whose `__init__` imports every model of its kind.
_EAGER = ("diffusers.models.transformers", "diffusers.models.autoencoders", "diffusers.models.unets")
# Folders of transformers whose names are known before another one is asked for.
_MODELS = ("auto", "clip", "llama", "siglip", "t5", "umt5")
# Modules of transformers with the names of models, and the prefix of their modules.
_OF_MODELS = {"transformers": "models", "transformers.models": None}
# TorchDynamo, and those of its decorators that mark a function or class and return it.
_DYNAMO, _MARKS = "torch._dynamo", ("allow_in_graph", "assume_constant_result")
# The module of it that transformers imports; it imports no other of them.
_ALONE = "torch._dynamo._trace_wrapped_higher_order_op"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module as soon as that is imported."""

    def __init__(self, module: str, then: Callable[[Any], None]) -> None:
        self._module, self._then = module, then
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return how to import the module; `None` for others."""
        spec = PathFinder.find_spec(name, path) if name == self._module else None
        if spec is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def run_and_call(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._then(module)

            loader.exec_module = run_and_call
        return spec


class _LateDynamo(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Keeps decorators from importing TorchDynamo while entered; marks are set as soon as it is imported.

    What else is looked up in it imports it at once.
    """

    def __init__(self) -> None:
        self._marked: list[tuple[str, Any]] = []
        self._stand_in: Any = None

    def __enter__(self) -> None:
        if _DYNAMO in sys.modules:
            return
        spec = importlib.util.find_spec(_DYNAMO)
        assert spec is not None
        self._stand_in = ModuleType(_DYNAMO)
        self._stand_in.__path__ = spec.submodule_search_locations
        self._stand_in.__getattr__ = self._look_up
        self._stand_in.disable = _disable
        for name in _MARKS:
            setattr(self._stand_in, name, functools.partial(self._mark, name))
        sys.modules[_DYNAMO] = self._stand_in
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        if self._stands_in:
            del sys.modules[_DYNAMO]
            _AfterImport(_DYNAMO, self._apply)
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    @property
    def _stands_in(self) -> bool:
        return self._stand_in is not None and sys.modules.get(_DYNAMO) is self._stand_in

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Import TorchDynamo before a module of it; return how to find what was imported with it."""
        del path, target
        if name == _ALONE or not name.startswith(f"{_DYNAMO}.") or not self._stands_in:
            return None
        self._import()
        return ModuleSpec(name, self) if name in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that was imported with TorchDynamo."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module was executed."""

    def _look_up(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._import(), name)

    def _import(self) -> ModuleType:
        if self._stands_in:
            del sys.modules[_DYNAMO]
            self._apply(importlib.import_module(_DYNAMO))
        return sys.modules[_DYNAMO]

    def _mark(self, decorator: str, marked: Any) -> Any:
        dynamo = sys.modules.get(_DYNAMO)
        mark = None if dynamo is self._stand_in else getattr(dynamo, decorator, None)
        if mark is not None:
            return mark(marked)
        self._marked.append((decorator, marked))
        return marked

    def _apply(self, dynamo: Any) -> None:
        if _ALONE in sys.modules:
            setattr(dynamo, _ALONE.rpartition(".")[2], sys.modules[_ALONE])
        for decorator, marked in self._marked:
            getattr(dynamo, decorator)(marked)


def _disable(function: Any = None, recursive: bool = True, **_: Any) -> Any:
    """Return a function that PyTorch's compiler leaves alone; TorchDynamo is imported when it is called."""
    from torch._compile import _disable_dynamo

    return _disable_dynamo(function, recursive)


class _Distributions(Mapping[str, list[str]]):
    """What `importlib.metadata.packages_distributions` returns, read when it is needed."""

    def __init__(self, read: Callable[[], Mapping[str, list[str]]]) -> None:
        self._read = functools.cache(read)

    def __getitem__(self, name: str) -> list[str]:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


class _DeferredPackage(ModuleType):
    """A package whose `__init__` runs when a name is looked up that no submodule import has set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__dict__.get("_initialized"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__dict__["_initialized"] = True
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _without(names: tuple[str, ...]) -> Iterator[None]:
    """Let packages that were not imported before seem not to be installed, while entered."""
    hidden: dict[str, Any] = {name: None for name in names if name not in sys.modules}
    sys.modules.update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def _defer_packages() -> None:
    """Let `import diffusers.models.transformers.X` import X without every other transformer, likewise other kinds.

    Everything else finds the packages as they are.
    """
    import diffusers.models

    for name in _EAGER:
        if name in sys.modules:
            continue
        spec = importlib.util.find_spec(name)
        assert spec is not None
        package = _DeferredPackage(name)
        package.__spec__, package.__file__, package.__loader__ = spec, spec.origin, spec.loader
        package.__package__, package.__path__ = name, list(spec.submodule_search_locations or ())
        sys.modules[name] = package
        setattr(diffusers.models, name.rpartition(".")[2], package)


def _read_few_models(imports: Any) -> None:
    """Let transformers read the names of a few models; those of all others when a further name is looked up.

    Args:
        imports: the module `transformers.utils.import_utils`.
    """
    read = imports.create_import_structure_from_path
    lazy: Any = imports._LazyModule

    def read_few(place: str | Path) -> Any:
        folder = Path(place).parent if Path(place).is_file() else Path(place)
        if folder.name != "models":
            return read(place)
        return {name: read(folder / name) for name in _MODELS}

    class WithOtherModels(lazy):  # type: ignore[misc]  # a class of transformers
        __all__: list[str]

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                of_few = self.__name__ in _OF_MODELS and "_of_all" not in self.__dict__
                if not of_few or name.startswith("__") or importlib.util.find_spec(f"{self.__name__}.{name}"):
                    raise
            self._of_all = True
            imports.create_import_structure_from_path = read
            imports.define_import_structure.cache_clear()
            names = imports.define_import_structure(
                Path(imports.__file__).parents[1] / "models", prefix=_OF_MODELS[self.__name__]
            )
            every = lazy(self.__name__, self.__file__, names, module_spec=self.__spec__)
            self._modules |= every._modules
            for table in ("_class_to_module", "_object_missing_backend", "_import_structure"):
                setattr(self, table, getattr(every, table) | getattr(self, table))
            self.__all__ = sorted({*self.__all__, *every.__all__})
            return getattr(self, name)

    imports.create_import_structure_from_path = read_few
    imports._LazyModule = WithOtherModels


if "transformers" not in sys.modules:
    _AfterImport("transformers.utils.import_utils", _read_few_models)
_DISTRIBUTIONS = _Distributions(importlib.metadata.packages_distributions)
with _without(_UNUSED), _LateDynamo(), _replaced(importlib.metadata, "packages_distributions", lambda: _DISTRIBUTIONS):
    import diffusers

    with _replaced(torch.distributed, "is_available", lambda: False):
        import transformers

        for _name in _ASKED:
            getattr(transformers.utils, _name)()
        import transformers.masking_utils
        import transformers.modeling_utils
    _defer_packages()
    import diffusers.hooks
    import diffusers.loaders.peft
    import diffusers.loaders.single_file_model
    import diffusers.models.modeling_utils

__all__ = ["diffusers", "transformers"]
