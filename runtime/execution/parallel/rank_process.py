"""One process of a job on several GPUs: loads components and computes its share of each task.

`group.Group`, the coordinator, starts one such process per GPU and sends it tasks, which are methods of `Rank`. A
message consists of JSON values and the bytes of tensors: no side unpickles anything.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from runtime.core.errors import DeviceLostError, TandemError, first_line, ran_out
from runtime.core.facts import Fact
from runtime.core.loras import LoraUse
from runtime.core.plan import ComponentPlan, Speed, Split
from runtime.core.processes import end_with_parent, lead_own_group, use_no_semaphores
from runtime.engines.service import OpenEngines, open_engines
from runtime.engines.store import EngineStore
from runtime.execution.attention import with_usable_attention
from runtime.execution.block_engines import BlockEngines
from runtime.execution.components import (
    ControlDenoiser,
    PyTorchDenoiser,
    SectionDenoiser,
    SectionInputs,
    StreamDenoiser,
    StripDecoder,
    components_of,
)
from runtime.execution.decoded_frames import as_bytes
from runtime.execution.engine_failures import failure_of_engine
from runtime.execution.memory import release_cached_memory
from runtime.execution.parallel.ulysses import Tokens
from runtime.execution.streams import Streams
from runtime.models.quantized_cache import QuantizedCache
from runtime.models.registry import read_spec
from runtime.models.sections import Section
from runtime.models.single_file import reassemble
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from runtime.upstream.torch import cuda_failure

_HEARTBEAT_SECONDS = 2.0
# Effectively none: the coordinator finds hanging processes and ends them.
_COLLECTIVE_TIMEOUT = timedelta(days=1)
# Set to the loopback interface, because all processes are on one machine.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Exchanges do not wait for the thread blocks of attention that they overlap with.
PRIORITY_VARIABLE = "TORCH_NCCL_HIGH_PRIORITY"

Answer = tuple[dict[str, Any], list[torch.Tensor]]


class Message(NamedTuple):
    """JSON values and tensors on the CPU."""

    values: dict[str, Any]
    tensors: list[torch.Tensor]


def send(connection: Connection, values: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
    """Send a message: its JSON with the dtypes and shapes of the tensors, then their bytes.

    Args:
        values: JSON values.
        tensors: of any dtype, shape and device.

    Raises:
        OSError: if the other end is closed.
        BlockingIOError: if the connection has a timeout, and the other end reads nothing within it.
    """
    sent = [tensor.detach().cpu().contiguous() for tensor in tensors]
    kinds = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in sent]
    connection.send_bytes(json.dumps([dict(values), kinds]).encode())
    for tensor in sent:
        rest = _bytes_of(tensor)
        while rest:
            rest = rest[os.write(connection.fileno(), rest) :]


def receive(connection: Connection) -> Message:
    """Wait for a message and return it.

    Raises:
        EOFError, OSError: if the other end is closed.
        BlockingIOError: if the connection has a timeout, and a message stalls for that long.
    """
    if sys.platform == "win32":
        raise NotImplementedError  # several GPUs cannot share a job there, see `planner.placement`
    values, kinds = json.loads(connection.recv_bytes())
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in kinds]
    for tensor in tensors:
        rest = _bytes_of(tensor)
        while rest:
            count = os.readv(connection.fileno(), [rest])
            if not count:
                raise EOFError
            rest = rest[count:]
    return Message(values, tensors)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class Rank:
    """The tasks of one process, and the components that it has loaded.

    Each task takes the JSON values and the tensors of a message, and returns those of the answer.

    Args:
        number: rank of this process, from 0.
        split: the devices of all processes and how they share a job.
        folder: folder of the file with which torch.distributed connects the processes.
    """

    def __init__(self, number: int, split: Split, folder: Path) -> None:
        self._number = number
        self._device = torch.device(split.devices[number])
        self._sequence = split.sequence
        self._cuda = self._device.type == "cuda"
        self._tokens = self._join(len(split.devices), folder)
        self._modules: dict[str, torch.nn.Module] = {}
        self._denoisers: dict[str, PyTorchDenoiser] = {}
        self._step_caches: dict[str, ExitStack] = {}
        self._decoder: StripDecoder | None = None
        self._vae: ComponentPlan | None = None
        self._frames: Iterator[torch.Tensor] = iter(())
        self._texts: dict[int, torch.Tensor] = {}
        # Channels of the latents that are not denoised, by transformer.
        self._beside: dict[str, torch.Tensor] = {}
        self._engines: dict[str, OpenEngines] = {}
        # What block engines report, until the next answer.
        self._failed: list[Fact] = []
        self._skipped: list[Fact] = []

    def _join(self, count: int, folder: Path) -> Tokens | None:
        """Initialize torch.distributed; return the division of a pass's tokens, `None` if passes are not divided."""
        if self._cuda:
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(max((os.cpu_count() or 1) // count, 1))
        for variable in _INTERFACE_VARIABLES:
            os.environ.setdefault(variable, "lo")
        os.environ.setdefault(PRIORITY_VARIABLE, "1")
        dist.init_process_group(
            "nccl" if self._cuda else "gloo",
            init_method=(folder / "rendezvous").as_uri(),
            rank=self._number,
            world_size=count,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        if self._sequence == 1:
            return None
        # torch.distributed requires every process to create all groups, including those of other processes.
        groups = [
            dist.new_group(list(range(first, first + self._sequence)), timeout=_COLLECTIVE_TIMEOUT)
            for first in range(0, count, self._sequence)
        ]
        return Tokens(groups[self._number // self._sequence])

    def load(self, task: Mapping[str, Any], _: list[torch.Tensor]) -> Answer:
        """Load a component."""
        name = task["name"]
        directory = Path(task["directory"])
        if task["files"]:
            files = {component: Path(path) for component, path in task["files"].items()}
            spec = reassemble(files, task["configs"], directory)
        else:
            spec = read_spec(directory, task["model"])
        spec = replace(spec, loras=tuple(map(LoraUse.model_validate, task["loras"])))
        part = TypeAdapter(ComponentPlan).validate_python({**task["part"], "device": str(self._device)})
        folder = task["quantized"]
        # All processes quantize the same weights; one writes them.
        cache = None if folder is None else QuantizedCache(Path(folder), writes=self._number == 0)
        module: Any = load_module(spec, name, part, cache=cache)
        self._modules[name] = module
        speed = Speed(**task["speed"])
        components = components_of(spec)
        if name == "vae":
            dtype, self._vae = part.dtype, part
            self._decoder = components.strip_decoder(module, self._device, self._number, dist.get_world_size(), speed)
        else:
            denoiser = components.denoiser(module)
            dtype = str(denoiser.dtype).removeprefix("torch.")
            head_width = spec.transformer.attention_head_dim
            speed, problems = with_usable_attention(speed, str(self._device), denoiser.dtype, head_width)
            sys.stderr.writelines(f"{reason}\n" for reason in problems.values())
            denoiser.compute(speed, engines=self._block_engines(spec, name, part, task["engines"]))
            self._denoisers[name] = denoiser
            if self._tokens is not None:
                components.share_tokens(module, self._tokens)
        return {"dtype": dtype}, []

    def _block_engines(
        self, spec: ModelSpec, name: str, part: ComponentPlan, folder: str | None
    ) -> BlockEngines | None:
        """Open a transformer's block engines, if it has any; if that fails, it is reported with the first pass.

        The process then computes in PyTorch what the others compute on engines.
        """
        opened, uses = None, part.engines or part.failed_engines
        if not uses:
            return None
        if folder is not None:
            try:
                # The coordinator's limit applies.
                store = EngineStore(Path(folder), sys.maxsize)
                opened = self._engines[name] = open_engines(store, spec, name, uses, part.device)
            except Exception as error:
                self._failed.append(failure_of_engine(error, part.device, "execution.engine_load_out_of_memory"))
        return BlockEngines(opened, spec, name, uses, self._failed.append, self._skipped.append)

    def free(self, task: Mapping[str, Any], _: list[torch.Tensor]) -> Answer:
        """Free a component."""
        name = task["name"]
        self._step_caches.pop(name, ExitStack()).close()
        self._denoisers.pop(name, None)
        self._modules.pop(name, None)
        self._beside.pop(name, None)
        if name in self._engines:
            self._engines.pop(name).close()
        if name == "vae":
            self._decoder, self._frames = None, iter(())
        release_cached_memory(unreachable=True)  # hooks reference the module
        return {}, []

    def cache(self, task: Mapping[str, Any], _: list[torch.Tensor]) -> Answer:
        """Set a transformer's step cache; it starts empty."""
        name = task["name"]
        self._step_caches.pop(name, ExitStack()).close()
        self._step_caches[name] = ExitStack()
        self._step_caches[name].enter_context(self._denoisers[name].caching(task["step_cache"], self._tokens))
        return {}, []

    def forget(self, task: Mapping[str, Any], _: list[torch.Tensor]) -> Answer:
        """Free what a transformer caches for a clip, and its CUDA graphs."""
        self._beside.pop(task["name"], None)
        self._denoisers[task["name"]].forget()
        return {}, []

    def see_section(self, task: Mapping[str, Any], tensors: list[torch.Tensor]) -> Answer:
        """Set what a section of a video is sampled from; `tensors` are those of `SectionInputs`, in its order."""
        clean, history_2x, history_4x, image_embeds = (tensor.to(self._device) for tensor in tensors)
        inputs = SectionInputs(
            section=Section.from_json(task["section"]),
            clean=clean,
            history_2x=history_2x,
            history_4x=history_4x,
            image_embeds=image_embeds,
            guidance_scale=task["guidance_scale"],
        )
        cast("SectionDenoiser", self._denoisers[task["name"]]).see(inputs)
        return {}, []

    def see_streams(self, task: Mapping[str, Any], _: list[torch.Tensor]) -> Answer:
        """Set the shapes of video and sound, and the blocks that passes of one kind skip."""
        streams = TypeAdapter(Streams).validate_python(task["streams"])
        cast("StreamDenoiser", self._denoisers[task["name"]]).see(streams, tuple(task["skipping_blocks"]))
        return {}, []

    def steer(self, task: Mapping[str, Any], tensors: list[torch.Tensor]) -> Answer:
        """Set how much a video follows what steers it, and the frames of a face, if there are any."""
        cast("ControlDenoiser", self._denoisers[task["name"]]).steer(tuple(task["scales"]), *tensors)
        return {}, []

    def forward(self, task: Mapping[str, Any], tensors: list[torch.Tensor]) -> Answer:
        """Compute this process's share of one or more guidance passes.

        The first process of those that share a pass returns its result. Values of the task, besides `name`:

        - `texts`, `which`: the text embeddings (by number) and the kind of each pass
        - `new`, `forget`: numbers of the text embeddings that this message contains, and of those to free
        - `fresh`, `exact`: see `Denoiser.begin_step`
        - `beside`: channels that are not denoised: "new" if the message has them, "sent" for the last ones, `None`
        """
        name = task["name"]
        latents, timestep, *new = tensors
        if task["beside"] == "new":
            self._beside[name] = new.pop(0).to(self._device)
        for number in task["forget"]:
            self._texts.pop(number, None)
        for number, text in zip(task["new"], new, strict=True):
            self._texts[number] = text.to(self._device)
        texts = task["texts"]
        # Consecutive processes share a pass; the groups of them take the passes in turn.
        group, first = self._number // self._sequence, self._number % self._sequence == 0
        groups = dist.get_world_size() // self._sequence
        passes = [index for index in range(len(texts)) if index % groups == group]
        latents, timestep = latents.to(self._device), timestep.to(self._device)
        if task["beside"]:
            latents = torch.cat([latents, self._beside[name]], dim=1)
        denoiser = self._denoisers[name]
        denoiser.begin_step(fresh=task["fresh"], exact=task["exact"])
        results = [denoiser(latents, timestep, self._texts[texts[index]], task["which"][index]) for index in passes]
        reports = {"failed": self._failed, "skipped": self._skipped}
        answer = {name: [fact.model_dump(mode="json") for fact in facts] for name, facts in reports.items()}
        self._failed.clear()
        self._skipped.clear()
        return ({"passes": passes, **answer}, results) if first else ({"passes": [], **answer}, [])

    def decode(self, task: Mapping[str, Any], tensors: list[torch.Tensor]) -> Answer:
        """Start decoding a clip; `next` returns its frames."""
        assert self._decoder is not None
        self._frames = self._decoder.frames(tensors[0], task["chunk"])
        return {}, []

    def next(self, _: Mapping[str, Any], __: list[torch.Tensor]) -> Answer:
        """Decode this process's strip of the next frames, as uint8."""
        return {}, [as_bytes(next(self._frames), self._vae)]

    def memory(self, *, reset_peak: bool) -> dict[str, int]:
        """Return the peak bytes that PyTorch allocated since the last reset, and the bytes that it reserves now."""
        if not self._cuda:
            return {"peak": 0, "reserved": 0}
        memory = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        if reset_peak:
            torch.cuda.reset_peak_memory_stats()
        return memory


def serve(number: int, split: Split, folder: Path, connection: Connection, heartbeats: Any) -> None:
    """Do tasks until this process is ended; the target function of `group.Group`'s processes.

    Args:
        number, split, folder: see `Rank`; standard output and error go to `<number>.log` in the folder.
        heartbeats: a shared array of float64; this process writes `time.monotonic()` to element `number`.
    """
    log = os.open(folder / f"{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    lead_own_group()
    end_with_parent()
    use_no_semaphores()
    rank = Rank(number, split, folder)
    threading.Thread(target=_beat, args=(number, heartbeats), name="heartbeat", daemon=True).start()
    send(connection, {"done": {}})
    tasks: dict[str, Callable[[Mapping[str, Any], list[torch.Tensor]], Answer]] = {
        "load": rank.load,
        "free": rank.free,
        "cache": rank.cache,
        "forget": rank.forget,
        "see_section": rank.see_section,
        "see_streams": rank.see_streams,
        "steer": rank.steer,
        "forward": rank.forward,
        "decode": rank.decode,
        "next": rank.next,
    }
    while True:
        values, tensors = receive(connection)
        try:
            answer, results = tasks[values["task"]](values, tensors)
        except Exception as error:
            traceback.print_exc()
            send(connection, {"failed": _describe(error, split.devices[number])})
        else:
            send(connection, {"done": answer, **rank.memory(reset_peak=values["reset_peak"])}, results)


def _describe(error: Exception, device: str) -> dict[str, Any]:
    """Return an error as JSON values: a `TandemError` with its fact, else the kind of memory that ran out, if any."""
    text = str(error) or type(error).__name__
    if device.startswith("cuda") and cuda_failure(device) is not None:
        error = DeviceLostError(error=first_line(error))
    if isinstance(error, TandemError):
        return {"type": type(error).__name__, "fact": error.fact.model_dump(mode="json"), "text": text}
    return {"memory": ran_out(error), "text": text}


def _beat(number: int, heartbeats: Any) -> None:
    while True:
        heartbeats[number] = time.monotonic()
        time.sleep(_HEARTBEAT_SECONDS)
