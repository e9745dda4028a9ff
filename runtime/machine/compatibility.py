"""What this machine's GPU, driver and packages cannot do, as facts with remedies."""

from collections.abc import Mapping

from runtime.core.facts import Fact
from runtime.machine.probe import Machine

# CUDA 13 has no kernels for GPUs below 7.5; CUDA 12.8 is the first with kernels for Blackwell (10.0 and above).
_CUDA_13_CAPABILITY = (7, 5)
_BLACKWELL, _FIRST_FOR_BLACKWELL = (10, 0), (12, 8)
# TensorRT for RTX 1.7: these, and 12.0 and newer; not 9.0 and 10.x. From the support matrix,
# https://docs.nvidia.com/deeplearning/tensorrt-rtx/latest/getting-started/support-matrix.html, and the library's error.
_RTX_CAPABILITIES = frozenset({(7, 5), (8, 0), (8, 6), (8, 9)})
_FIRST_NEWER_RTX = (12, 0)
# Oldest driver for each major version of CUDA, https://docs.nvidia.com/deploy/cuda-compatibility: a driver supports all
# of a major version and older ones.
_LEAST_DRIVER: Mapping[int, str] = {11: "450", 12: "525", 13: "580"}


def cuda_problem(machine: Machine) -> Fact | None:
    """Return why PyTorch cannot use the machine's NVIDIA GPU, `None` if it can."""
    if not machine.gpus:
        return machine.gpu_problem or Fact("machine.no_gpu")
    gpu = machine.gpus[0]
    if machine.torch_cuda is None:
        return Fact("machine.torch_without_cuda", {"torch": machine.torch_version})
    built_with = version_numbers(machine.torch_cuda)
    if machine.driver_cuda is not None and machine.driver_cuda[0] < built_with[0]:
        runs = ".".join(map(str, machine.driver_cuda))
        least = _LEAST_DRIVER.get(built_with[0], "the newest")
        data = {"driver": gpu.driver, "runs": runs, "needs": machine.torch_cuda, "least": least}
        return Fact("machine.driver_too_old", data)
    if built_with >= (13,) and gpu.capability < _CUDA_13_CAPABILITY:
        return Fact("machine.gpu_too_old", {"cuda": machine.torch_cuda, "gpu": gpu.name})
    if built_with < _FIRST_FOR_BLACKWELL and gpu.capability >= _BLACKWELL:
        return Fact("machine.gpu_too_new", {"cuda": machine.torch_cuda, "gpu": gpu.name})
    return None


def version_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version: (13, 0) for "13.0"."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def torch_tensorrt_problem(machine: Machine) -> Fact | None:
    """Return why torch-tensorrt does not work with this PyTorch, `None` if it does: each release needs one version."""
    installed, torch_version = machine.version_of("torch-tensorrt") or "", machine.torch_version or ""
    if installed.split(".")[:2] != torch_version.split(".")[:2]:
        return Fact("machine.torch_tensorrt_mismatch", {"installed": installed, "torch": torch_version})
    return None


def tensorrt_rtx_problem(machine: Machine) -> Fact | None:
    """Return why TensorRT for RTX does not support the machine's GPU, `None` if it does or there is none."""
    gpu = machine.gpus[0] if machine.gpus else None
    if gpu is None or gpu.capability in _RTX_CAPABILITIES or gpu.capability >= _FIRST_NEWER_RTX:
        return None
    return Fact("machine.tensorrt_rtx_without_gpu", {"gpu": gpu.name, "capability": "{}.{}".format(*gpu.capability)})


def compiler_problem(machine: Machine) -> Fact | None:
    """Return why Inductor cannot compile for a CPU: no C++ compiler was found; `None` if there is one."""
    if machine.compiler is not None:
        return None
    codes = {"Windows": "machine.no_compiler_windows", "Darwin": "machine.no_compiler_macos"}
    return Fact(codes.get(machine.system.partition(" ")[0], "machine.no_compiler"))
