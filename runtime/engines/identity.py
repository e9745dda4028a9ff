"""What a program is made from, without loading it: architecture and weights by their digests, device and versions.

Imports no torch: the key of a wanted engine is known in milliseconds, once a model's weights have been read through.
"""

import functools
import hashlib
import json
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from runtime.core.errors import EngineError, ModelError
from runtime.machine.probe import Machine, gpu_index
from runtime.models.spec import ModelSpec
from runtime.planner.engine_index import is_of_gpu

# Raised whenever a form or the way it is exported changes, so that older engines are built anew.
EXPORT_REVISION = 1
# What a model whose weights are not here has for digests: no engine has them.
_NOT_HERE = "not here"
# Decodes a whole clip in one call.
CLIP_PROGRAM = "vae_clip"
_READ_BYTES = 1 << 22
_NOT_ARCHITECTURE = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version"})
_DIGESTS = "weights.json"
# What compilers and kernels choose by.
_INSTRUCTIONS = re.compile(r"(avx|amx|fma|f16c|bmi|sse4|asimd|sve|bf16|i8mm)\w*")


def runnable_programs(spec: ModelSpec, component: str) -> tuple[str, ...]:
    """Return the programs that a component's engines may run: an imported VAE decoder may take whole clips."""
    own = spec.programs[component]
    return own if component != "vae" or CLIP_PROGRAM in own else (*own, CLIP_PROGRAM)


def program_key_parts(spec: ModelSpec, component: str, name: str, notes: Path | None = None) -> tuple[str, str]:
    """Return the sha256 of the architecture and of the weights of a program, which no engine equals if it is not here.

    The weights are those with the spec's LoRAs.

    Args:
        component: whose weights.
        name: one of `runnable_programs`.
        notes: a folder in which the weights' digests are noted, so that a file that has not changed (by path, size
            and time) is read through once.

    Raises:
        ModelError: if a file cannot be read.
    """
    if not spec.here:
        return _NOT_HERE, _NOT_HERE
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


def device_text(machine: Machine, device: str) -> str:
    """Return what an engine built for `device` ("cpu", "cuda", "cuda:1") depends on there.

    Raises:
        EngineError: if the machine has no such GPU.
    """
    if device == "cpu":
        return " ".join([platform.machine(), *cpu_instructions()])
    index = gpu_index(device)
    if index >= len(machine.gpus):
        raise EngineError(f"There is no GPU {device} here.", "Choose a device that `doctor` lists.")
    gpu = machine.gpus[index]
    major, minor = gpu.capability
    return f"{gpu.name} sm{major}{minor} CUDA {machine.torch_cuda or 'none'}"


def device_like(there: str, machine: Machine) -> str:
    """Return the device here that is of the kind of a key's `device`: "cuda:0" or "cpu"."""
    return "cuda:0" if is_of_gpu(there) and machine.gpus else "cpu"


def cpu_instructions() -> list[str]:
    """Return the CPU's instruction sets that matter for arithmetic, sorted; empty where the system does not say."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return []
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
    return sorted(flag for flag in flags.group(1).split() if _INSTRUCTIONS.fullmatch(flag)) if flags else []


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; without, it is slower than float32."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpu_instructions())


def versions_of(*packages: str) -> tuple[tuple[str, str], ...]:
    """Return (package, version) of those that are installed, without what names a build ("+cpu")."""
    found = ((package, _version(package)) for package in packages)
    return tuple(sorted((package, number) for package, number in found if number is not None))


@functools.cache
def _version(package: str) -> str | None:
    # Reading metadata takes milliseconds, and a plan asks for tens of versions.
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
                known[name] = noted = [*stamp, _sha256(Path(name))]
            digests.append(noted[2])
        _write_notes(notes, known)
    except OSError as error:
        raise ModelError(
            f"The weights in {folder} cannot be read: {error.strerror}.", "Check the folder and its permissions."
        ) from error
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


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
        # Notes save time, nothing else.
        return
