"""Checkpoints: the state of a job between two steps, on disk, and when it is saved.

A checkpoint holds text embeddings, latents, the scheduler's state and the plan. It is a safetensors file whose metadata
is JSON, written to a temporary file, synced and renamed, so that it is complete or absent. A checkpoint of another clip
or of other weights, or a damaged one, is refused with the reason. Nothing is unpickled.

The state of a diffusers scheduler is all its attributes but the configuration. Values are numbers, text, tensors, and
lists, tuples and dictionaries of them; a scheduler with any other value is refused. Tensors are not copied: schedulers
replace their tensors and do not modify them, which tests/pipeline/test_scheduler_state.py verifies.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from runtime.core.errors import CheckpointError, ModelError, ran_out
from runtime.core.events import CheckpointSaved, Event
from runtime.core.facts import Fact, Warnings
from runtime.core.files import move_over, sync_folder
from runtime.core.plan import ExecutionPlan
from runtime.core.request import CONTROL_FIELDS, CONTROL_SCALE, NO_NAG, OFF, OVERLAP
from runtime.core.untrusted_files import parse_json
from runtime.models.spec import ModelSpec
from runtime.models.tensor_files import read_header
from runtime.models.timed_prompts import timed_prompts
from runtime.pipeline.files import (
    CLIP,
    COMPUTE_FIELDS,
    FINISHING_FIELDS,
    HEADER_KEY,
    LATEST,
    SECTIONS,
    Stamps,
    stamps,
)
from runtime.pipeline.sampling import Conditioning, GivenFrames, Guidance, SamplingState
from runtime.pipeline.section_sampling import SectionProgress

# Of videos made whole, and in sections.
_VERSION, _SECTION_VERSION = 3, 4
_PARTIAL = ".tmp"

_CHECKSUM = "checksum"
# Begins the name of the tensor of given frames, which ends with their kind; and that of the first of two stages.
_GIVEN, _GIVEN_HALF = "given.", "half."
# Begins the names of the tensors of further prompts, which end with their number, and of a section's progress.
_PROMPT, _SECTION = "prompt.", "section."
# The latents of the video that this one is made from.
_VIDEO = "video"
# Begins the names of the differences of guidance passes that the next step takes over, which end with the pass.
_GUIDANCE = "guidance."
# Checkpoints may take this share of the time of the steps.
_SHARE = 0.01
# Estimate of a checkpoint's cost before the first one is written: opening and syncing a file, and a slow disk.
_OPEN_SECONDS, _BYTES_PER_SECOND = 0.01, 100e6
# The model and LoRAs are identified by their files; a length in seconds became a number of frames.
_OTHER_FIELDS = {*COMPUTE_FIELDS, *FINISHING_FIELDS, "model", "loras", "seconds"}
_VIDEO_FIELDS = {"video", "strength"}
_IMAGE_FIELDS = {"image", "last_image", "image_fit", "image_position"}
# Set when a scheduler is loaded.
_SCHEDULER_CONFIGURATION = frozenset({"_internal_dict"})


class _Header(BaseModel):
    """The JSON in a checkpoint's metadata."""

    # A scheduler's state may have infinite values.
    model_config = ConfigDict(ser_json_inf_nan="constants")

    version: int
    identity: str
    planned: str
    plan: str
    step: int
    of: int
    scheduler: Any
    warnings: Warnings
    timings: Mapping[str, float]
    load_seconds: float
    # Sections done, and steps of the next one.
    section: tuple[int, int] | None = None
    passes_left_out: int = 0
    # That denoises, of two.
    stage: int = 0


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a job between two steps.

    Attributes:
        planned: the plan that the run started with.
        plan: the current plan, fallbacks included.
        of: the number of steps.
        sampling: progress of sampling; `None` before the first step.
        warnings: emitted so far.
        timings: seconds of each stage so far, in all runs.
        load_seconds: seconds spent on loading so far, in all runs.
        section: progress of a video that is made in sections, else `None`.
    """

    planned: ExecutionPlan
    plan: ExecutionPlan
    of: int
    conditioning: Conditioning
    sampling: SamplingState | None
    warnings: tuple[Fact, ...]
    timings: Mapping[str, float]
    load_seconds: float
    section: SectionProgress | None = None

    @property
    def parts(self) -> int:
        """Sections, segments or stages done."""
        if self.section is not None:
            return self.section.sections
        return 0 if self.sampling is None else self.sampling.stage

    @property
    def state(self) -> tuple[int, int, ExecutionPlan]:
        """What differs if the job's state does: steps, and sections or stages done, and the plan."""
        # A fallback changes the following steps even if no step was done since.
        return self.step, self.parts, self.plan

    @property
    def step(self) -> int:
        """Steps done."""
        if self.section is not None:
            return self.section.sections * self.plan.steps + self.section.steps
        return 0 if self.sampling is None else self.sampling.steps

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        tensors: dict[str, torch.Tensor] = {}
        _describe_all(self, tensors)
        return sum(tensor.nbytes for tensor in tensors.values())


class CheckpointFolder:
    """The newest checkpoint of one job.

    Args:
        path: of this job alone; made when a checkpoint is saved.
        files: the stamps of the model, of whose files this machine has copies with the same content; by default they
            are read.
    """

    def __init__(self, path: Path, files: Stamps | None = None) -> None:
        self.path = path
        self._files = files
        self._stamps_of: dict[Path, Stamps] = {}

    def save(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        """Replace the checkpoint.

        Raises:
            CheckpointError: if the disk or memory is full, or the folder cannot be written.
        """
        try:
            data = _packed(checkpoint, self._stamps(spec))
            self.path.mkdir(parents=True, exist_ok=True)
            _write(self.path / LATEST, data)
        except OSError as error:
            self._sweep()
            raise CheckpointError(
                "checkpoint.not_writable", folder=self.path, reason=error.strerror or str(error)
            ) from error
        except Exception as error:
            if ran_out(error) is None:
                raise
            raise CheckpointError("checkpoint.no_memory") from error

    def load(self, spec: ModelSpec, plan: ExecutionPlan) -> Checkpoint | None:
        """Return the newest checkpoint, its tensors on the transformer's device; `None` if there is none.

        Raises:
            CheckpointError: if it cannot be used, with the reason.
        """
        self._sweep()
        return _read(self.path / LATEST, self._stamps(spec), plan)

    def clear(self) -> None:
        """Remove all checkpoints, finished sections and clips."""
        self._sweep()
        self._remove_frames()
        with contextlib.suppress(OSError):
            (self.path / LATEST).unlink(missing_ok=True)

    def _remove_frames(self) -> None:
        for name in (SECTIONS, CLIP):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def _stamps(self, spec: ModelSpec) -> Stamps:
        # Read once per run, whose weights are those of its start. A run has one model, LoRAs included.
        if self._files is not None:
            return self._files
        if spec.directory not in self._stamps_of:
            self._stamps_of[spec.directory] = stamps(spec)
        return self._stamps_of[spec.directory]

    def _sweep(self) -> None:
        """Remove partial files of killed processes."""
        for path in self.path.glob(f"*{_PARTIAL}"):
            with contextlib.suppress(OSError):
                path.unlink()


def due(seconds: float, spent: float, cost: float) -> bool:
    """Return whether one more checkpoint keeps the cost of all below 1 % of the time of the steps.

    Args:
        seconds: of all steps of this run so far.
        spent: of all checkpoints so far.
        cost: of the next checkpoint.
    """
    return spent + cost <= _SHARE * seconds


def estimated_cost(size: int) -> float:
    """Return the estimated seconds for writing `size` bytes, before any checkpoint was measured."""
    return _OPEN_SECONDS + size / _BYTES_PER_SECOND


class CheckpointPolicy:
    """Decides when the checkpoints of one run are saved, and saves them.

    It must not refer to the job: a reference cycle would keep the job's GPU memory until the next garbage collection.

    Args:
        folder: where to; `None` saves nothing.
        emit: called with `CheckpointSaved`.
    """

    def __init__(self, folder: CheckpointFolder | None, spec: ModelSpec, emit: Callable[[Event], None]) -> None:
        self._folder = folder
        self._spec = spec
        self._emit = emit
        self._warned = False
        self._last: tuple[int, int, ExecutionPlan] | None = None
        self._seconds = 0.0
        self._spent = 0.0
        self._cost: float | None = None

    @property
    def saved(self) -> bool:
        """Whether a checkpoint of the job is on disk."""
        return self._last is not None

    def found(self, checkpoint: Checkpoint) -> None:
        """Record that this checkpoint is on disk already."""
        self._last = checkpoint.state

    def forget(self) -> None:
        """Record that the checkpoints were removed."""
        self._last = None

    def add_step(self, seconds: float) -> None:
        """Add the duration of a step."""
        self._seconds += seconds

    def due(self, make: Callable[[], Checkpoint | None]) -> bool:
        """Return whether it is time for a checkpoint; see `save`."""
        if self._folder is None:
            return False
        if self._cost is None:
            checkpoint = make()
            self._cost = estimated_cost(checkpoint.size if checkpoint else 0)
        return due(self._seconds, self._spent, self._cost)

    def save(self, make: Callable[[], Checkpoint | None]) -> Fact | None:
        """Save a checkpoint unless the same state is on disk already.

        Args:
            make: returns the state of the job, or `None` if there is nothing to save yet.

        Returns:
            The reason if it cannot be saved, the first time; the job continues without.
        """
        checkpoint = None if self._folder is None else make()
        if self._folder is None or checkpoint is None or checkpoint.state == self._last:
            return None
        problem = None
        started = time.perf_counter()
        try:
            self._folder.save(checkpoint, self._spec)
        except CheckpointError as error:
            if not self._warned:
                self._warned = True
                data = {"cause": error.fact}
                problem = Fact("pipeline.checkpoints_stopped", data)
                if self._last:
                    problem = Fact("pipeline.checkpoints_stopped_after", data | {"step": self._last[0]})
        else:
            self._last = checkpoint.state
            self._emit(CheckpointSaved(step=checkpoint.step))
        self._cost = time.perf_counter() - started
        self._spent += self._cost
        return problem


def identity(stamps: Stamps, plan: ExecutionPlan) -> str:
    """Return a digest of the clip and of the model's files, independent of how the clip is computed."""
    # Earlier versions had no videos as inputs, and their checkpoints can be used.
    unused = set() if plan.video else {*_VIDEO_FIELDS}
    unused |= set() if plan.video or plan.control or plan.images else _IMAGE_FIELDS
    unused |= {"control_scale"} if plan.control_scale == CONTROL_SCALE else set()
    unused |= {"preprocess"} if plan.preprocess == OFF else set()
    unused |= {"join"} if plan.extend_frames > 1 else {"join", "extend_frames"}
    unused |= set() if any(plan.outpaint) else {"outpaint"}
    unused |= {"overlap"} if plan.request.overlap == OVERLAP or plan.sections == 1 else set()
    unused |= set() if plan.control_start else {"control_start"}
    unused |= set() if plan.keyframes else {"keyframe_seconds"}
    excluded = {*_OTHER_FIELDS, *CONTROL_FIELDS, "keyframes", *unused} | (set() if plan.extend else {"extend"})
    excluded |= {"guidance_cache"} if plan.guidance_cache == OFF else set()
    excluded |= {"nag"} if plan.nag == NO_NAG else set()
    excluded |= set() if plan.refinement else {"stages"}
    # The prompt of a section may depend on when it is played, and the frames of a video that are read; so does sound.
    timed = plan.video or plan.control or plan.sound_shape or len(timed_prompts(plan.prompt)) > 1
    excluded -= {"fps"} if timed else set()
    clip = {name: value for name, value in plan.request_json().items() if name not in excluded}
    clip |= {field: use.digest for field, use in plan.inputs.items()}
    clip |= {"mask": plan.mask.digest} if plan.mask else {}
    clip |= {"preprocessor": plan.preprocessor.digest} if plan.preprocessor else {}
    clip |= {"mag_ratios": dict(plan.mag_ratios)} if plan.mag_ratios else {}
    return hashlib.sha256(json.dumps([clip, dict(stamps)], sort_keys=True).encode()).hexdigest()


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state, which later steps do not change.

    Raises:
        CheckpointError: if an attribute is something else than numbers, text and tensors.
    """
    state = {name: value for name, value in vars(scheduler).items() if name not in _SCHEDULER_CONFIGURATION}
    return {name: _copied(value, f"{type(scheduler).__name__}.{name}") for name, value in state.items()}


def restore_scheduler(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Restore the state of a scheduler whose timesteps are set.

    Raises:
        CheckpointError: if another version of the scheduler had this state.
    """
    # The state may have more: attributes that first appear in a step, such as UniPC's `this_order`.
    if scheduler_state(scheduler).keys() - state.keys():
        raise CheckpointError("checkpoint.other_scheduler", scheduler=type(scheduler).__name__)
    for name, value in state.items():
        setattr(scheduler, name, _copied(value, name))


def _copied(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str | torch.Tensor):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_copied(item, name) for item in value)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _copied(item, name) for key, item in value.items()}
    raise CheckpointError("checkpoint.scheduler_value", attribute=name, type=type(value).__name__)


def _packed(checkpoint: Checkpoint, stamps: Stamps) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    scheduler = _describe_all(checkpoint, tensors)
    on_cpu = _separate(tensors)
    section, sampling = checkpoint.section, checkpoint.sampling
    header = _Header(
        version=_VERSION if section is None else _SECTION_VERSION,
        section=None if section is None else (section.sections, section.steps),
        identity=identity(stamps, checkpoint.planned),
        planned=checkpoint.planned.model_dump_json(),
        plan=checkpoint.plan.model_dump_json(),
        step=checkpoint.step,
        of=checkpoint.of,
        scheduler=scheduler,
        warnings=checkpoint.warnings,
        timings=checkpoint.timings,
        load_seconds=checkpoint.load_seconds,
        passes_left_out=0 if sampling is None else sampling.guidance.left_out,
        stage=0 if sampling is None else sampling.stage,
    ).model_dump_json()
    return safetensors.torch.save(on_cpu, metadata={HEADER_KEY: header, _CHECKSUM: str(_checksum(header, on_cpu))})


def _read(path: Path, stamps: Stamps, plan: ExecutionPlan) -> Checkpoint | None:
    if not path.is_file():
        return None
    try:
        metadata = read_header(path).metadata
        with safe_open(path, framework="pt") as file:
            # Copies, because tensors in the file have any alignment, and arithmetic may round differently there.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
        if parse_json(metadata[HEADER_KEY].encode(), infinite=True)["version"] not in {_VERSION, _SECTION_VERSION}:
            raise CheckpointError("checkpoint.other_version")
        header = _Header.model_validate_json(metadata[HEADER_KEY])
        if metadata[_CHECKSUM] != str(_checksum(metadata[HEADER_KEY], tensors)):
            raise CheckpointError("checkpoint.damaged")
        if header.identity != identity(stamps, plan):
            raise CheckpointError("checkpoint.other_clip")
        try:
            planned, current = (ExecutionPlan.model_validate_json(text) for text in (header.planned, header.plan))
        except ValidationError as error:
            raise CheckpointError("checkpoint.other_version") from error
        device = plan.components["transformer"].device
        sampling = None
        if header.scheduler is not None:
            differences = {name: tensor for name, tensor in tensors.items() if name.startswith(_GUIDANCE)}
            sampling = SamplingState(
                header.step,
                tensors["latents"].to(device),
                _tensors_in(header.scheduler, tensors, device),
                replace(
                    Guidance.of(current),
                    differences={
                        name.removeprefix(_GUIDANCE): tensor.to(device) for name, tensor in differences.items()
                    },
                    left_out=header.passes_left_out,
                ),
                header.stage,
            )
        negative, embeds, video = (tensors.get(name) for name in ("negative", "image_embeds", _VIDEO))
        prompts = sorted(
            (name for name in tensors if name.startswith(_PROMPT)), key=lambda name: int(name.removeprefix(_PROMPT))
        )
        given_frames, given_half = (_given_in(tensors, prefix, device) for prefix in (_GIVEN, _GIVEN_HALF))
        return Checkpoint(
            planned=planned,
            plan=current,
            of=header.of,
            conditioning=Conditioning(
                tensors["positive"].to(device),
                None if negative is None else negative.to(device),
                given_frames,
                tuple(tensors[name].to(device) for name in prompts),
                None if embeds is None else embeds.to(device),
                None if video is None else video.to(device),
                given_half,
            ),
            sampling=sampling,
            section=_section_in(header, tensors, device),
            warnings=header.warnings,
            timings=header.timings,
            load_seconds=header.load_seconds,
        )
    except (ModelError, OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError("checkpoint.damaged") from error


def _describe_all(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> Any:
    """Put all tensors of a checkpoint into `tensors`; return the scheduler's state as JSON."""
    tensors["positive"] = checkpoint.conditioning.positive
    if checkpoint.conditioning.negative is not None:
        tensors["negative"] = checkpoint.conditioning.negative
    conditioning = checkpoint.conditioning
    for prefix, given_frames in ((_GIVEN, conditioning.given), (_GIVEN_HALF, conditioning.given_half)):
        if given_frames is not None:
            tensors[f"{prefix}{given_frames.kind}"] = given_frames.latents
    for number, embeds in enumerate(checkpoint.conditioning.others):
        tensors[f"{_PROMPT}{number}"] = embeds
    if checkpoint.conditioning.image_embeds is not None:
        tensors["image_embeds"] = checkpoint.conditioning.image_embeds
    if checkpoint.conditioning.video is not None:
        tensors[_VIDEO] = checkpoint.conditioning.video
    section = checkpoint.section
    if section is not None:
        tensors[f"{_SECTION}history"], tensors[f"{_SECTION}generator"] = section.history, section.generator
        if section.latents is not None:
            tensors[f"{_SECTION}latents"] = section.latents
    if checkpoint.sampling is None:
        return None
    tensors["latents"] = checkpoint.sampling.latents
    for which, difference in checkpoint.sampling.guidance.differences.items():
        tensors[f"{_GUIDANCE}{which}"] = difference
    state = checkpoint.sampling.scheduler
    return _described(None if state is None else dict(state), tensors)


def _given_in(tensors: Mapping[str, torch.Tensor], prefix: str, device: str) -> GivenFrames | None:
    key = next((name for name in tensors if name.startswith(prefix)), None)
    return None if key is None else GivenFrames(key.removeprefix(prefix), tensors[key].to(device))


def _section_in(header: _Header, tensors: Mapping[str, torch.Tensor], device: str) -> SectionProgress | None:
    """Return the progress of a video that is made in sections; its noise is drawn on the CPU."""
    if header.section is None:
        return None
    latents = tensors.get(f"{_SECTION}latents")
    return SectionProgress(
        sections=header.section[0],
        history=tensors[f"{_SECTION}history"].to(device),
        generator=tensors[f"{_SECTION}generator"],
        steps=header.section[1],
        latents=None if latents is None else latents.to(device),
    )


def _described(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a scheduler's value as JSON; its tensors go into `tensors` and are replaced by their names."""
    if isinstance(value, torch.Tensor):
        name = f"scheduler.{len(tensors)}"
        tensors[name] = value
        return {"tensor": name, "moves": value.device.type != "cpu"}
    if isinstance(value, dict):
        return {"dict": {key: _described(item, tensors) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"  # also a torch.Size
        return {kind: [_described(item, tensors) for item in value]}
    return {"value": value}


def _tensors_in(described: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: str) -> Any:
    """Return the inverse of `_described`; tensors that were on a device are moved to `device`."""
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


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors on the CPU, each with its own storage, as safetensors requires; a scheduler's may be views."""
    separate, pointers = {}, set()
    for name, tensor in tensors.items():
        on_cpu = tensor.detach().cpu().contiguous()
        storage = on_cpu.untyped_storage()
        if storage.data_ptr() in pointers or storage.nbytes() != on_cpu.nbytes:
            on_cpu = on_cpu.clone()
        pointers.add(on_cpu.untyped_storage().data_ptr())
        separate[name] = on_cpu
    return separate


def _checksum(header: str, tensors: Mapping[str, torch.Tensor]) -> int:
    """Return a CRC-32 of header and tensors; safetensors itself checks names and sizes only."""
    total = zlib.crc32(header.encode())
    for name in sorted(tensors):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return total


def _write(target: Path, data: bytes) -> None:
    partial = target.with_name(f"{target.name}.{os.getpid()}{_PARTIAL}")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    move_over(partial, target)
    sync_folder(target.parent)
