"""Optional packages that make Tandem faster or reduce its memory: installed versions, and import problems.

Versions come from metadata. Only `doctor` imports packages, in a child process: an import takes seconds and may crash.
"""

import functools
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from runtime.core.errors import first_line
from runtime.core.facts import Fact

_IMPORT_SECONDS = 120
_LONGEST_LINE = 200
# Of what an import prints, the end that is read.
_TAIL_BYTES = 10_000


@dataclass(frozen=True)
class Package:
    """One package.

    Attributes:
        name: in `Machine.packages`.
        title: name for display.
        distributions: names of its releases; at most one is installed.
        module: the module to import.
        use: its purpose, a clause.
        needs_gpu: whether it is useful on NVIDIA GPUs only.
        installed_by_us: whether the installer installs it on machines where it is useful.
    """

    name: str
    title: str
    distributions: tuple[str, ...]
    module: str
    use: str
    needs_gpu: bool = True
    installed_by_us: bool = False


# TensorRT's releases have a name per CUDA version, which "tensorrt" selects; ONNX Runtime's have one per execution
# provider.
PACKAGES = (
    Package(
        "tensorrt",
        "TensorRT",
        ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
        "tensorrt",
        "TensorRT engines",
        installed_by_us=True,
    ),
    Package(
        "torch-tensorrt",
        "torch-tensorrt",
        ("torch-tensorrt",),
        "torch_tensorrt",
        "TensorRT engines built straight from PyTorch",
        installed_by_us=True,
    ),
    Package(
        "tensorrt-rtx",
        "TensorRT for RTX",
        ("tensorrt-rtx-cu13-bindings",),
        "tensorrt_rtx_bindings",
        "TensorRT engines on GeForce and RTX GPUs",
        installed_by_us=True,
    ),
    Package("onnx", "ONNX", ("onnx",), "onnx", "exporting engines", needs_gpu=False, installed_by_us=True),
    Package(
        "onnxscript", "ONNX Script", ("onnxscript",), "onnxscript", "exporting engines", needs_gpu=False,
        installed_by_us=True,
    ),
    Package(
        "onnxruntime",
        "ONNX Runtime",
        ("onnxruntime-openvino", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime"),
        "onnxruntime",
        "ONNX Runtime engines",
        needs_gpu=False,
        installed_by_us=True,
    ),
    Package(
        "openvino", "OpenVINO", ("onnxruntime-openvino",), "onnxruntime", "ONNX Runtime engines on x86 CPUs",
        needs_gpu=False,
    ),
    Package(
        "onnxruntime-gpu", "ONNX Runtime for CUDA", ("onnxruntime-gpu",), "onnxruntime",
        "ONNX Runtime engines on a GPU", needs_gpu=False,
    ),
    Package("triton", "Triton", ("triton", "triton-windows"), "triton", "Inductor engines on a GPU"),
    Package("bitsandbytes", "bitsandbytes", ("bitsandbytes",), "bitsandbytes", "8-bit and 4-bit weights"),
    Package("torchao", "torchao", ("torchao",), "torchao", "FP8 weights"),
    Package("flash-attn", "FlashAttention", ("flash-attn",), "flash_attn", "faster attention by it"),
    Package("flash-attn-3", "FlashAttention 3", ("flash-attn-3",), "flash_attn_interface", "faster attention by it"),
    Package("flash-attn-4", "FlashAttention 4", ("flash-attn-4",), "flash_attn.cute", "faster attention by it"),
    Package(
        "nvidia-cudnn-frontend", "cuDNN frontend", ("nvidia-cudnn-frontend",), "cudnn", "attention in FP8",
    ),
    Package("sageattention", "SageAttention", ("sageattention",), "sageattention", "faster attention by it"),
    Package("comfy-kitchen", "Comfy Kitchen", ("comfy-kitchen",), "comfy_kitchen", "sparse attention, INT8"),
)  # fmt: skip


@functools.cache
def installed_versions() -> tuple[tuple[str, str], ...]:
    """Return (name, version) of the installed packages, without importing them."""
    versions = ((package.name, installed_as(package)) for package in PACKAGES)
    return tuple((name, installed[1]) for name, installed in versions if installed is not None)


def installed_as(package: Package) -> tuple[str, str] | None:
    """Return the name and version of a package's installed distribution, `None` if there is none."""
    for distribution in package.distributions:
        try:
            return distribution, version(distribution)
        except PackageNotFoundError:
            continue
    return None


def import_problem(package: Package, seconds: float = _IMPORT_SECONDS) -> Fact | None:
    """Import a package in a child process and return why it cannot be imported, `None` if it can."""
    # A file, not a pipe: a program that the package starts may keep a pipe open after the child has ended.
    with tempfile.TemporaryFile() as messages:
        try:
            child = subprocess.run(
                [sys.executable, "-c", f"import {package.module}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=messages,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Fact("package.import_slow", {"seconds": seconds})
        except OSError as error:
            return Fact("package.no_process", {"error": first_line(error)})
        messages.seek(max(messages.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
        lines = messages.read().decode(errors="replace").strip().splitlines()
    if child.returncode == 0:
        return None
    if child.returncode < 0:
        return Fact("package.import_crashed", {"signal": -child.returncode})
    if not lines:
        return Fact("package.import_ended", {"exit_code": child.returncode})
    return Fact("package.import_failed", {"error": lines[-1][:_LONGEST_LINE].rstrip(".")})
