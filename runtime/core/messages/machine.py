"""Messages of `runtime.machine`."""

from collections.abc import Mapping

from runtime.core.messages.message import Message

_OTHER_BACKEND = "Choose another backend. Until then, the component runs in PyTorch."
_RUN_INSTALLER_ON_GPU = "Run `{installer} doctor`. If there is a GPU, it installs requirements-gpu.txt."
_RUN_INSTALLER = "Run `{installer} doctor`."
_NO_COMPILER = "No C++ compiler was found."

_MACHINE: Mapping[str, Message] = {
    "machine.no_gpu": Message("No NVIDIA GPU was found.", _OTHER_BACKEND),
    "machine.no_nvml": Message("nvidia-ml-py is not installed, so NVIDIA GPUs cannot be detected.", _RUN_INSTALLER),
    "machine.driver_failed": Message(
        "The NVIDIA driver is not responding ({error}).", "Install or update the NVIDIA driver, then restart."
    ),
    "machine.torch_without_cuda": Message("This PyTorch ({torch}) is built without CUDA.", _RUN_INSTALLER_ON_GPU),
    "machine.driver_too_old": Message(
        "The NVIDIA driver {driver} is too old: it supports CUDA {runs}, but PyTorch needs {needs}.",
        "Update the NVIDIA driver to {least} or later, then restart.",
    ),
    "machine.gpu_too_old": Message(
        "This PyTorch (CUDA {cuda}) has no kernels for {gpu}.", "Install PyTorch built for CUDA 12."
    ),
    "machine.gpu_too_new": Message(
        "This PyTorch (CUDA {cuda}) has no kernels for {gpu}.", "Install PyTorch built for CUDA 12.8 or later."
    ),
    "machine.no_compiler": Message(_NO_COMPILER, "Install g++ with the system's package manager."),
    "machine.no_compiler_macos": Message(_NO_COMPILER, "Run `xcode-select --install`."),
    "machine.no_compiler_windows": Message(
        _NO_COMPILER,
        "Install the Visual Studio Build Tools with C++, and start Tandem from a Developer Command Prompt.",
    ),
    "machine.package_missing": Message("{package} is not installed.", _RUN_INSTALLER),
    "machine.gpu_package_missing": Message("{package} is not installed.", _RUN_INSTALLER_ON_GPU),
    "machine.torch_tensorrt_mismatch": Message(
        "torch-tensorrt {installed} is not compatible with PyTorch {torch}.", _RUN_INSTALLER_ON_GPU
    ),
    "machine.tensorrt_without_gpu": Message("TensorRT does not support {gpu}.", _OTHER_BACKEND),
    "machine.tensorrt_rtx_without_gpu": Message(
        "TensorRT for RTX does not support {gpu} (compute capability {capability}), only 7.5, 8.0, 8.6, 8.9, 12.0 and "
        "newer.",
        "Choose another backend, such as TensorRT. Until then, the component runs in PyTorch.",
    ),
    "machine.tensorrt_rtx_blocks_only": Message(
        "On {gpu}, TensorRT for RTX runs block engines only: it has no float32 or bfloat16 there.", _OTHER_BACKEND
    ),
    "machine.gpu_without_fp8": Message("The {gpu} does not support FP8.", "Use {set[quantization=bnb-8bit]}."),
    "machine.no_triton": Message(
        "Triton is not installed.", "Install the package triton, or use {set[compile=never]}."
    ),
}

_PACKAGES: Mapping[str, Message] = {
    "package.import_failed": Message("{error}."),
    "package.import_slow": Message("The import took longer than {seconds:g} seconds."),
    "package.import_crashed": Message("The import crashed (signal {signal})."),
    "package.import_ended": Message("The import exited with code {exit_code}."),
    "package.no_process": Message("No process could be started to import it: {error}."),
}

# Table cells: no full stop. `what` is the detail, `remedy` the fix.
_DOCTOR: Mapping[str, Message] = {
    "doctor.version": Message("{version}"),
    "doctor.python_unsupported": Message(
        "{version}; Tandem supports {first} to {last}",
        "Install Python {last} and run `{installer} doctor`, or set TANDEM_PYTHON to a supported version.",
    ),
    "doctor.torch": Message("{version} (CUDA {cuda})"),
    "doctor.torch_without_cuda": Message("{version} (no CUDA)"),
    "doctor.no_torch": Message("not installed", "Run `{installer} doctor`."),
    "doctor.no_gpu": Message("no NVIDIA GPU: everything runs on the CPU"),
    "doctor.no_gpu_unified": Message("no NVIDIA GPU: everything runs on the CPU, whose memory is shared with the GPU"),
    "doctor.gpu": Message(
        "{name}, compute capability {capability}, {free:gib} of {total:gib} free, driver {driver} (CUDA {cuda})"
    ),
    "doctor.gpu_unusable": Message("{gpu}. {cause}", "{cause:remedy}"),
    "doctor.cpu": Message("{name}, {cores:n core}, {system}"),
    "doctor.memory": Message("{free:gib} of {total:gib} free"),
    "doctor.memory_and_swap": Message("{free:gib} of {total:gib} free, {swap_free:gib} of {swap:gib} of swap"),
    "doctor.memory_low": Message("{memory}", "Close other programs: at least {least:gib} should be free."),
    "doctor.cache_not_writable": Message(
        "{folder} is not writable: {error}", "Set TANDEM_CACHE_DIR to a writable folder."
    ),
    "doctor.folder": Message("{folder}, {free:gib} free"),
    "doctor.disk_cache": Message("{folder}, {size:bytes} of at most {most:bytes}"),
    "doctor.cache_disk_full": Message(
        "{folder}, {free:gib} free", "Free some space, or set TANDEM_CACHE_DIR to another disk."
    ),
    "doctor.engines_disk_full": Message(
        "{folder}, {free:gib} free: not enough to build engines",
        "Free some space, or set TENSORRT_CACHE_DIR to another disk.",
    ),
    "doctor.path": Message("{path}"),
    "doctor.no_compiler": Message(
        "none: Inductor engines and compiled blocks on a CPU need a compiler", "{cause:remedy}"
    ),
    "doctor.package_unusable": Message(
        "{version}, cannot be imported: {cause:sentence}", "Reinstall it: `{reinstall}`"
    ),
    "doctor.package_missing": Message("not installed: no {use}", "To install it: `{install}`"),
    "doctor.installer_package_missing": Message("not installed: no {use}", _RUN_INSTALLER_ON_GPU),
    "doctor.model": Message("{millions:,.1f} million parameters"),
}

MESSAGES: Mapping[str, Message] = {**_MACHINE, **_PACKAGES, **_DOCTOR}
