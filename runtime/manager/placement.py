"""Where the parts of a model run in PyTorch, and in which precision. Pure."""

from runtime.manager import compat
from runtime.manager.machine import Machine
from runtime.manager.split import SMALL_MODEL_BYTES
from runtime.models.spec import ModelSpec


def placement(spec: ModelSpec, machine: Machine, index: int) -> tuple[str, dict[str, str], str, int]:
    """Return the device, each component's dtype, the reason, and the device's free bytes."""
    names = spec.component_names
    why = compat.cuda_problem(machine)
    if why is not None:
        return "cpu", dict.fromkeys(names, "float32"), f"PyTorch in float32 on the CPU: {why}.", machine.ram_free_bytes
    gpu = machine.gpus[index]
    if 4 * spec.total_parameters <= SMALL_MODEL_BYTES:
        # It costs them nothing.
        dtypes = dict.fromkeys(names, "float32")
        reason = f"PyTorch in float32 on {gpu.name}: the model is small."
    elif gpu.capability >= compat.BF16_CAPABILITY:
        # The VAE's convolutions lose visible detail in bfloat16; diffusers runs it in float32 too.
        dtypes = dict.fromkeys(names, "bfloat16") | {"vae": "float32"}
        reason = f"PyTorch on {gpu.name}: bfloat16, the VAE in float32."
    else:
        # UMT5 overflows in float16.
        dtypes = dict.fromkeys(names, "float16") | {"vae": "float32", "text_encoder": "float32"}
        reason = f"PyTorch on {gpu.name}, which has no bfloat16: float16, the text encoder and the VAE in float32."
    return f"cuda:{index}", dtypes, reason, gpu.free_bytes
