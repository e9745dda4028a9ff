"""Makes adapters with peft and LyCORIS, and applies them with the same libraries.

    python -m tests.models.adapters_of_libraries FOLDER MODEL [MODEL ...]

Each MODEL is a file FOLDER/MODEL.safetensors with a transformer's weights. They become layers of the same names. For
each kind of adapter, FOLDER/MODEL/KIND gets the file or files as the library saves them, and CHANGED, the weights and
biases of the changed layers with a weight of 1 of the adapter.

LyCORIS merges LoHa and LoKr with their scale twice (4.1.3), but trains them with the scale once: what counts is the
output of the layers in training.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline
from lycoris.modules.norms import NormModule
from lycoris.wrapper import LycorisNetwork
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

CHANGED = "changed.safetensors"
RANK, ALPHA = 3, 2.0
Tensors = dict[str, torch.Tensor]


class WanRMSNorm(nn.Module):
    """A norm as Wan's own code has it, by which LyCORIS recognises it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x) * self.weight


def layers_of(weights: Tensors) -> nn.Module:
    """Return a module with a layer for each weight."""
    root = nn.Module()
    for name, weight in weights.items():
        if not name.endswith(".weight"):
            continue
        *parents, last = name.removesuffix(".weight").split(".")
        owner, bias = root, weights.get(name.replace(".weight", ".bias"))
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, nn.Module())
            owner = getattr(owner, parent)
        layer: nn.Module
        if weight.ndim == 1:
            layer = WanRMSNorm(len(weight)) if bias is None else nn.LayerNorm(len(weight))
        elif weight.ndim == 2:
            rows, columns = weight.shape
            layer = nn.Linear(columns, rows, bias=bias is not None)
        else:
            rows, columns, *sizes = weight.shape
            kernel = (sizes[0], sizes[1], sizes[2])
            layer = nn.Conv3d(columns, rows, kernel, kernel, bias=bias is not None)
        layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
        owner.add_module(last, layer)
    return root.requires_grad_(False)


def names(module: nn.Module, *kinds: type[nn.Module]) -> list[str]:
    """Return the names of layers of these classes."""
    return [name for name, layer in module.named_modules() if isinstance(layer, kinds)]


def draw(parameters: Iterator[tuple[str, nn.Parameter]]) -> None:
    """Give parameters random values."""
    for name, parameter in parameters:
        if "magnitude" in name or "dora_scale" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(0, 0.3)


def peft_adapter(
    config: type[PeftConfig], module: nn.Module, folder: Path, *, by_diffusers: bool, **values: Any
) -> Tensors:
    """Save an adapter by peft, or by diffusers, and return the changed weights."""
    kinds = (nn.Linear, nn.Conv3d) if config is LoraConfig and not values.get("use_dora") else (nn.Linear,)
    targets = names(module, *kinds)
    adapted = get_peft_model(module, config(target_modules=targets, **values))
    draw((name, own) for name, own in adapted.named_parameters() if own.requires_grad)
    if by_diffusers:
        layers, settings = get_peft_model_state_dict(adapted), adapted.peft_config["default"].to_dict()
        layers = {name.removeprefix("base_model.model."): tensor for name, tensor in layers.items()}
        settings = {name: sorted(own) if isinstance(own, set) else own for name, own in settings.items()}
        WanPipeline.save_lora_weights(folder, layers, transformer_lora_adapter_metadata=settings)
    else:
        adapted.save_pretrained(folder)
    return dict(adapted.merge_and_unload().state_dict())


def lycoris_adapter(module: nn.Module, folder: Path, *, prefix: str, **values: Any) -> Tensors:
    """Save an adapter by LyCORIS and return the changed weights."""
    classes = {"Linear", "Conv3d", *({"LayerNorm", "WanRMSNorm"} if values.get("train_norm") else ())}
    LycorisNetwork.apply_preset({"target_module": sorted(classes), "lora_prefix": prefix})
    modules = {name.replace(".", "_"): name for name, _ in module.named_modules()}
    settings = {"lora_dim": RANK, "conv_lora_dim": RANK, "alpha": ALPHA, "conv_alpha": ALPHA} | values
    network = LycorisNetwork(module, **settings)
    network.apply_to()
    draw(network.named_parameters())
    changed: Tensors = {}
    for adapter in network.loras:
        name = modules[adapter.lora_name.removeprefix(f"{prefix}_")]
        if isinstance(adapter, NormModule):
            weight, bias = adapter.make_weight()
        else:
            layer, size = adapter.org_module[0], adapter.shape[1:]
            # Each column of the weight, and the bias alone, as outputs.
            inputs = torch.cat([torch.eye(prod(size)), torch.zeros(1, prod(size))]).reshape(-1, *size)
            outputs = layer(inputs).flatten(1)
            bias = outputs[-1]
            weight = (outputs[:-1] - bias).T.reshape(adapter.shape)
        changed |= {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias})
    state = network.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "adapter.safetensors")
    return changed


_FACTORS: Mapping[str, Any] = {"r": RANK, "alpha": ALPHA}
_LOW: Mapping[str, Any] = {"r": RANK, "lora_alpha": ALPHA}
_PEFT: Mapping[str, Callable[..., Tensors]] = {
    "LoRA": partial(peft_adapter, LoraConfig, **_LOW, lora_bias=True),
    "rsLoRA with patterns": partial(
        peft_adapter, LoraConfig, **_LOW, use_rslora=True, rank_pattern={"to_q": 5}, alpha_pattern={"to_q|to_k": 7.0}
    ),
    "DoRA": partial(peft_adapter, LoraConfig, **_LOW, use_dora=True),
    "LoHa": partial(peft_adapter, LoHaConfig, **_FACTORS, init_weights=False),
    "LoKr": partial(peft_adapter, LoKrConfig, **_FACTORS, init_weights=False),
    "LoKr, both factored": partial(
        peft_adapter, LoKrConfig, **{**_FACTORS, "r": 1}, decompose_both=True, decompose_factor=4
    ),
}
_LYCORIS: Mapping[str, Mapping[str, Any]] = {
    "LoCon": {"network_module": "locon", "train_norm": True},
    "rsLoRA": {"network_module": "locon", "rs_lora": True, "use_scalar": True},
    "DoRA": {"network_module": "locon", "weight_decompose": True},
    "DoRA by inputs": {"network_module": "locon", "weight_decompose": True, "wd_on_out": False},
    "LoHa": {"network_module": "loha"},
    "LoHa, DoRA": {"network_module": "loha", "weight_decompose": True},
    "LoKr": {"network_module": "lokr", "factor": 4, "use_scalar": True},
    "LoKr, both factored": {"network_module": "lokr", "lora_dim": 1, "conv_lora_dim": 1, "decompose_both": True},
    "LoKr, matrices": {"network_module": "lokr", "full_matrix": True},
    "LoKr, DoRA": {"network_module": "lokr", "factor": 2, "weight_decompose": True},
    "LoKr, DoRA by inputs": {"network_module": "lokr", "weight_decompose": True, "wd_on_out": False},
    "differences": {"network_module": "full"},
}
KINDS: Mapping[str, Callable[..., Tensors]] = {
    **{f"peft {kind}": partial(adapter, by_diffusers=False) for kind, adapter in _PEFT.items()},
    **{
        f"diffusers {kind}": partial(_PEFT[kind], by_diffusers=True)
        for kind in ("LoRA", "rsLoRA with patterns", "DoRA")
    },
    **{f"LyCORIS {kind}": partial(lycoris_adapter, **values) for kind, values in _LYCORIS.items()},
}


@torch.no_grad()
def main(folder: Path, models: list[str]) -> None:
    """Make all kinds for all models."""
    for model in models:
        weights = load_file(folder / f"{model}.safetensors")
        own_names = model.startswith("own ")
        for kind, adapter in KINDS.items():
            if own_names and not kind.startswith("LyCORIS"):
                continue
            place = folder / model / kind
            place.mkdir(parents=True)
            torch.manual_seed(0)
            prefix = {"prefix": "lora_unet" if own_names else "lycoris"} if kind.startswith("LyCORIS") else {}
            changed = adapter(layers_of(weights), place, **prefix)
            save_file({name: tensor.contiguous() for name, tensor in changed.items()}, place / CHANGED)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
