"""Private names of PyTorch that Tandem uses, each with the reason.

`tests/upstream/test_torch.py` fails if a release of PyTorch changes one of them. Imports torch on use.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from runtime.core.errors import ran_out

# Held while a CUDA graph is recorded: PyTorch records one at a time in a process. Reentrant, so that recording within
# recording fails instead of waiting for itself.
RECORDING = threading.RLock()


def recompile_limit(count: int) -> AbstractContextManager[None]:
    """Set how many kinds of inputs one function is compiled for, while entered.

    Reason: the limit has no public setting.
    """
    import torch

    patched: AbstractContextManager[None] = torch._dynamo.config.patch(recompile_limit=count)
    return patched


def hit_recompile_limit(error: Exception) -> bool:
    """Return whether a compiled function failed because it was compiled for too many kinds of inputs.

    Reason: the exceptions are in `torch._dynamo.exc`, and have other names in other releases.
    """
    return "RecompileLimit" in type(error).__name__


class CompiledGraphs(NamedTuple):
    """How many graphs Inductor has found in its cache on the disk, and how many it has compiled, in this process."""

    cached: int = 0
    compiled: int = 0

    def since(self, before: "CompiledGraphs") -> "CompiledGraphs":
        """Return how many there are since an earlier count."""
        return CompiledGraphs(max(self.cached - before.cached, 0), max(self.compiled - before.compiled, 0))


def compiled_graphs() -> CompiledGraphs:
    """Return the graphs of this process so far.

    Reason: whether compiled code comes from the cache decides how long compiling takes; the counters are not public.
    """
    utils = sys.modules.get("torch._dynamo.utils")  # without it, nothing was compiled
    if utils is None:
        return CompiledGraphs()
    found = utils.counters["inductor"]
    return CompiledGraphs(found["fxgraph_cache_hit"], found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"])


def empty_host_cache() -> None:
    """Return page-locked memory that PyTorch keeps for reuse to the system.

    Reason: `torch.accelerator.empty_host_cache` is public from PyTorch 2.12; before, the function has a private name.
    """
    import torch

    empty: Any = getattr(torch.accelerator, "empty_host_cache", getattr(torch._C, "_host_emptyCache", None))
    if empty is not None:
        empty()


def recording_stream(device: Any) -> Any:
    """Return a stream for recording CUDA graphs, which `torch.cuda.Stream` gives to nothing else in this process.

    Args:
        device: a CUDA device, or its index.

    Reason: PyTorch has 32 streams of each priority and hands them out again and again, so that another thread may get
    the one that records. What it starts then becomes part of the graph and does not run, such as copies of weights.
    Nothing else asks for this priority.
    """
    import torch

    return torch.cuda.Stream(device, priority=-2)  # type: ignore[no-untyped-call]  # torch has no annotation


def cuda_failure(device: Any) -> Exception | None:
    """Return the error that every CUDA call of this process raises from now on; None if CUDA can be used.

    After an illegal memory access, for example, only a new process can use the GPU again. A full GPU is not such an
    error. Waits for the device, so it must not be called while a CUDA graph is captured.

    Args:
        device: a CUDA device, or its index.

    Reason: PyTorch has no test for this; the types and texts of such errors depend on the release.
    """
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no annotation
        return None
    failure: Exception | None = None
    # The first call may report an earlier error after which the device works.
    for _ in range(2):
        try:
            torch.cuda.synchronize(device)
            torch.zeros(1, device=device).item()
        except RuntimeError as error:
            if ran_out(error):
                return None
            failure = error
        else:
            return None
    return failure


def cudnn_attention(q: Any, k: Any, v: Any) -> Any:
    """Attend with cuDNN; all tensors are (batch, heads, tokens, head width).

    Reason: `torch.nn.attention.sdpa_kernel` selects a kernel for all threads of the process.
    """
    import torch

    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)[0]


def flash_attention(q: Any, k: Any, v: Any) -> Any:
    """Attend with FlashAttention 2; all tensors are (batch, heads, tokens, head width).

    Reason: see `cudnn_attention`.
    """
    import torch

    aten = torch.ops.aten
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]
    return aten._scaled_dot_product_flash_attention(q, k, v)[0]


def clear_module(module: Any) -> None:
    """Remove all parameters, buffers, submodules and replaced methods of a module and of its submodules.

    Reason: weights are freed although hooks tie the module to itself; no public function removes all at once.
    """
    for part in list(module.modules()):
        for members in (part._parameters, part._buffers, part._modules):
            members.clear()
        # A method of the instance refers to the instance.
        part.__dict__.pop("forward", None)


def without_computing(*, real_weights: bool = False) -> Any:
    """Return a context manager in which operations yield shapes and dtypes and allocate nothing.

    Args:
        real_weights: whether modules with real weights may be called.

    Reason: `FakeTensorMode` is in `torch._subclasses`.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=real_weights)


class PackageError(Exception):
    """Inductor or the C++ compiler failed; the message is the last line of theirs."""


def compile_package(exported: Any, path: Path, options: dict[str, Any]) -> None:
    """Compile an exported program into a package of Inductor.

    Raises:
        PackageError: if the C++ compiler or Inductor fails.

    Reason: `torch._inductor.aoti_compile_and_package` is documented, but is in a private package; so are its errors.
    """
    import torch
    from torch._inductor.exc import CppCompileError, InductorError

    try:
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=options)
    except (CppCompileError, InductorError) as error:
        raise PackageError(str(error).strip().splitlines()[-1]) from error


def import_compiler() -> None:
    """Import what `torch.compile` needs, and compute the digests of its source that are part of its cache's keys.

    Reason: otherwise the first compilation does both, in private functions. The digests are kept in memory.
    """
    import torch._inductor.compile_fx  # noqa: F401
    from torch._inductor.codecache import torch_key
    from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

    torch_key()
    if HAS_TRITON:
        triton_key()


def inductor_cache() -> Path:
    """Return the folder in which Inductor keeps compiled code.

    Reason: it is computed in a private function.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


@contextmanager
def torch_found_in(folder: Path) -> Iterator[None]:
    """Give Inductor's compiler commands another path to torch's folder while entered.

    Reason: Inductor does not quote paths, so torch must be found under a path without spaces.
    """
    from unittest import mock  # takes 60 ms to import

    from torch.utils import cpp_extension

    with (
        mock.patch.object(cpp_extension, "_TORCH_PATH", str(folder)),
        mock.patch.object(cpp_extension, "TORCH_LIB_PATH", str(folder / "lib")),
    ):
        yield


def flattened(nested: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of nested tuples, lists and dictionaries, and a function that nests other leaves the same way.

    Reason: `torch.utils._pytree` is the only implementation that agrees with the order of an exported program's inputs.
    """
    from torch.utils import _pytree

    leaves, structure = _pytree.tree_flatten(nested)
    return leaves, lambda new_leaves: _pytree.tree_unflatten(new_leaves, structure)


def package_runner(library: Path, device: Any, folder: Path) -> Any:
    """Load a library that Inductor compiled.

    Args:
        device: a torch device.
        folder: with the kernels' files, for a GPU.

    Reason: the public `aoti_load_package` unpacks into a folder that it never removes, and cannot set weights by
    address.
    """
    import torch

    runners: Any = torch._C._aoti
    if device.type == "cpu":
        return runners.AOTIModelContainerRunnerCpu(str(library), 1)
    return runners.AOTIModelContainerRunnerCuda(str(library), 1, str(device), str(folder))
