"""Whether a machine has room at all to build an engine, or to load a model. Pure."""

from collections.abc import Mapping

from runtime.core.units import byte_size
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner.constraints import COMPONENT_TITLES, Conflict


def no_room(ram_bytes: int, vram_bytes: int, disk_bytes: int, machine: Machine) -> Conflict | None:
    """Return why this machine has no room for a build, whatever else is closed; `None` if it has, or needs none.

    Args:
        ram_bytes, vram_bytes, disk_bytes: what building takes at its peak.
    """
    for what, needed, there, verb, remedy in (
        (
            "disk",
            disk_bytes,
            disk_bytes if machine.disk_free_bytes is None else machine.disk_free_bytes,
            "are free",
            "Free some space, or set TENSORRT_CACHE_DIR to a folder on a larger disk.",
        ),
        ("memory", ram_bytes, machine.ram_bytes + machine.swap_bytes, "are there", "Take a smaller model or size."),
        (
            "video memory",
            vram_bytes,
            machine.gpus[0].total_bytes if machine.gpus else 0,
            "are there",
            "Take a smaller model or size.",
        ),
    ):
        if needed > there:
            return Conflict(
                f"too little {what} to build",
                f"building needs about {byte_size(needed)} of {what} and {byte_size(there)} {verb}",
                remedy,
            )
    return None


def no_ram(spec: ModelSpec, weights: Mapping[str, int], machine: Machine) -> Conflict | None:
    """Return why a model cannot even be loaded: each part passes through memory whole on its way to the GPU.

    Args:
        weights: bytes of each component that is loaded so; quantized ones and engines are not.
    """
    if not weights:
        return None
    largest = max(weights, key=lambda name: weights[name])
    there = machine.ram_bytes + machine.swap_bytes
    if weights[largest] <= there:
        return None
    return Conflict(
        "too little memory to load",
        f"loading the {COMPONENT_TITLES[largest]} of {spec.title} needs {byte_size(weights[largest])} of memory, "
        f"and there are {byte_size(there)} with swap",
        "Take a smaller model, or add memory or swap.",
    )
