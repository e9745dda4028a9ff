"""The parts of an engine's key: digests of architecture and weights, the device, and library versions.

Imports no torch. The digests of weights are stored, so a key takes milliseconds except for a model's first one with
weights.
"""

import ast
import functools
import hashlib
import json
import platform
import threading
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runtime.core.digests import file_digests
from runtime.core.errors import EngineError, ModelError
from runtime.core.plan import is_block_program
from runtime.machine.probe import Machine, gpu_index
from runtime.models.folder import read_config
from runtime.models.registry import FAMILIES, family_of
from runtime.models.spec import VAE_ENCODER, ModelSpec, folder_of, is_text_encoder, is_transformer
from runtime.models.vae_groups import CLIP_PROGRAM
from runtime.planner.choice.engine_index import EngineKey, is_of_gpu

# `EngineKey.export_revision` of imported engines: this program did not export them.
NOT_EXPORTED = 1
# Replaces the digests of a model that is not downloaded; no engine has it.
_NOT_DOWNLOADED = "not here"
# The entry of `EngineKey.options` for the most tokens in one call of a block engine, and its default.
TOKENS_OPTION = "tokens"
BLOCK_TOKENS = 8192
# Tokens of a sound of five seconds in the blocks of LTX-2: engines of its stream are optimized for about as many.
SOUND_TOKENS = 128
# Entries of config.json that do not affect the architecture.
_NOT_ARCHITECTURE = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version"})
# What the programs of block engines are made from, of those that a family has.
_OF_BLOCKS = (
    *("num_attention_heads", "attention_head_dim", "ffn_dim"),
    *("sound_heads", "sound_head_dim", "modulated_text", "gated", "splits_heads"),
)
# Modules beside this one with code that is exported.
_EXPORTED_MODULES = (
    "programs.py",
    "component_programs.py",
    "block_programs.py",
    "clip_layers.py",
    "signatures.py",
    "fp8.py",
    "tensorrt_operators.py",
)
_REVISION_LENGTH = 16
# Python 3.11 counts the depth of syntax trees for all threads together, and fails if two of them parse at once.
_PARSING = threading.Lock()


@functools.cache
def export_revision(family: str) -> str:
    """Return a digest of the code that exports a family's programs: changed code may export another computation.

    Comments, docstrings and formatting do not count.
    """
    modules = [path for name in (family, *family_of(family).shared_programs) for path in _program_modules(name)]
    digest = hashlib.sha256()
    for path in (*modules, *map(Path(__file__).with_name, _EXPORTED_MODULES)):
        digest.update(_code(path.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:_REVISION_LENGTH]


def _program_modules(family: str) -> list[Path]:
    """Return the modules of a family that define its programs; a small family may do that in components.py."""
    package = find_spec(FAMILIES[family].package)
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent
    return sorted(folder.glob("*programs.py")) or [folder / "components.py"]


def _code(source: str) -> str:
    """Return source code in a standard format, without comments and docstrings."""
    with _PARSING:
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def runnable_programs(spec: ModelSpec, component: str) -> tuple[str, ...]:
    """Return the programs that a component's engines may run: an imported VAE decoder may take whole clips."""
    programs = spec.programs[component]
    if is_transformer(component):
        return (*programs, *spec.block_programs)
    return programs if component != "vae" or CLIP_PROGRAM in programs else (*programs, CLIP_PROGRAM)


def program_key_parts(spec: ModelSpec, component: str, name: str, cache_dir: Path | None = None) -> tuple[str, str]:
    """Return `architecture_digest` and `weights_digest` of a program whose engine contains its weights."""
    return architecture_digest(spec, component, name), weights_digest(spec, component, cache_dir)


def architecture_digest(spec: ModelSpec, component: str, name: str) -> str:
    """Return the digest of a program's architecture (SHA-256); for a model that is not downloaded, one of no engine.

    A program of block engines is the same for all models of a family whose blocks have the same sizes.

    Args:
        component: the component that contains the weights.
        name: one of `runnable_programs`.
    """
    if not spec.is_downloaded:
        return _NOT_DOWNLOADED
    if is_block_program(name):
        sizes = (size for size in _OF_BLOCKS if hasattr(spec.transformer, size))
        relevant = {size: getattr(spec.transformer, size) for size in sizes}
    else:
        config = spec.files[component].config if component in spec.files else _config(spec, component)
        relevant = {
            key: value for key, value in config.items() if key not in _NOT_ARCHITECTURE and not key.startswith("_")
        }
    if is_text_encoder(name):
        relevant["max_sequence_length"] = spec.encoders[name].max_tokens
    if spec.image_input is not None and (name == "transformer" or component == VAE_ENCODER):
        # Not for models without images, whose keys stay as they are.
        relevant |= {"kind": spec.image_input.kind, "image_tokens": spec.image_input.tokens}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def weights_digest(spec: ModelSpec, component: str, cache_dir: Path | None = None) -> str:
    """Return the digest of a component's weights and LoRAs (SHA-256); of a model not downloaded, one of no engine.

    Args:
        cache_dir: folder that stores the digests of weight files, see `file_digests`.

    Raises:
        ModelError: if a file cannot be read.
    """
    if not spec.is_downloaded:
        return _NOT_DOWNLOADED
    try:
        digests = file_digests(spec.weight_paths(component), cache_dir)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError("engine.weights_unreadable", folder=spec.directory, error=reason) from error
    weights = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    if spec.loras_of(component):
        added = "\n".join(use.identity for use in spec.loras_of(component))
        weights = hashlib.sha256(f"{weights}\n{added}".encode()).hexdigest()
    return weights


def tokens_of(key: EngineKey) -> int:
    """Return the most tokens in one call of a block engine."""
    return int(dict(key.options).get(TOKENS_OPTION, BLOCK_TOKENS))


def imported_key(
    key: EngineKey, spec: ModelSpec, component: str, machine: Machine, device: str, cache_dir: Path | None
) -> EngineKey:
    """Return `key` with the current architecture, weights, library versions and device.

    An imported engine can be used if its own key equals the result. Its weights are those of the model that it was
    compared with when it was imported.

    Raises:
        TandemError: if the model's files or the device cannot be read.
    """
    architecture, weights = program_key_parts(spec, component, key.program, cache_dir)
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
        return " ".join([platform.machine(), *machine.cpu_instructions])
    index = gpu_index(device)
    if index >= len(machine.gpus):
        raise EngineError("engine.no_such_gpu", device=device)
    gpu = machine.gpus[index]
    major, minor = gpu.capability
    return f"{gpu.name} sm{major}{minor} CUDA {machine.torch_cuda or 'none'}"


def device_like(key_device: str, machine: Machine) -> str:
    """Return "cuda:0" if a key's `device` is a GPU and this machine has one, else "cpu"."""
    return "cuda:0" if is_of_gpu(key_device) and machine.gpus else "cpu"


def versions_of(*packages: str) -> tuple[tuple[str, str], ...]:
    """Return (package, version) of the installed packages, without local version labels ("+cpu")."""
    versions = ((package, _version(package)) for package in packages)
    return tuple(sorted((package, number) for package, number in versions if number is not None))


@functools.cache
def _version(package: str) -> str | None:
    # Reading metadata takes milliseconds, and a plan reads tens of versions.
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def _config(spec: ModelSpec, component: str) -> dict[str, Any]:
    return read_config(spec.directory / folder_of(component) / "config.json")
