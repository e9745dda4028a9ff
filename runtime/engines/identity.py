"""Computes the parts of an engine's key: digests of architecture and weights, the device, and library versions.

Imports no torch. A key takes milliseconds once a model's weights have been hashed.
"""

import ast
import functools
import hashlib
import json
import platform
import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runtime.core.errors import EngineError, ModelError
from runtime.engines.manifest import sha256
from runtime.machine.probe import Machine, gpu_index
from runtime.models.registry import FAMILIES
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import EngineKey, is_of_gpu

# `EngineKey.export_revision` of imported engines, whose program was not exported here.
NOT_EXPORTED = 1
# The digest of a model that is not downloaded: no engine has it.
_NOT_DOWNLOADED = "not here"
# Decodes a whole clip in one call.
CLIP_PROGRAM = "vae_clip"
_NOT_ARCHITECTURE = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version"})
_DIGESTS = "weights.json"
_REVISION_LENGTH = 16
# The CPU features by which compilers and libraries choose kernels.
_INSTRUCTIONS = re.compile(r"(avx|amx|fma|f16c|bmi|sse4|asimd|sve|bf16|i8mm)\w*")


@functools.cache
def export_revision(family: str) -> str:
    """Return a digest of the code that exports a family's programs: other code may compute something else.

    Comments, docstrings and formatting do not count.
    """
    package = find_spec(FAMILIES[family].package)
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent
    # A small family may define its programs in components.py.
    own = next(path for path in (folder / "programs.py", folder / "components.py") if path.is_file())
    digest = hashlib.sha256()
    for path in (own, Path(__file__).with_name("programs.py")):
        digest.update(_code(path.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:_REVISION_LENGTH]


def _code(source: str) -> str:
    """Return source code in a standard format, without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def runnable_programs(spec: ModelSpec, component: str) -> tuple[str, ...]:
    """Return the programs that a component's engines may run: an imported VAE decoder may take whole clips."""
    own = spec.programs[component]
    return own if component != "vae" or CLIP_PROGRAM in own else (*own, CLIP_PROGRAM)


def program_key_parts(spec: ModelSpec, component: str, name: str, notes: Path | None = None) -> tuple[str, str]:
    """Return the SHA-256 of a program's architecture and of its weights, with the spec's LoRAs.

    For a model that is not downloaded both are values that no engine has.

    Args:
        component: whose weights.
        name: one of `runnable_programs`.
        notes: a folder that stores the weights' digests, so that a file is read once as long as its path, size and
            time do not change.

    Raises:
        ModelError: if a file cannot be read.
    """
    if not spec.is_downloaded:
        return _NOT_DOWNLOADED, _NOT_DOWNLOADED
    config = json.loads((spec.directory / component / "config.json").read_text(encoding="utf-8"))
    shaping = {key: value for key, value in config.items() if key not in _NOT_ARCHITECTURE and not key.startswith("_")}
    if name == "text_encoder":
        shaping["max_sequence_length"] = spec.max_sequence_length
    architecture = hashlib.sha256(json.dumps(shaping, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    weights = _weights_digest(spec.directory / component, notes)
    if spec.loras_of(component):
        added = "\n".join(use.identity for use in spec.loras_of(component))
        weights = hashlib.sha256(f"{weights}\n{added}".encode()).hexdigest()
    return architecture, weights


def imported_key(
    key: EngineKey, spec: ModelSpec, component: str, machine: Machine, device: str, notes: Path | None
) -> EngineKey:
    """Return the key that an imported engine must have to replace a component on this machine now.

    Sizes, precision and adapters are those of the file. The weights are those that it was compared with.

    Raises:
        TandemError: if the model's files or the device cannot be read.
    """
    architecture, weights = program_key_parts(spec, component, key.program, notes)
    return replace(
        key,
        architecture=architecture,
        weights=weights,
        versions=versions_of(*(name for name, _ in key.versions)),
        device=device_text(machine, device),
        system=machine.system,
    )


def device_text(machine: Machine, device: str) -> str:
    """Return the properties of a device ("cpu", "cuda", "cuda:1") that an engine depends on.

    Raises:
        EngineError: if the machine has no such GPU.
    """
    if device == "cpu":
        return " ".join([platform.machine(), *cpu_instructions()])
    index = gpu_index(device)
    if index >= len(machine.gpus):
        raise EngineError("engine.no_such_gpu", device=device)
    gpu = machine.gpus[index]
    major, minor = gpu.capability
    return f"{gpu.name} sm{major}{minor} CUDA {machine.torch_cuda or 'none'}"


def device_like(key_device: str, machine: Machine) -> str:
    """Return this machine's device of the kind of a key's `device`: "cuda:0" or "cpu"."""
    return "cuda:0" if is_of_gpu(key_device) and machine.gpus else "cpu"


def cpu_instructions() -> list[str]:
    """Return the CPU's instruction sets that matter for arithmetic, sorted; empty where the system lists none."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return []
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
    return sorted(flag for flag in flags.group(1).split() if _INSTRUCTIONS.fullmatch(flag)) if flags else []


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU has bfloat16 instructions; without them, bfloat16 is slower than float32."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpu_instructions())


def versions_of(*packages: str) -> tuple[tuple[str, str], ...]:
    """Return (package, version) of the installed packages, without local version labels ("+cpu")."""
    found = ((package, _version(package)) for package in packages)
    return tuple(sorted((package, number) for package, number in found if number is not None))


@functools.cache
def _version(package: str) -> str | None:
    # Reading metadata takes milliseconds, and a plan reads tens of versions.
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def _weights_digest(folder: Path, notes: Path | None) -> str:
    paths = sorted(folder.glob("*.safetensors"))
    try:
        stamps = {str(path.resolve()): [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
        known = _read_notes(notes)
        digests = []
        for name, stamp in stamps.items():
            noted = known.get(name)
            if not (isinstance(noted, list) and noted[:2] == stamp and len(noted) == 3 and isinstance(noted[2], str)):  # noqa: PLR2004 - size, time, digest
                known[name] = noted = [*stamp, sha256(Path(name))]
            digests.append(noted[2])
        _write_notes(notes, known)
    except OSError as error:
        raise ModelError("engine.weights_unreadable", folder=folder, error=error.strerror or str(error)) from error
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _read_notes(folder: Path | None) -> dict[str, Any]:
    try:
        value = json.loads((folder / _DIGESTS).read_text(encoding="utf-8")) if folder is not None else {}
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write_notes(folder: Path | None, known: dict[str, Any]) -> None:
    if folder is None or _read_notes(folder) == known:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{_DIGESTS}.{platform.node()}.{id(known)}"
        new.write_text(json.dumps(known), encoding="utf-8")
        new.replace(folder / _DIGESTS)
    except OSError:
        # Stored digests only save time.
        return
