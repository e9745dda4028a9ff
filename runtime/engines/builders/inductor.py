"""Builds Inductor packages: C++ (CPU) or Triton kernels (CUDA), compiled ahead of time into a shared library.

On a CPU the library does not contain its weights; they are supplied when it is loaded, so that both experts run on one
package at the same speed. The exception is the VAE's recurrent step for one size: there Inductor changes the layout of
the convolutions' weights ("freezing"), which makes it 10 % faster in bfloat16 and 17 % faster in float32, and stores
them. With dynamic sizes, or 2D convolutions, freezing gives wrong results in bfloat16 (torch 2.13).

On a GPU every library contains its weights: a library whose weights were replaced with the other expert's gave wrong
latents (torch 2.11 on an H200: correct for the first expert, 50 % off after ten steps of the second).
"""

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from runtime.core.environment import environment_variables
from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.core.request import FINISHERS, SOUND_DECODERS
from runtime.engines.builders import Builder, BuildNeeds, weights_bytes
from runtime.engines.child import Report
from runtime.machine.probe import Machine, compiles_all_vector_instructions
from runtime.models.spec import IMAGE_ENCODER, ModelSpec
from runtime.planner.choice.engine_index import SWAPPED, EngineKey, ShapeProfile
from runtime.upstream.torch import PackageError, compile_package, inductor_cache, torch_found_in

if TYPE_CHECKING:
    import torch

    from runtime.engines.component_programs import Program

_GIB = 1 << 30
# torch and the compiler's processes.
_BASE_RAM = 2 * _GIB
_BASE_DISK = _GIB // 2


@dataclass(frozen=True)
class InductorBuilder(Builder):
    """Builds packages with `torch._inductor`'s ahead-of-time compiler."""

    name: ClassVar[str] = "inductor"
    backend: ClassVar[str] = "inductor"
    file_name: ClassVar[str] = "engine.pt2"

    def default_precision(self, spec: ModelSpec, program: str, machine: Machine, device: str) -> str:
        """Return the fastest precision in which a program keeps its quality.

        On a CPU with bfloat16 instructions the VAE, the upscaler and the interpolator run in bfloat16, which changes
        frames by less than 8-bit color does (57, 63 and 74 dB). Everything else runs in float32, because a
        transformer's rounding errors accumulate over the steps (41 dB in bfloat16, measured on the shipped model). On a
        GPU the transformer and the text encoder run in bfloat16, in which large models are trained; they would not fit
        otherwise. The image encoder and decoders of sound run in float32, as their authors run them.
        """
        if device == "cpu":
            return "bfloat16" if program.startswith(("vae", *FINISHERS)) and machine.cpu_has_bfloat16 else "float32"
        return "float32" if program.startswith(("vae", IMAGE_ENCODER, *SOUND_DECODERS)) else "bfloat16"

    def keeps_weights(self, program: str, profiles: tuple[ShapeProfile, ...], device: str) -> bool:
        frozen = program == "vae_next" and all(profile.min == profile.max for profile in profiles)
        return frozen or device != "cpu"

    def packages(self, device: str) -> tuple[str, ...]:
        return ("torch",) if device == "cpu" else ("torch", "triton")

    def needs(self, spec: ModelSpec, program: str, profile: ShapeProfile) -> BuildNeeds:
        weights = weights_bytes(spec, program, "float32")
        # Tracing copies nothing. Freezing copies the VAE's weights, and the package holds them twice while it is
        # linked.
        copies = 3 if program.startswith("vae") else 1
        return BuildNeeds(ram_bytes=_BASE_RAM + copies * weights, disk_bytes=_BASE_DISK + copies * weights)

    def build(self, program: "Program", key: EngineKey, folder: Path, report: Report) -> None:
        """Write `folder/engine.pt2`.

        Raises:
            EngineError: if the compiler fails.
        """
        import torch

        from runtime.engines.signatures import METADATA_KEY, WEIGHTS_KEY

        (profile,) = key.profiles
        on_cpu = program.device.type == "cpu"
        report(Fact("engine.exporting"), 0.0)
        exported = program.export(profile, cut=on_cpu)
        signature = program.signature(profile, program.example(profile, cut=on_cpu))
        weights = {} if key.weights != SWAPPED else _described(exported)
        options: dict[str, Any] = {
            "aot_inductor.metadata": {METADATA_KEY: signature.to_text(), WEIGHTS_KEY: json.dumps(weights)},
            "aot_inductor.package_constants_in_so": key.weights != SWAPPED,
            "freezing": on_cpu and key.weights != SWAPPED,
            # Use the number of threads of the process that runs it, not of this one.
            "cpp.dynamic_threads": True,
            # Inductor compiles a test for each vector instruction set: half of the build time of a small package.
            "cpp.vec_isa_ok": True if compiles_all_vector_instructions() else None,
            # A build has a cache of its own and compiles two files: precompiling their headers takes longer.
            "aot_inductor.precompile_headers": False,
        }
        report(Fact("engine.compiling"), 0.1)
        with _paths_without_spaces(), _shared_libstdcxx(options), torch.no_grad(), warnings.catch_warnings():
            # torch uses features that it has deprecated.
            warnings.simplefilter("ignore", FutureWarning)
            try:
                compile_package(exported, folder / self.file_name, options)
            except PackageError as error:
                raise EngineError("engine.compiler_failed", error=str(error)) from error


def _described(exported: "torch.export.ExportedProgram") -> dict[str, tuple[str, list[int]]]:
    """Return the dtype and shape of every weight by its name in the program's state dict."""
    signature = exported.graph_signature
    names = [*signature.inputs_to_parameters.values(), *signature.inputs_to_buffers.values()]
    tensors = {name: exported.state_dict[name] for name in names}
    return {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()}


@contextlib.contextmanager
def _shared_libstdcxx(options: dict[str, Any]) -> Iterator[None]:
    """Link packages with the C++ library that PyTorch uses, also if the compiler links a static one by itself.

    A package with a C++ library of its own crashes when it is loaded: parts of both are mixed.

    Args:
        options: of Inductor; the library is added.
    """
    maps = Path("/proc/self/maps")
    loaded = {Path(line.split(maxsplit=5)[-1]) for line in maps.read_text().splitlines()} if maps.exists() else set()
    library = next((path for path in loaded if path.name.startswith("libstdc++.so")), None)
    if library is None:
        yield
        return
    # The linker takes from a static library what none before it has, and `-l:NAME` is the file of that name.
    options["aot_inductor.custom_op_libs"] = [":libstdc++.so.6"]
    folders = [str(library.parent), *filter(None, [os.environ.get("LIBRARY_PATH")])]
    with environment_variables({"LIBRARY_PATH": os.pathsep.join(folders)}):
        yield


@contextlib.contextmanager
def _paths_without_spaces() -> Iterator[None]:
    """Give Inductor paths without spaces to its cache and to torch: it does not quote paths in compiler commands."""
    from torch.utils import cpp_extension

    cache = inductor_cache()
    torch_folder = Path(cpp_extension.TORCH_LIB_PATH).parent
    if os.name == "nt" or not any(" " in str(path) for path in (cache, torch_folder)):
        yield
        return
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        links = {}
        for name, folder in (("cache", cache), ("torch", torch_folder)):
            links[name] = Path(short) / name
            links[name].symlink_to(folder)
        with (
            environment_variables({"TORCHINDUCTOR_CACHE_DIR": str(links["cache"])}),
            torch_found_in(links["torch"]),
        ):
            yield
