"""Runs an engine made elsewhere under the names, sizes and types of the program that it stands for."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from runtime.core.errors import EngineError
from runtime.engines.closeable import Closing
from runtime.engines.imported import adapters as bridges
from runtime.engines.imported.adapters import Adapter, Batch, RestoredRows
from runtime.engines.imported.adapters.transformer import TRAINING_STEPS
from runtime.engines.imported.contract import Contract
from runtime.engines.imported.matching import ADAPTERS_FILE
from runtime.engines.programs import Program
from runtime.engines.sessions import Session
from runtime.engines.sessions.onnxruntime import OUT_OF_MEMORY, start
from runtime.engines.verify import Verification, verify
from runtime.planner.engine_index import EngineRecord
from runtime.planner.shapes import LatentSize, ShapeProfile

# A smooth picture has this many latents from one value to the next.
_COARSE = 4
_IMPORT_AGAIN = "Import it again."


class AdaptedSession(Closing):
    """An engine behind its adapters; see `Session`. Batches of any size are run in as many calls as they take.

    Args:
        inner: takes and gives the engine's own tensors.
        batch: how many clips it computes a call.
        adapters: in the order in which inputs pass them.
    """

    def __init__(self, inner: Any, batch: Batch, adapters: tuple[Adapter, ...]) -> None:
        self._inner = inner
        self._batch = batch
        self._adapters = adapters

    def close(self) -> None:
        """Free the engine."""
        self._inner.close()

    @property
    def restored(self) -> RestoredRows | None:
        """The adapter that makes up what the engine leaves out, if it does."""
        return next((adapter for adapter in self._adapters if isinstance(adapter, RestoredRows)), None)

    def unrestored(self) -> "AdaptedSession":
        """Return the same engine without what is made up, to compare what it computes; not to be closed."""
        kept = tuple(adapter for adapter in self._adapters if adapter is not self.restored)
        return AdaptedSession(self._inner, self._batch, kept)

    @torch.inference_mode()
    def infer(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Session`."""
        count = max(len(tensor) for tensor in inputs.values())
        calls = self._batch.split(inputs)
        if len(calls) == 1:
            outputs = self._one(calls[0])
            return outputs if count == self._batch.size else self._batch.join([outputs], count)
        # An engine's buffers come round: what a call gave is kept apart from them.
        kept = [{name: tensor.clone() for name, tensor in self._one(call).items()} for call in calls]
        return self._batch.join(kept, count)

    def _one(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        entered = []
        for adapter in self._adapters:
            entered.append(inputs)
            inputs = adapter.enter(inputs)
        outputs: dict[str, torch.Tensor] = self._inner.infer(**inputs)
        for adapter, given in zip(reversed(self._adapters), reversed(entered), strict=True):
            outputs = adapter.leave(outputs, given)
        return outputs


class OnnxFile:
    """An ONNX file with tensors of its own names and types, copied through the host's memory."""

    def __init__(self, model: Path, contract: Contract, *, provider: str, precision: str, device: str) -> None:
        self._session: Any = start(model, provider=provider, precision=precision, device=torch.device(device))
        self._types = {port.name: getattr(torch, port.dtype) for port in contract.inputs}
        self._names = [port.name for port in contract.outputs]
        self._device = torch.device(device)

    def close(self) -> None:
        """Free the model."""
        self._session = None

    def infer(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the model once.

        Raises:
            EngineError: if it does not take these inputs or fails.
            MemoryError: if memory does not suffice.
        """
        given = {name: tensor.to("cpu", self._types[name]).contiguous().numpy() for name, tensor in inputs.items()}
        try:
            outputs = self._session.run(self._names, given)
        except Exception as error:  # ONNX Runtime's own errors derive from Exception alone
            if OUT_OF_MEMORY in str(error):
                raise MemoryError(str(error)) from error
            said = " ".join(str(error).split())[:300]
            raise EngineError(f"The imported engine failed: {said}", "PyTorch takes over.") from error
        return {
            name: torch.from_numpy(output).to(self._device) for name, output in zip(self._names, outputs, strict=True)
        }


@dataclass(frozen=True)
class ReadPart(Program):
    """A program without the rows and columns that an engine leaves out: what the rest is compared with."""

    missing: RestoredRows

    @torch.inference_mode()
    def run(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Program`."""
        velocity = super().run(**inputs)["velocity"]
        height, width = velocity.shape[-2] - self.missing.rows, velocity.shape[-1] - self.missing.columns
        return {"velocity": velocity[..., :height, :width]}


def open_imported(folder: Path, record: EngineRecord, *, device: str) -> AdaptedSession:
    """Load an imported engine; its files were compared with their hashes.

    Raises:
        EngineError: if it cannot be loaded, or what lies beside it is not what was written at import.
        MemoryError, torch.OutOfMemoryError: if memory does not suffice.
    """
    contract, batch, chain = read_adapters(folder)
    engine, options = folder / record.files[0].name, dict(record.key.options)
    inner: Any
    if contract.backend == "tensorrt":
        from runtime.engines.sessions.tensorrt import TensorRTSession

        inner = TensorRTSession(engine, device=device, cuda_graphs=options.get("cuda_graphs", "on") == "on")
    else:
        provider = options.get("provider", "cpu")
        inner = OnnxFile(engine, contract, provider=provider, precision=record.key.precision, device=device)
    return AdaptedSession(inner, batch, chain)


def read_adapters(folder: Path) -> tuple[Contract, Batch, tuple[Adapter, ...]]:
    """Return what was decided at import.

    Raises:
        EngineError: if the file is missing or not what was written.
    """
    try:
        value = json.loads((folder / ADAPTERS_FILE).read_text(encoding="utf-8"))
        chain = bridges.from_json(value["adapters"])
        return Contract.from_json(value["contract"]), Batch(int(value["batch"])), chain
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{ADAPTERS_FILE} is not what was written at import: {error}.", _IMPORT_AGAIN) from error


def prove_imported(session: Session, program: Program, profile: ShapeProfile, precision: str) -> Verification:
    """Compare an imported engine with PyTorch; see `verify.verify`.

    What an engine leaves out and an adapter makes up has no tolerance: how far it is off is said beside the result.
    """
    restored = session.restored if isinstance(session, AdaptedSession) else None
    if restored is None or not isinstance(session, AdaptedSession):
        return verify(session, program, profile, precision)
    part = ReadPart(program.name, program.module, program.spec, restored)
    found = verify(session.unrestored(), part, profile, precision)
    return replace(
        found, detail=f"{found.detail}; {restored.title}, {_restored_error(session, part, profile.opt):.0%} off"
    )


def _restored_error(session: AdaptedSession, part: ReadPart, latent: LatentSize) -> float:
    """Return the relative error of the rows and columns that are made up, on latents as smooth as a picture's."""
    inputs = part.inputs(latent)
    noise, sigma = inputs["latents"], inputs["timestep"].item() / TRAINING_STEPS
    coarse = [latent[0], *(-(-side // _COARSE) for side in latent[1:])]
    smooth = torch.nn.functional.interpolate(noise[..., : coarse[1], : coarse[2]], size=list(latent), mode="trilinear")
    inputs["latents"] = (1 - sigma) * smooth + sigma * noise
    whole = Program.run(part, **inputs)["velocity"]
    height, width = whole.shape[-2] - part.missing.rows, whole.shape[-1] - part.missing.columns
    difference = session.infer(**inputs)["velocity"].to(whole) - whole
    # Zero where the engine computes.
    difference[..., :height, :width] = 0.0
    strip = whole.clone()
    strip[..., :height, :width] = 0.0
    return float(difference.norm() / strip.norm())
