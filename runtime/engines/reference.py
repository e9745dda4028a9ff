"""References for verification: programs in float32, and the text that their transformers are given.

A transformer and a text encoder are computed block by block: weights stay on the CPU as their files hold them, and each
block is converted to float32 on the device, run, and freed. So a reference takes the memory of one block, besides
activations, and fits any card that the engine fits.
"""

import contextlib
import copy
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from runtime.core.errors import ModelError, TandemError
from runtime.core.files import remove_partial_files, replace_file
from runtime.core.request import SOUND_DECODERS
from runtime.engines.component_programs import Program
from runtime.engines.key_parts import program_key_parts
from runtime.engines.programs import MakeForm, load_program
from runtime.models.registry import components_of
from runtime.models.spec import FRAME_PROGRAMS, ModelSpec
from runtime.models.tensor_files import read_tensors
from runtime.models.weights import load_stored, load_tokenizer
from runtime.upstream.torch import clear_module

# A prompt as people write them: the words that a transformer is verified with.
PROMPT = "A red sailing boat crosses a calm sea at sunset while seagulls circle above it, filmed slowly from the shore."
_FOLDER = "verification"
_EMBEDS = "embeds"
# The largest supported text encoder's embeddings have 8 MB.
_MAX_BYTES = 64 << 20


class BlocksOnDevice:
    """A list of modules, each converted to float32 on a device while an iteration is at it.

    Args:
        blocks: with their weights anywhere, in any dtype; they are not changed.
        device: where the converted ones are.
    """

    def __init__(self, blocks: nn.ModuleList, device: torch.device) -> None:
        self._blocks = blocks
        self._device = device

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> nn.Module:
        return _in_float32(self._blocks[index], self._device)

    def __iter__(self) -> Iterator[nn.Module]:
        for block in self._blocks:
            converted = _in_float32(block, self._device)
            yield converted
            # The caller's variable still refers to it while the next one is converted.
            clear_module(converted)


def load_reference(spec: ModelSpec, component: str, name: str, device: str) -> Program:
    """Load a component and return one of its programs in float32; all but decoders are computed block by block.

    Args:
        component, name: see `programs.load_program`; not a program of block engines.
        device: a torch device.

    Raises:
        ModelError: if the weights do not fit the configuration.
    """
    if name.startswith("vae") or name in {*FRAME_PROGRAMS, *SOUND_DECODERS}:
        return load_program(spec, component, name, device=device, dtype="float32")
    make_form: MakeForm = components_of(spec.family).make_form
    form = make_form(spec, name, lambda: load_stored(spec, component)).eval()
    target = torch.device(device)
    place = largest_list(form)
    if place is not None:
        parent, attribute, blocks = place
        delattr(parent, attribute)
        setattr(parent, attribute, BlocksOnDevice(blocks, target))
    return Program(name, form.to(target, torch.float32), spec)


def largest_list(form: nn.Module) -> tuple[nn.Module, str, nn.ModuleList] | None:
    """Return the list of modules with most of the weights, with its parent and name; `None` if no list has most."""
    places = [
        (parent, name, child)
        for parent in form.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList)
    ]
    largest = max(places, key=lambda place: _weights(place[2]), default=None)
    return largest if largest is not None and 2 * _weights(largest[2]) > _weights(form) else None


@contextlib.contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Disable TF32 in a `with` block; by default, cuDNN rounds the inputs of convolutions to 10 bits of mantissa."""
    backends: Any = torch.backends
    settings = (backends.cudnn.conv, backends.cuda.matmul) if device.type == "cuda" else ()
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


class ExactConvolutions(TorchFunctionMode):
    """Computes two-dimensional convolutions without cuDNN in a `with` block.

    Without TF32, cuDNN 9.19 takes FFTs for large ones, with tens of gigabytes of workspace, and 16 of 1,024 channels
    are wrong: 8 × 512 × 64 × 64 with a 3 × 3 kernel, on an H100. PyTorch's own kernels need memory for the inputs of
    one image, times the size of the kernel. Where that is missing, cuDNN has none for FFTs either, and is used.

    `full_float32` does not include it, because compilers would trace it with the code that they compile.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch; see `torch.overrides`."""
        del types
        kwargs = kwargs or {}
        if func is torch.conv2d:
            cudnn: Any = torch.backends.cudnn
            before, cudnn.enabled = cudnn.enabled, False
            try:
                with contextlib.suppress(torch.OutOfMemoryError):
                    return func(*args, **kwargs)
            finally:
                cudnn.enabled = before
        return func(*args, **kwargs)


def _weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _in_float32(block: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a module whose weights are in float32 on a device."""
    copies: dict[int, Any] = {}
    for tensor in (*block.parameters(), *block.buffers()):
        # Converted on the device: on the CPU, it would take a second copy and twice the transfer.
        moved = tensor.detach().to(device)
        moved = moved.float() if moved.is_floating_point() else moved
        copies[id(tensor)] = nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved
    return copy.deepcopy(block, copies)


def encoded_prompt(spec: ModelSpec, device: str, cache_dir: Path | None = None) -> torch.Tensor | None:
    """Return `PROMPT` as the model's own text encoder embeds it in float32, as a transformer takes it, on the CPU.

    Args:
        device: a torch device, to encode on; its memory is free again at the end.
        cache_dir: a folder in which the result is kept for other engines of the model.

    Returns:
        (1, text tokens, text width), zero beyond the prompt's end; `None` if the text encoder cannot be loaded or run,
        or has no program.
    """
    if not spec.programs["text_encoder"]:
        return None
    path = None
    try:
        if cache_dir is not None:
            weights = program_key_parts(spec, "text_encoder", "text_encoder", cache_dir)
            digest = hashlib.sha256("\n".join((*weights, PROMPT)).encode()).hexdigest()
            path = cache_dir / _FOLDER / f"{digest}.safetensors"
        stored = None if path is None else _read(path, spec)
        words = _encode(spec, device) if stored is None else stored
    except (TandemError, OSError, ValueError, MemoryError, torch.OutOfMemoryError):
        return None
    if path is not None and stored is None:
        _write(path, words)
    return nn.functional.pad(words, (0, 0, 0, spec.max_sequence_length - words.shape[1]))


def _encode(spec: ModelSpec, device: str) -> torch.Tensor:
    """Return the embeddings of the prompt's tokens, without padding."""
    program = load_reference(spec, "text_encoder", "text_encoder", device)

    def embed(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        # Forms take texts of one length.
        missing = spec.encoders["text_encoder"].max_tokens - ids.shape[1]
        ids, padded = (nn.functional.pad(tensor, (0, missing)).to(program.device) for tensor in (ids, mask))
        with full_float32(program.device):
            outputs = program.run(input_ids=ids, attention_mask=padded)
        return outputs["embeds"][:, : int(mask.sum().item())].cpu()

    encoder = components_of(spec.family).text_encoder(spec, "text_encoder", load_tokenizer(spec), embed)
    words: torch.Tensor = encoder.encode(PROMPT).embeds.clone()
    return words


def _read(path: Path, spec: ModelSpec) -> torch.Tensor | None:
    """Return the embeddings in a file; `None` if there is none, or it holds something else."""
    try:
        words = read_tensors(path, _MAX_BYTES)[0][_EMBEDS]
    except (ModelError, KeyError):
        return None
    fits = words.shape[:1] + words.shape[2:] == (1, spec.transformer.text_dim) and words.dtype == torch.float32
    return words if fits and words.shape[1] <= spec.max_sequence_length else None


def _write(path: Path, words: torch.Tensor) -> None:
    with contextlib.suppress(OSError):  # it is encoded again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_partial_files(path.parent)
        replace_file(path, safetensors.torch.save({_EMBEDS: words.contiguous()}))
