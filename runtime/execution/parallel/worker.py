"""The process of one GPU: loads what it is told to, computes its share, and answers.

    python -m runtime.execution.parallel.worker JSON     started by `launcher`, never by hand

It ends when whoever leads is gone, in the middle of whatever it does.
"""

import json
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from runtime.core.errors import TandemError
from runtime.core.loras import LoraUse
from runtime.core.plan import EAGER, ComponentPlan, Speed
from runtime.execution.attention import problem
from runtime.execution.components import PyTorchDenoiser, StripDecoder, components_of
from runtime.execution.memory import ran_out, release_cached_memory
from runtime.execution.parallel.ipc import Message, Wire
from runtime.execution.parallel.ulysses import Tokens
from runtime.execution.video_decoder import as_bytes
from runtime.models.registry import read_spec
from runtime.models.weights import load_module

_ALIVE_SECONDS = 2.0
# Who waits for another process is ended by whoever leads, which knows more; this is for when nobody leads.
_TIMEOUT = timedelta(days=1)

Answer = tuple[dict[str, Any], list[torch.Tensor]]


class Rank:
    """What one process holds, and does.

    Args:
        number: among those of `job`.
        job: as `Group` gives it to `launcher`.
    """

    def __init__(self, number: int, job: Mapping[str, Any]) -> None:
        self._number = number
        self._device = torch.device(job["devices"][number])
        self._sequence = int(job["sequence"])
        self._cuda = self._device.type == "cuda"
        self._tokens = self._join(job)
        self._modules: dict[str, torch.nn.Module] = {}
        self._denoisers: dict[str, PyTorchDenoiser] = {}
        self._caching: dict[str, ExitStack] = {}
        self._decoder: StripDecoder | None = None
        self._vae: ComponentPlan | None = None
        self._frames: Iterator[torch.Tensor] = iter(())
        self._texts: dict[int, torch.Tensor] = {}

    def _join(self, job: Mapping[str, Any]) -> Tokens | None:
        """Meet the others; return how some of them share a pass's tokens with this one, where there are any."""
        count = len(job["devices"])
        if self._cuda:
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(max((os.cpu_count() or 1) // count, 1))
        dist.init_process_group(
            "nccl" if self._cuda else "gloo",
            init_method=(Path(job["folder"]) / "meet").as_uri(),
            rank=self._number,
            world_size=count,
            timeout=_TIMEOUT,
        )
        if self._sequence == 1:
            return None
        # Everybody makes every group.
        groups = [
            dist.new_group(list(range(first, first + self._sequence)), timeout=_TIMEOUT)
            for first in range(0, count, self._sequence)
        ]
        return Tokens(groups[self._number // self._sequence])

    def load(self, said: Mapping[str, Any], _: list[torch.Tensor]) -> Answer:
        """Load a component."""
        name = said["name"]
        spec = read_spec(Path(said["directory"]), said["model"])
        spec = replace(spec, loras=tuple(map(LoraUse.model_validate, said["loras"])))
        part = TypeAdapter(ComponentPlan).validate_python({**said["part"], "device": str(self._device)})
        module: Any = load_module(spec, name, part)
        self._modules[name] = module
        speed = Speed(**said["speed"])
        components = components_of(spec)
        if name == "vae":
            dtype, self._vae = part.dtype, part
            self._decoder = components.strip_decoder(module, self._device, self._number, dist.get_world_size(), speed)
        else:
            denoiser = components.denoiser(module)
            taken = denoiser.dtype
            dtype = str(taken).removeprefix("torch.")
            against = problem(speed.attention, str(self._device), taken, spec.transformer.attention_head_dim)
            if against is not None:
                sys.stderr.write(f"{speed.attention} attention does not run here: {against}.\n")
                speed = speed.replace(attention=EAGER.attention)
            denoiser.compute(speed)
            self._denoisers[name] = denoiser
            if self._tokens is not None:
                components.share_tokens(module, self._tokens)
        return {"dtype": dtype}, []

    def free(self, said: Mapping[str, Any], _: list[torch.Tensor]) -> Answer:
        """Let go of a component."""
        name = said["name"]
        self._caching.pop(name, ExitStack()).close()
        self._denoisers.pop(name, None)
        module = self._modules.pop(name, None)
        if name == "vae":
            self._decoder, self._frames = None, iter(())
        del module
        release_cached_memory(unreachable=True)  # hooks tie a module to itself
        return {}, []

    def cache(self, said: Mapping[str, Any], _: list[torch.Tensor]) -> Answer:
        """Have a transformer reuse across steps what is said, and let go of what it kept so far."""
        name = said["name"]
        self._caching.pop(name, ExitStack()).close()
        caching = self._denoisers[name].caching(said["step_cache"], self._tokens)
        self._caching[name] = ExitStack()
        self._caching[name].enter_context(caching)
        return {}, []

    def forward(self, said: Mapping[str, Any], tensors: list[torch.Tensor]) -> Answer:
        """Compute this process's share of a pass with each of one or two texts; the first to share one answers it."""
        latents, timestep, *new = tensors
        for number in said["forget"]:
            self._texts.pop(number, None)
        for number, text in zip(said["new"], new, strict=True):
            self._texts[number] = text.to(self._device)
        name, texts = said["name"], said["texts"]
        if self._tokens is not None:
            self._tokens.count = said["tokens"]
        groups = dist.get_world_size() // self._sequence
        mine = [place for place in range(len(texts)) if place % groups == self._number // self._sequence]
        here, when = latents.to(self._device), timestep.to(self._device)
        denoiser = self._denoisers[name]
        if said["fresh"]:
            denoiser.reset_cache()
        made = [denoiser(here, when, self._texts[texts[place]], said["which"][place]) for place in mine]
        first = self._number % self._sequence == 0
        return {"places": mine if first else []}, made if first else []

    def decode(self, said: Mapping[str, Any], tensors: list[torch.Tensor]) -> Answer:
        """Begin with a clip."""
        assert self._decoder is not None
        self._frames = self._decoder.frames(tensors[0], said["chunk"])
        return {}, []

    def next(self, _: Mapping[str, Any], __: list[torch.Tensor]) -> Answer:
        """Decode this process's strip of the next few frames, as bytes."""
        return {}, [as_bytes(next(self._frames), self._vae)]

    def memory(self, *, anew: bool) -> dict[str, int]:
        """Return what is allocated on the GPU at most since it was asked anew, and what is taken from the driver."""
        if not self._cuda:
            return {"peak": 0, "taken": 0}
        told = {"peak": torch.cuda.max_memory_allocated(), "taken": torch.cuda.memory_reserved()}
        if anew:
            torch.cuda.reset_peak_memory_stats()
        return told


def serve(number: int, job: Mapping[str, Any]) -> None:
    """Do what is said until nobody leads any more."""
    wire = Wire(socket.socket(fileno=job["ends"][number]))
    heard: queue.Queue[Message] = queue.Queue()
    threading.Thread(target=_listen, args=(wire, heard), daemon=True).start()
    rank = Rank(number, job)
    wire.send({"ready": os.getpid()})
    threading.Thread(target=_say_alive, args=(wire,), daemon=True).start()
    does: dict[str, Callable[[Mapping[str, Any], list[torch.Tensor]], Answer]] = {
        "load": rank.load,
        "free": rank.free,
        "cache": rank.cache,
        "forward": rank.forward,
        "decode": rank.decode,
        "next": rank.next,
    }
    while True:
        message = heard.get()
        try:
            said, tensors = does[message.said["do"]](message.said, message.tensors)
        except Exception as error:
            traceback.print_exc()
            wire.send({"failed": _kind(error), **_described(error)})
        else:
            wire.send({"done": said, **rank.memory(anew=message.said["anew"])}, tensors)


def _kind(error: Exception) -> str:
    if isinstance(error, TandemError):
        return type(error).__name__
    return ran_out(error) or "defect"


def _described(error: Exception) -> dict[str, Any]:
    described: dict[str, Any] = {"what": str(error) or type(error).__name__}
    if isinstance(error, TandemError):
        described["fact"] = error.fact.model_dump(mode="json")
    return described


def _listen(wire: Wire, heard: "queue.Queue[Message]") -> None:
    while (message := wire.receive()) is not None:
        heard.put(message)
    os._exit(0)


def _say_alive(wire: Wire) -> None:
    while True:
        threading.Event().wait(_ALIVE_SECONDS)
        try:
            wire.send({"alive": True})
        except OSError:
            return


if __name__ == "__main__":
    given: dict[str, Any] = json.loads(sys.argv[1])
    serve(given["number"], given)
