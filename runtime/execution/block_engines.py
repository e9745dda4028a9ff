"""Parts of a transformer's blocks on engines that take the weights as inputs, and in PyTorch once one has failed.

Independent of models: the family runs the parts in its order, and states how PyTorch computes each. Tokens come in
chunks, because an engine takes a limited number in one call.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from runtime.core.facts import Fact
from runtime.core.plan import EngineRef
from runtime.engines.block_programs import BlockPart
from runtime.engines.key_parts import BLOCK_TOKENS
from runtime.engines.programs import load_program
from runtime.engines.service import OpenEngines
from runtime.execution.cuda_graphs import CudaGraphRunner
from runtime.execution.engine_failures import failure_of_engine
from runtime.models.packed_layers import PackedLinear
from runtime.models.quantization import FP8_DATA, FP8_SCALE, fp8_tensor
from runtime.models.spec import ModelSpec

# The weights of one block by program and input; `None` for a block that PyTorch computes.
BoundWeights = Mapping[str, Mapping[str, torch.Tensor]] | None
Report = Callable[[Fact], None]

# Slices that begin at such multiples are aligned as engines require, whatever the width.
_TOKENS_STEP = 64


class BlockEngines:
    """The block engines of one transformer; PyTorch computes everything after the first failure.

    Args:
        engines: loaded; the caller closes them. `None` if that failed: PyTorch then computes the same, in chunks too.
        spec, component, uses: of the engines.
        on_failed: called once, with the reason of a failure.
        on_skipped: called once, with the reason why a block cannot be computed by the engines.

    Attributes:
        failed: whether PyTorch computes everything.
    """

    def __init__(
        self,
        engines: OpenEngines | None,
        spec: ModelSpec,
        component: str,
        uses: Iterable[EngineRef],
        on_failed: Report,
        on_skipped: Report,
    ) -> None:
        self._engines = engines
        self._on_failed = on_failed
        self._on_skipped = on_skipped
        self._parts: dict[str, BlockPart] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for use in uses:
            program: Any = load_program(spec, component, use.program, device="cpu", dtype=use.precision)
            self._parts[use.program] = program.part
            self._dtypes[use.program] = getattr(torch, program.dtype)
        self._skipped = False
        self._rejected = False
        self.failed = engines is None

    def weights(
        self, block: torch.nn.Module, device: torch.device, programs: Collection[str] | None = None
    ) -> BoundWeights:
        """Return a block's weights as they are now, because offloading moves them; `None` if PyTorch computes it.

        Args:
            programs: that the block has; all by default.
        """
        if self.failed:
            return None
        bound = {
            program: {name: _parameter(block, path, self._dtype(program, name)) for name, path in part.weights.items()}
            for program, part in self._parts.items()
            if programs is None or program in programs
        }
        for program, tensors in bound.items():
            for name, tensor in tensors.items():
                if tensor is None or tensor.device != device or tensor.dtype != self._dtype(program, name):
                    self._skip(self._parts[program].weights[name])
                    return None
        return bound

    def chunks(self, tokens: int) -> list[slice]:
        """Divide tokens into slices of the most that the engines take, for which they are optimized, and a rest."""
        most = BLOCK_TOKENS if self._engines is None else self._engines.most_tokens
        size = most // _TOKENS_STEP * _TOKENS_STEP or most
        return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]

    def outputs(self, program: str, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Allocate a program's outputs for the tokens of a tensor (1, tokens, …): each (1, tokens, …)."""
        part = self._parts[program]
        return tuple(
            like.new_empty((1, *part.tensors[name].shape(like.shape[1])), dtype=self._dtype(program, name))
            for name in part.outputs
        )

    def run(
        self,
        program: str,
        inputs: Mapping[str, torch.Tensor],
        weights: BoundWeights,
        outputs: Sequence[torch.Tensor],
        in_pytorch: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]],
    ) -> None:
        """Compute one part of a block.

        Args:
            inputs: by name, each with a first axis of 1 that the program does not have; contiguous.
            weights: of the block, from `weights`.
            outputs: in the program's order, written in place; as `inputs`.
            in_pytorch: computes the outputs if the engines do not.

        Raises:
            DeviceLostError: if nothing can run on the device in this process any more.
        """
        if weights is not None and not self.failed and self._write(program, inputs, weights[program], outputs):
            return
        computed = in_pytorch()
        for output, result in zip(outputs, computed if isinstance(computed, tuple) else (computed,), strict=True):
            output.copy_(result.reshape(output.shape))

    def rejects(self, output: torch.Tensor) -> bool:
        """Return whether a pass must be computed again in PyTorch because its output is not finite.

        Processes that share a pass see the same output, and so decide alike, whichever of them uses engines.
        """
        if self._rejected or torch.isfinite(output).all().item():
            return False
        self._rejected = True
        self._fail(Fact("execution.engine_not_finite"))
        return True

    def _write(
        self,
        program: str,
        inputs: Mapping[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> bool:
        assert self._engines is not None
        tensors = {**{name: tensor[0] for name, tensor in inputs.items()}, **weights}
        written = {name: tensor[0] for name, tensor in zip(self._parts[program].outputs, outputs, strict=True)}
        try:
            self._engines.write(program, tensors, written)
        except Exception as error:  # of any type: every library has its own
            if outputs[0].is_cuda and torch.cuda.is_current_stream_capturing():
                # The call is repeated without recording it.
                raise
            self._fail(failure_of_engine(error, outputs[0].device, "execution.engine_out_of_memory"))
            return False
        return True

    def _fail(self, reason: Fact) -> None:
        if not self.failed:
            self.failed = True
            self._on_failed(reason)

    def _skip(self, weight: str) -> None:
        if not self._skipped:
            self._skipped = True
            self._on_skipped(Fact("execution.block_not_on_engine", {"weight": weight}))

    def _dtype(self, program: str, name: str) -> torch.dtype:
        stated = self._parts[program].tensors[name].dtype
        return getattr(torch, stated) if stated else self._dtypes[program]


def parts_of(
    engines: BlockEngines, tokens: int, table: torch.Tensor, first_count: int
) -> list[tuple[slice, torch.Tensor]]:
    """Return chunks of tokens, each with the modulation of its timestep, (1, rows, width).

    Args:
        table: the modulation of one timestep or two, (timesteps, rows, width).
        first_count: the number of first tokens that have the first of two timesteps.
    """
    first_count = min(first_count, tokens) if len(table) > 1 else 0
    rows = (table[:1], 0, first_count), (table[-1:], first_count, tokens)
    return [
        (slice(start + part.start, start + part.stop), modulation)
        for modulation, start, end in rows
        if end > start
        for part in engines.chunks(end - start)
    ]


def run_pass(
    engines: BlockEngines | None,
    graphs: CudaGraphRunner | None,
    reset_cache: Callable[[], None],
    run: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """Return the result of a pass, computed again in PyTorch if that on engines is not finite.

    Args:
        engines: that the pass runs on, if it does.
        graphs: recorded passes; they are forgotten when an engine fails.
        reset_cache: discards what a step cache has of the pass.
        run: computes the pass.
    """
    if engines is None:
        return run()
    failed = engines.failed
    output = run()
    again = engines.rejects(output)
    if engines.failed != failed and graphs is not None:
        # What was recorded runs the engines.
        graphs.forget()
    if again:
        reset_cache()
        output = run()
    return output


def _parameter(block: torch.nn.Module, path: str, dtype: torch.dtype) -> Any:
    """Return a parameter, dequantized if its file has it quantized, or a tensor of an FP8 parameter.

    `None` if its layer computes anything else than a plain layer with this parameter does.
    """
    suffix = next((suffix for suffix in (FP8_DATA, FP8_SCALE) if path.endswith(suffix)), "")
    owner, _, name = path.removesuffix(suffix).rpartition(".")
    try:
        layer = block.get_submodule(owner)
    except AttributeError:
        return None
    if isinstance(layer, PackedLinear) and name == "weight" and not suffix:
        return layer.dequantized(dtype)
    parameter = layer._parameters.get(name)
    # Adapters wrap a layer, hooks replace its `forward`, quantized weights are subclasses.
    if "forward" in vars(layer) or not (suffix or type(parameter) is torch.nn.Parameter):
        return None
    tensor = fp8_tensor(parameter, suffix) if suffix else parameter
    return tensor if tensor is not None and tensor.is_contiguous() else None
