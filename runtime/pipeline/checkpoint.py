"""What of a job survives its process: text embeddings, latents, the scheduler's memory, and the plan as it then was.

A checkpoint is a safetensors file whose metadata is JSON, written beside, synced and renamed: there is a whole one or
none. One of another clip or other weights, cut short or changed by a byte is refused with the reason. Nothing is
unpickled.
"""

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from runtime.core.errors import CheckpointError
from runtime.core.facts import Fact
from runtime.core.plan import ExecutionPlan
from runtime.core.step_cache import NONE
from runtime.execution.memory import ran_out
from runtime.models.spec import ModelSpec
from runtime.pipeline.checkpoint_files import BOUNDARY, FACTS, LATEST, newest
from runtime.pipeline.sampling import Conditioning, Reached

_VERSION = 1
_WRITTEN = ".tmp"
Stamps = Mapping[str, list[list[Any]]]

_CHECKSUM = "checksum"
# What may differ between the runs of one clip: how it is computed, and how fast it plays.
HOW = (
    "backends",
    "build",
    "offload",
    "quantization",
    "on_out_of_memory",
    "attention",
    "compile",
    "vae_precision",
    "fps",
    "gpus",
)
# Its second expert's part, which differs between the runs of its first half.
SECOND_HALF = "guidance_scale_2"
# The model and LoRAs count by their files.
_NOT_THE_CLIP = {*HOW, "model", "loras"}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A job between two of its steps.

    Attributes:
        planned: the plan that the run was given.
        plan: what had become of it, fallbacks included.
        of: the number of steps.
        reached: how far sampling is; `None` before the first step.
        warnings: told so far.
        timings: seconds of each stage so far, in all runs.
        load_seconds: seconds spent loading so far, in all runs.
    """

    planned: ExecutionPlan
    plan: ExecutionPlan
    of: int
    conditioning: Conditioning
    reached: Reached | None
    warnings: tuple[Fact, ...]
    timings: Mapping[str, float]
    load_seconds: float

    @property
    def step(self) -> int:
        """Steps done."""
        return 0 if self.reached is None else self.reached.steps

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        tensors: dict[str, torch.Tensor] = {}
        _describe_all(self, tensors)
        return sum(tensor.nbytes for tensor in tensors.values())


class CheckpointFolder:
    """The checkpoints of one job: the latest, and the one between both experts. The folder is made when one is saved.

    Args:
        path: of this job alone; nobody else writes there meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamped: dict[Path, Stamps] = {}

    def save(self, checkpoint: Checkpoint, spec: ModelSpec, *, boundary: bool = False) -> None:
        """Put a checkpoint in the place of the one before.

        Args:
            boundary: it is the one between both experts, and kept as that too.

        Raises:
            CheckpointError: if the disk or memory is full, or the folder cannot be written to.
        """
        latest = self._path / LATEST
        try:
            data = _packed(checkpoint, self._stamps(spec))
            self._path.mkdir(parents=True, exist_ok=True)
            if boundary:
                # First, so that no run goes on from behind it without it. A file is replaced, never written into, so
                # that one with two names stays as it is under the other.
                _write(self._path / BOUNDARY, data)
                _name_too(self._path / BOUNDARY, latest, data)
            else:
                _write(latest, data)
        except OSError as error:
            self._sweep()
            raise CheckpointError(
                "checkpoint.not_writable", folder=self._path, reason=error.strerror or str(error)
            ) from error
        except Exception as error:
            if ran_out(error) is None:
                raise
            raise CheckpointError("checkpoint.no_memory") from error

    def load(self, spec: ModelSpec, plan: ExecutionPlan) -> Checkpoint | None:
        """Return the newest checkpoint, its tensors where `plan` has the transformer; `None` if there is none.

        Raises:
            CheckpointError: if there is one that is of no use, with the reason.
        """
        self._sweep()
        return _read(newest(self._path), self._stamps(spec), plan, half=False)

    def boundary(self, spec: ModelSpec, plan: ExecutionPlan) -> Checkpoint | None:
        """Return the checkpoint between both experts, which knows nothing of the second; `None` if there is none.

        Raises:
            CheckpointError: if there is one that is of no use, with the reason.
        """
        return _read(self._path / BOUNDARY, self._stamps(spec), plan, half=True)

    def keep_half(self) -> None:
        """Remove what a finished job does not need any more: all but what redoing its second half begins with."""
        self._sweep()
        with contextlib.suppress(OSError):
            (self._path / LATEST).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all checkpoints."""
        self._sweep()
        for name in (LATEST, BOUNDARY):
            with contextlib.suppress(OSError):
                (self._path / name).unlink(missing_ok=True)

    def _stamps(self, spec: ModelSpec) -> Stamps:
        # Once a run: what it loaded is what lay there when it began. A run has one model, LoRAs included.
        if spec.directory not in self._stamped:
            self._stamped[spec.directory] = stamps(spec)
        return self._stamped[spec.directory]

    def _sweep(self) -> None:
        """Remove what a killed process was writing."""
        for left in self._path.glob(f"*{_WRITTEN}"):
            with contextlib.suppress(OSError):
                left.unlink()


def stamps(spec: ModelSpec) -> Stamps:
    """Return name, size and time of each file that latents depend on, by component.

    The VAE does not count: it only decodes, so a damaged one can be replaced.
    """
    parts = [name for name in spec.component_names if name != "vae"]
    files = {part: sorted((spec.directory / part).rglob("*")) for part in (*parts, "tokenizer", "scheduler")}
    files["pipeline"] = [spec.directory / "model_index.json"]
    found: dict[str, list[list[Any]]] = {
        part: [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths if path.is_file()]
        for part, paths in files.items()
    }
    for part in parts:
        found[part] += [["LoRA", use.digest, use.weight] for use in spec.loras_of(part)]
    return found


def identity(stamps: Stamps, plan: ExecutionPlan, *, half: bool) -> str:
    """Return a digest of the clip and of the files that make it; not of how it is computed.

    Args:
        half: leave out the second expert's files and guidance scale.
    """
    left_out = _NOT_THE_CLIP | ({SECOND_HALF} if half else set())
    # Checkpoints from before there were step caches say nothing of them.
    left_out |= {"step_cache"} if plan.step_cache == NONE else set()
    # Nor of a shift; the model's own is in the scheduler's file.
    left_out |= {"shift"} if plan.shift is None else set()
    clip = {name: value for name, value in plan.request_json().items() if name not in left_out}
    files = {part: stamp for part, stamp in stamps.items() if not (half and part == "transformer_2")}
    return hashlib.sha256(json.dumps([clip, files], sort_keys=True).encode()).hexdigest()


def _packed(checkpoint: Checkpoint, stamped: Stamps) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    scheduler = _describe_all(checkpoint, tensors)
    on_cpu = _apart(tensors)
    facts = {
        "version": _VERSION,
        "identity": {half: identity(stamped, checkpoint.planned, half=half == "half") for half in ("whole", "half")},
        "planned": checkpoint.planned.model_dump_json(),
        "plan": checkpoint.plan.model_dump_json(),
        "step": checkpoint.step,
        "of": checkpoint.of,
        "scheduler": scheduler,
        "warnings": [fact.model_dump() for fact in checkpoint.warnings],
        "timings": dict(checkpoint.timings),
        "load_seconds": checkpoint.load_seconds,
    }
    told = json.dumps(facts)
    return safetensors.torch.save(on_cpu, metadata={FACTS: told, _CHECKSUM: str(_checksum(told, on_cpu))})


def _read(path: Path, stamped: Stamps, plan: ExecutionPlan, *, half: bool) -> Checkpoint | None:
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            facts = json.loads(metadata[FACTS])
            # Copies, for those in the file lie at any address: arithmetic may round otherwise there.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
        if facts["version"] != _VERSION:
            raise CheckpointError("checkpoint.other_version")
        if metadata[_CHECKSUM] != str(_checksum(metadata[FACTS], tensors)):
            raise CheckpointError("checkpoint.damaged")
        if facts["identity"]["half" if half else "whole"] != identity(stamped, plan, half=half):
            raise CheckpointError("checkpoint.other_clip")
        try:
            planned, ran = (ExecutionPlan.model_validate_json(facts[name]) for name in ("planned", "plan"))
        except ValidationError as error:
            raise CheckpointError("checkpoint.other_version") from error
        device = plan.components["transformer"].device
        reached = None
        if facts["scheduler"] is not None:
            scheduler = _tensors_in(facts["scheduler"], tensors, device)
            reached = Reached(int(facts["step"]), tensors["latents"].to(device), scheduler)
        negative = tensors.get("negative")
        return Checkpoint(
            planned=planned,
            plan=ran,
            of=int(facts["of"]),
            conditioning=Conditioning(
                tensors["positive"].to(device), None if negative is None else negative.to(device)
            ),
            reached=reached,
            warnings=tuple(_read_warning(one) for one in facts["warnings"]),
            timings=dict(facts["timings"]),
            load_seconds=float(facts["load_seconds"]),
        )
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError("checkpoint.damaged") from error


def _read_warning(value: Any) -> Fact:
    """Return a stored warning; earlier versions stored sentences."""
    return Fact("text", {"what": value, "remedy": ""}) if isinstance(value, str) else Fact.model_validate(value)


def _describe_all(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> Any:
    """Put all tensors of a checkpoint into `tensors`; return the scheduler's memory in JSON."""
    tensors["positive"] = checkpoint.conditioning.positive
    if checkpoint.conditioning.negative is not None:
        tensors["negative"] = checkpoint.conditioning.negative
    if checkpoint.reached is None:
        return None
    tensors["latents"] = checkpoint.reached.latents
    state = checkpoint.reached.scheduler
    return _described(None if state is None else dict(state), tensors)


def _described(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a scheduler's value in JSON; its tensors go into `tensors`, and their names stand for them."""
    if isinstance(value, torch.Tensor):
        name = f"scheduler.{len(tensors)}"
        tensors[name] = value
        return {"tensor": name, "moves": value.device.type != "cpu"}
    if isinstance(value, dict):
        return {"dict": {key: _described(item, tensors) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_described(item, tensors) for item in value]}
    return {"value": value}


def _tensors_in(described: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: str) -> Any:
    """Return what `_described` was given; tensors that were on a device are moved to `device`."""
    if "tensor" in described:
        tensor = tensors[described["tensor"]]
        return tensor.to(device) if described["moves"] else tensor
    if "dict" in described:
        return {key: _tensors_in(item, tensors, device) for key, item in described["dict"].items()}
    if "list" in described:
        return [_tensors_in(item, tensors, device) for item in described["list"]]
    if "tuple" in described:
        return tuple(_tensors_in(item, tensors, device) for item in described["tuple"])
    return described["value"]


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors on the CPU, each in memory of its own, as safetensors wants them: a scheduler's may be views."""
    apart, seen = {}, set()
    for name, tensor in tensors.items():
        here = tensor.detach().cpu().contiguous()
        storage = here.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != here.nbytes:
            here = here.clone()
        seen.add(here.untyped_storage().data_ptr())
        apart[name] = here
    return apart


def _checksum(told: str, tensors: Mapping[str, torch.Tensor]) -> int:
    """Return one that a flipped or missing byte changes; safetensors itself looks at names and sizes only."""
    total = zlib.crc32(told.encode())
    for name in sorted(tensors):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return total


def _write(target: Path, data: bytes) -> None:
    written = target.with_name(f"{target.name}.{os.getpid()}{_WRITTEN}")
    with written.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    written.replace(target)
    _sync_folder(target.parent)


def _name_too(target: Path, name: Path, data: bytes) -> None:
    link = name.with_name(f"{name.name}.{os.getpid()}{_WRITTEN}")
    try:
        link.unlink(missing_ok=True)
        link.hardlink_to(target)
    except OSError:  # a disk without links
        _write(name, data)
    else:
        link.replace(name)
        _sync_folder(name.parent)


def _sync_folder(folder: Path) -> None:
    """Make a renamed file's new name last; Windows does so by itself, and opens no folder."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
