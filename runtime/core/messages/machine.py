"""Messages of `runtime.machine`."""

from collections.abc import Mapping

from runtime.core.messages import Message

_OTHER_BACKEND = "Choose another backend; the component runs in PyTorch until then."
_INSTALL = "Run install.sh (install.bat on Windows) again: it installs requirements-gpu.txt if there is a GPU."
_INSTALL_CPU = "Run install.sh (install.bat on Windows)."
_COMPILER = "There is no C++ compiler."

MESSAGES: Mapping[str, Message] = {
    "machine.no_gpu": Message("No NVIDIA GPU was found.", _OTHER_BACKEND),
    "machine.gpu_unreadable": Message("{problem}.", "Install or update the NVIDIA driver, then restart."),
    "machine.torch_without_cuda": Message("This PyTorch ({torch}) is built without CUDA.", _INSTALL),
    "machine.driver_too_old": Message(
        "The NVIDIA driver {driver} is too old: it supports CUDA {runs}, and PyTorch needs {needs}.",
        "Update the NVIDIA driver to {least} or later, then restart.",
    ),
    "machine.gpu_too_old": Message(
        "This PyTorch (CUDA {cuda}) has no kernels for {gpu}.", "Install PyTorch built for CUDA 12."
    ),
    "machine.gpu_too_new": Message(
        "This PyTorch (CUDA {cuda}) has no kernels for {gpu}.", "Install PyTorch built for CUDA 12.8 or later."
    ),
    "machine.no_torch": Message("PyTorch is not installed.", _INSTALL_CPU),
    "machine.no_compiler": Message(_COMPILER, "Install g++ with the system's package manager."),
    "machine.no_compiler_macos": Message(_COMPILER, "Run `xcode-select --install`."),
    "machine.no_compiler_windows": Message(
        _COMPILER, "Install the Visual Studio Build Tools with C++, and start Tandem from their prompt."
    ),
    "machine.no_onnxruntime": Message("ONNX Runtime is not installed.", _INSTALL_CPU),
    "machine.no_tensorrt": Message("TensorRT is not installed.", _INSTALL),
    "machine.no_torch_tensorrt": Message("torch-tensorrt is not installed.", _INSTALL),
    "machine.torch_tensorrt_unfit": Message(
        "torch-tensorrt {installed} is not compatible with PyTorch {torch}.", _INSTALL
    ),
    "machine.tensorrt_without_gpu": Message("TensorRT does not support {gpu}.", _OTHER_BACKEND),
    "machine.no_bitsandbytes": Message("bitsandbytes is not installed.", _INSTALL),
    "machine.no_torchao": Message("torchao is not installed.", _INSTALL),
    "machine.gpu_without_fp8": Message("The {gpu} does not support FP8.", "Use {set[quantization=bnb-8bit]}."),
    "machine.run_installer": Message(_INSTALL),
    "machine.no_triton": Message("The package triton is not installed.", "Install it, or use {set[compile=never]}."),
}
