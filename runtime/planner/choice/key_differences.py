"""Differences of two engine keys: why an existing engine cannot be used for what a plan needs."""

from collections.abc import Iterator, Mapping

from runtime.core.facts import Fact
from runtime.core.plan import LatentSize
from runtime.core.request import SOUND_DECODERS
from runtime.planner.choice.engine_index import EngineKey, ShapeProfile, is_of_gpu

# The code of the difference between engines of other weights.
OTHER_WEIGHTS = "engine.differs_weights"
# At most this many of a CPU's instruction sets are named where they differ.
_MOST_NAMED = 3
_TITLES: Mapping[str, str] = {
    "cuda": "CUDA",
    "inductor": "Inductor",
    "onnx": "ONNX",
    "onnxruntime": "ONNX Runtime",
    "onnxruntime-openvino": "ONNX Runtime with OpenVINO",
    "openvino": "OpenVINO",
    "pytorch": "PyTorch",
    "tensorrt": "TensorRT",
    "tensorrt_rtx": "TensorRT for RTX",
    "torch": "PyTorch",
    "torch_tensorrt": "torch-tensorrt",
}
# The fields of a key in the order in which `misfit` names them.
_MISFITS: Mapping[str, str] = {
    "device": "engine.misfit_device",
    "system": "engine.misfit_system",
    "versions": "engine.misfit_versions",
    "architecture": "engine.misfit_architecture",
    "weights": "engine.misfit_weights",
    "export_revision": "engine.misfit_export",
    "precision": "engine.misfit_precision",
    "options": "engine.misfit_options",
    "profiles": "engine.misfit_sizes",
}


def differences(target: EngineKey, existing: EngineKey, scale: int = 1) -> list[Fact]:
    """Return the differences of an existing engine from the wanted one, a fact each.

    Args:
        scale: pixels per latent, for heights and widths in pixels.
    """
    return [
        *_differing_identity(target, existing),
        *_differing_build(target, existing, scale),
        *_differing_machine(target, existing),
    ]


def misfit(target: EngineKey, existing: EngineKey) -> Fact | None:
    """Return the most important difference in a few words; `None` if there is none.

    The order is by how hard a difference is to change: GPU, libraries, weights, sizes.
    """
    for name, code in _MISFITS.items():
        if getattr(target, name) != getattr(existing, name):
            return Fact(code)
    return None


def _differing_identity(target: EngineKey, existing: EngineKey) -> Iterator[Fact]:
    if target.program != existing.program:
        yield Fact("engine.differs_program", {"found": existing.program, "wanted": target.program})
    if target.family != existing.family:
        yield Fact("engine.differs_family", {"found": existing.family, "wanted": target.family})
    if target.architecture != existing.architecture:
        yield Fact("engine.differs_architecture")
    if target.weights != existing.weights:
        yield Fact(OTHER_WEIGHTS)
    if target.export_revision != existing.export_revision:
        yield Fact("engine.differs_export")


def _differing_build(target: EngineKey, existing: EngineKey, scale: int) -> Iterator[Fact]:
    if target.profiles != existing.profiles:
        sizes = {
            "found": _sizes(existing.program, existing.profiles, scale),
            "wanted": _sizes(target.program, target.profiles, scale),
        }
        yield Fact("engine.differs_sizes", sizes)
    if target.precision != existing.precision:
        yield Fact("engine.differs_precision", {"found": existing.precision, "wanted": target.precision})
    if (target.backend, target.builder) != (existing.backend, existing.builder):
        names = {"found": existing.builder, "backend": _title(existing.backend), "wanted": target.builder}
        yield Fact("engine.differs_builder", names)
    for name, new, old in _changed(target.options, existing.options):
        unset = Fact("engine.option_unset")
        data = {"option": name.replace("_", " "), "found": old or unset, "wanted": new or unset}
        yield Fact("engine.differs_option", data)


def _differing_machine(target: EngineKey, existing: EngineKey) -> Iterator[Fact]:
    for name, here, there in _changed(target.versions, existing.versions):
        package = _title(name)
        if there is None:
            yield Fact("engine.differs_new_package", {"package": package, "here": here})
        elif here is None:
            yield Fact("engine.differs_missing_package", {"package": package, "found": there})
        else:
            yield Fact("engine.differs_version", {"package": package, "found": there, "here": here})
    if target.device != existing.device:
        yield device_difference(existing.device, target.device)
    if target.system != existing.system:
        yield Fact("engine.differs_device", {"found": existing.system, "here": target.system})


def device_difference(there: str, here: str) -> Fact:
    """Return how a key's `device` differs from this machine's; CPUs differ by instruction sets."""
    (kind, *instructions), (kind_here, *instructions_here) = there.split() or [""], here.split() or [""]
    more = [name for name in instructions if name not in instructions_here]
    fewer = [name for name in instructions_here if name not in instructions]
    if is_of_gpu(there) or is_of_gpu(here) or kind != kind_here or not (more or fewer):
        there, here = (device if is_of_gpu(device) else device.partition(" ")[0] for device in (there, here))
        return Fact("engine.differs_device", {"found": there, "here": here})
    if not fewer:
        return Fact("engine.differs_more_instructions", {"more": _some(more)})
    if not more:
        return Fact("engine.differs_fewer_instructions", {"fewer": _some(fewer)})
    return Fact("engine.differs_instructions", {"more": _some(more), "fewer": _some(fewer)})


def _some(names: list[str]) -> Fact:
    more = len(names) - _MOST_NAMED
    if more > 0:
        return Fact("engine.names_and_more", {"names": names[:_MOST_NAMED], "more": more})
    return Fact("engine.names", {"names": names})


def _changed(
    target: tuple[tuple[str, str], ...], existing: tuple[tuple[str, str], ...]
) -> list[tuple[str, str | None, str | None]]:
    here, there = dict(target), dict(existing)
    return [
        (name, here.get(name), there.get(name)) for name in sorted(here | there) if here.get(name) != there.get(name)
    ]


def _title(name: str) -> str:
    return _TITLES.get(name, name)


def _sizes(program: str, profiles: tuple[ShapeProfile, ...], scale: int) -> list[Fact]:
    return [_size(program, profile, scale) for profile in profiles] or [Fact("engine.no_size")]


def _size(program: str, profile: ShapeProfile, scale: int) -> Fact:
    def size(latent: LatentSize) -> Fact:
        frames, height, width = latent
        if program in SOUND_DECODERS:
            return Fact("engine.sound_size", {"latents": frames})
        return Fact("engine.size", {"frames": frames, "height": height * scale, "width": width * scale})

    if profile.min == profile.max:
        return size(profile.min)
    return Fact("engine.range", {"low": size(profile.min), "high": size(profile.max)})
