"""Where the parts of a model run in PyTorch, and in which precision. Pure."""

from runtime.core.request import AUTO
from runtime.machine.probe import Machine
from runtime.models.spec import ModelSpec
from runtime.planner import constraints, vae_precision
from runtime.planner.parallelism import SMALL_MODEL_BYTES


def placement(spec: ModelSpec, machine: Machine, index: int, vae: str = AUTO) -> tuple[str, dict[str, str], str, int]:
    """Return the device, each component's dtype, the reason, and the device's free bytes.

    Args:
        index: of the GPU.
        vae: the VAE's precision as asked for, of `request.VAE_PRECISIONS`.

    Raises:
        InvalidRequestError: if the device cannot decode in that precision.
    """
    names = spec.component_names
    why = constraints.cuda_problem(machine)
    device = f"cuda:{index}" if why is None else "cpu"
    vae_precision.check(vae, device, machine)
    if why is not None:
        return device, dict.fromkeys(names, "float32"), f"PyTorch in float32 on the CPU: {why}.", machine.ram_free_bytes
    gpu = machine.gpus[index]
    if 4 * spec.total_parameters <= SMALL_MODEL_BYTES:
        # It costs them nothing.
        dtypes = dict.fromkeys(names, "float32")
        reason = f"PyTorch in float32 on {gpu.name}: the model is small"
    elif gpu.capability >= constraints.BF16_CAPABILITY:
        dtypes = dict.fromkeys(names, "bfloat16")
        reason = f"PyTorch on {gpu.name}: bfloat16"
    else:
        # UMT5 overflows in float16, and of a VAE that nobody tried nobody knows.
        dtypes = dict.fromkeys(names, "float16") | {"text_encoder": "float32", "vae": "float32"}
        reason = f"PyTorch on {gpu.name}, which has no bfloat16: float16, the text encoder in float32"
    all_alike = vae == AUTO and set(dtypes.values()) == {"float32"}
    dtypes["vae"], about_vae = vae_precision.choose(vae, dtypes["vae"])
    return device, dtypes, f"{reason}." if all_alike else f"{reason}; {about_vae}.", gpu.free_bytes
