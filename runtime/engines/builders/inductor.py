"""Builds Inductor packages: C++ (CPU) or Triton kernels (CUDA), compiled ahead of time into a library.

On a CPU the library names its weights but does not hold them: they are handed over when it is loaded, so both experts
run on one package, at the same speed. The exception is the VAE's recurrent step for one size: Inductor lays its
convolutions' weights out anew ("freezing"), which makes it a tenth faster in bfloat16 and a sixth in float32, and keeps
them. With dynamic sizes, or 2D convolutions, that gives wrong results in bfloat16 (torch 2.13).

On a GPU every library holds its own weights: one whose weights were exchanged for the other expert's gave wrong latents
(torch 2.11 on an H200: right for the first expert, 50 % off after ten steps of the second).
"""

import contextlib
import json
import os
import platform
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from runtime.core.errors import EngineError
from runtime.engines.builders import BuildNeeds, Report
from runtime.engines.builders.base import KeyedBuilder, weights_bytes
from runtime.engines.identity import cpu_has_bfloat16
from runtime.engines.io_signature import METADATA_KEY, WEIGHTS_KEY
from runtime.machine.probe import Machine, cpp_compiler
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import SWAPPED, EngineKey
from runtime.planner.shapes import ShapeProfile

if TYPE_CHECKING:
    import torch

    from runtime.engines.programs import Program

_GIB = 1 << 30
# torch, the compiler's processes.
_BASE_RAM = 2 * _GIB
_BASE_DISK = _GIB // 2
_GCC = 12


@dataclass(frozen=True)
class InductorBuilder(KeyedBuilder):
    """See `Builder`."""

    name: ClassVar[str] = "inductor"
    backend: ClassVar[str] = "inductor"
    file_name: ClassVar[str] = "engine.pt2"

    def default_precision(self, program: str, machine: Machine, device: str) -> str:
        """Return the fastest precision in which a program keeps its quality.

        On a CPU the VAE runs in bfloat16 where the CPU multiplies it, which changes frames by less than what 8-bit
        colour does (57 dB), and everything else in float32: twenty steps add up what a transformer's rounding changes
        (41 dB in bfloat16, measured on the shipped model). On a GPU the same holds but for models that are trained
        in bfloat16 and would not fit otherwise.
        """
        if device == "cpu":
            return "bfloat16" if program.startswith("vae") and cpu_has_bfloat16() else "float32"
        return "float32" if program.startswith("vae") else "bfloat16"

    def keeps_weights(self, program: str, profiles: tuple[ShapeProfile, ...], device: str) -> bool:
        """See `KeyedBuilder`."""
        frozen = program == "vae_next" and all(profile.min == profile.max for profile in profiles)
        return frozen or device != "cpu"

    def packages(self, device: str) -> tuple[str, ...]:
        """See `KeyedBuilder`."""
        return ("torch",) if device == "cpu" else ("torch", "triton")

    def needs(self, spec: ModelSpec, program: str, profile: ShapeProfile) -> BuildNeeds:
        """See `Builder`."""
        weights = weights_bytes(spec, program, "float32")
        # Tracing copies nothing; freezing lays the VAE's weights out anew, and the package holds them twice while it
        # is linked.
        copies = 3 if program.startswith("vae") else 1
        return BuildNeeds(ram_bytes=_BASE_RAM + copies * weights, disk_bytes=_BASE_DISK + copies * weights)

    def build(self, program: "Program", key: EngineKey, folder: Path, report: Report) -> None:
        """Write `folder/engine.pt2`.

        Raises:
            EngineError: if the compiler fails.
        """
        import torch
        from torch._inductor.exc import CppCompileError, InductorError

        (profile,) = key.profiles
        on_cpu = program.device.type == "cpu"
        report("Exporting", 0.0)
        exported = program.export(profile, cut=on_cpu)
        edges = program.edges(profile, program.example(profile, cut=on_cpu))
        weights = {} if key.weights != SWAPPED else _described(exported)
        options: dict[str, Any] = {
            "aot_inductor.metadata": {METADATA_KEY: edges.to_text(), WEIGHTS_KEY: json.dumps(weights)},
            "aot_inductor.package_constants_in_so": key.weights != SWAPPED,
            "freezing": on_cpu and key.weights != SWAPPED,
            # As many threads as the process has when it runs, not as it had here.
            "cpp.dynamic_threads": True,
            # Inductor tries each set of vector instructions out, for every package: half of the time of a small one.
            "cpp.vec_isa_ok": True if _knows_vector_instructions() else None,
        }
        report("Compiling", 0.1)
        with _paths_without_spaces(), torch.no_grad(), warnings.catch_warnings():
            # torch's own: it still uses what it has deprecated.
            warnings.simplefilter("ignore", FutureWarning)
            try:
                torch._inductor.aoti_compile_and_package(
                    exported, package_path=str(folder / self.file_name), inductor_configs=options
                )
            except (CppCompileError, InductorError) as error:
                raise EngineError(
                    f"The C++ compiler failed: {str(error).strip().splitlines()[-1]}.",
                    "The log has its messages. PyTorch runs meanwhile.",
                ) from error


def _described(exported: "torch.export.ExportedProgram") -> dict[str, tuple[str, list[int]]]:
    """Return the dtype and shape of every weight by its name in the program's state dict."""
    signature = exported.graph_signature
    names = [*signature.inputs_to_parameters.values(), *signature.inputs_to_buffers.values()]
    tensors = {name: exported.state_dict[name] for name in names}
    return {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()}


def _knows_vector_instructions() -> bool:
    """Whether the compiler is a GCC that knows all that Inductor asks for where the processor has it (AMX: GCC 11)."""
    compiler = cpp_compiler()
    if compiler is None or platform.system() != "Linux":
        return False
    asked = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, check=False)
    major = asked.stdout.partition(".")[0]
    return major.isdecimal() and int(major) >= _GCC


@contextlib.contextmanager
def _paths_without_spaces() -> Iterator[None]:
    """Show Inductor its cache and torch under paths without spaces: its compiler commands would fall apart."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.utils import cpp_extension

    cache = Path(cache_dir())
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
            mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(links["cache"])}),
            mock.patch.object(cpp_extension, "_TORCH_PATH", str(links["torch"])),
            mock.patch.object(cpp_extension, "TORCH_LIB_PATH", str(links["torch"] / "lib")),
        ):
            yield
