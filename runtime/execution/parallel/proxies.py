"""Components that several GPUs run together: loading them into a group of processes, and calling them like others."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count

import numpy as np
import torch
from pydantic import TypeAdapter

from runtime.core.errors import EngineError
from runtime.core.facts import Fact
from runtime.core.plan import EAGER, ComponentPlan, Speed, Split
from runtime.core.step_cache import NONE
from runtime.engines.store import EngineStore
from runtime.execution.components import PROMPTED, SectionInputs
from runtime.execution.decoded_frames import longer_side
from runtime.execution.parallel.group import Group, Limits
from runtime.execution.streams import Streams
from runtime.machine.probe import gpu_index
from runtime.models.quantized_cache import QuantizedCache
from runtime.models.spec import ModelSpec

_PARTS = TypeAdapter(ComponentPlan)
_STREAMS = TypeAdapter(Streams)
_TEXTS_KEPT = 2


def shared_speed(speed: Speed, name: str) -> Speed:
    """Return the options of a plan's `Speed` that apply on several GPUs: no paired passes."""
    if name == "vae":
        return Speed(vae_kernels=speed.vae_kernels, channels_last=speed.channels_last)
    fields = ("attention", "sparse_tau", "nag", "compiled", "text_kept", "graphed", "fused")
    return Speed(**{field: getattr(speed, field) for field in fields})


class SentTexts:
    """The text embeddings that the processes have, so that each is sent once."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, torch.Tensor]] = []
        self._numbers = count()

    def number(self, texts: list[torch.Tensor]) -> tuple[list[int], list[int], list[int], list[torch.Tensor]]:
        """Return each text's number, the numbers to forget, the new numbers, and the tensors of the new ones."""
        numbers, new, sent = [], [], []
        for text in texts:
            text_number = next((number for number, tensor in self._entries if tensor is text), None)
            if text_number is None:
                text_number = next(self._numbers)
                self._entries.append((text_number, text))
                new.append(text_number)
                sent.append(text)
            numbers.append(text_number)
        unused = [number for number, _ in self._entries if number not in numbers]
        forgotten = unused[: max(len(self._entries) - _TEXTS_KEPT, 0)]
        self._entries = [(number, text) for number, text in self._entries if number not in forgotten]
        return numbers, forgotten, new, sent


class SharedDenoiser:
    """One expert on several GPUs; see `Denoiser`.

    Args:
        dtype: of the transformer; tensors are rounded to it before they are sent.
        check: raises if the job is cancelled.

    Attributes:
        channels: how many channels of the latents are denoised; `None` if all are sent in each step.
        on_failed, on_skipped: called with what a process reports of its block engines; see `BlockEngines`.
    """

    pairs = True
    channels: int | None = None
    on_failed: Callable[[Fact], None]
    on_skipped: Callable[[Fact], None]

    def __init__(
        self, group: Group, name: str, dtype: torch.dtype, texts: SentTexts, check: Callable[[], None]
    ) -> None:
        self._group = group
        self._name = name
        self._dtype = dtype
        self._texts = texts
        self._beside: torch.Tensor | None = None
        self._fresh = self._exact = False
        self.check = check

    @contextmanager
    def caching(self, step_cache: str) -> Iterator[None]:
        """Reuse values across steps according to `step_cache` while entered.

        Processes that share the tokens of a pass decide together; each pass of guidance has its own cache.
        """
        if step_cache == NONE:
            yield
            return
        self._group.call("cache", self.check, name=self._name, step_cache=step_cache)
        try:
            yield
        finally:
            if self._group.alive:
                self._group.call("cache", _not_cancelled, name=self._name, step_cache=NONE)

    def forget(self) -> None:
        """Free what the processes cache for a clip, and their CUDA graphs. Not for block engines, which it drops."""
        self._beside = None
        if self._group.alive:
            self._group.call("forget", _not_cancelled, name=self._name)

    def begin_step(self, *, fresh: bool, exact: bool) -> None:
        """See `Denoiser`; the processes do it with the next pass."""
        self._fresh, self._exact = fresh, exact

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """See `Denoiser`."""
        return self.together(latents, timestep, {which: text_embeds})[0]

    def together(
        self, latents: torch.Tensor, timestep: torch.Tensor, texts: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """See `Denoiser`; passes run at the same time if they run on different GPUs."""
        fresh, self._fresh = self._fresh, False
        numbers, forgotten, new, sent = self._texts.number(list(texts.values()))
        denoised, beside = self._divided(latents.to(self._dtype))
        is_new = beside is not None and not self._has_sent(beside)
        tensors = [denoised, timestep, *([beside] if beside is not None and is_new else [])]
        answers = self._group.call(
            "forward",
            self.check,
            [*tensors, *(text.to(self._dtype) for text in sent)],
            name=self._name,
            texts=numbers,
            beside=None if beside is None else "new" if is_new else "sent",
            which=list(texts),
            fresh=fresh,
            exact=self._exact,
            forget=forgotten,
            new=new,
        )
        if beside is not None and is_new:
            self._beside = beside.clone()
        results: dict[int, torch.Tensor] = {}
        for answer in answers:
            results |= zip(answer.values["passes"], answer.tensors, strict=True)
            for reason in answer.values["failed"]:
                self.on_failed(Fact.model_validate(reason))
            for reason in answer.values["skipped"]:
                self.on_skipped(Fact.model_validate(reason))
        return [results[index].to(latents.device) for index in range(len(texts))]

    def _divided(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the channels that are denoised, and those beside them, if there are any."""
        if self.channels is None or latents.shape[1] == self.channels:
            return latents, None
        return latents[:, : self.channels], latents[:, self.channels :]

    def _has_sent(self, beside: torch.Tensor) -> bool:
        """Return whether the processes have these channels, which are the same in all steps of a clip."""
        sent = self._beside
        return sent is not None and sent.shape == beside.shape and torch.equal(sent, beside)


class SharedSectionDenoiser(SharedDenoiser):
    """One of a model that makes videos in sections; see `SectionDenoiser`."""

    def see(self, inputs: SectionInputs) -> None:
        """See `SectionDenoiser`; all processes of a pass see the whole, and share its tokens with those of the text."""
        tensors = inputs.clean, inputs.history_2x, inputs.history_4x, inputs.image_embeds
        self._group.call(
            "see_section",
            self.check,
            [tensor.to(self._dtype) for tensor in tensors],
            name=self._name,
            section=inputs.section.as_json(),
            guidance_scale=inputs.guidance_scale,
        )


class SharedStreamDenoiser(SharedDenoiser):
    """One of a model that denoises video and sound together; see `StreamDenoiser`."""

    def see(self, streams: Streams, skipping_blocks: tuple[int, ...]) -> None:
        """See `StreamDenoiser`."""
        self._group.call(
            "see_streams",
            self.check,
            name=self._name,
            streams=_STREAMS.dump_python(streams, mode="json"),
            skipping_blocks=skipping_blocks,
        )


class SharedControlDenoiser(SharedDenoiser):
    """One of a model that a control video steers; see `ControlDenoiser`."""

    def steer(self, scales: tuple[float, ...], face: torch.Tensor | None = None) -> None:
        """See `ControlDenoiser`."""
        self._group.call("steer", self.check, [] if face is None else [face], name=self._name, scales=scales)


def _denoiser_kind(spec: ModelSpec) -> type[SharedDenoiser]:
    """Return the class of a model's denoisers."""
    if spec.sound_latents is not None:
        return SharedStreamDenoiser
    if spec.control_input is not None:
        return SharedControlDenoiser
    return SharedDenoiser if spec.section is None else SharedSectionDenoiser


class SharedVideoDecoder:
    """The VAE's decoder on several GPUs, each of which decodes a strip of every frame; see `VideoDecoder`."""

    def __init__(self, group: Group, check: Callable[[], None]) -> None:
        self._group = group
        self.check = check

    def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
        """See `VideoDecoder`; yields bytes, (frames, height, width, 3) uint8 on the CPU."""
        assert tile is None, "tiles are decoded on one GPU"
        group, check = self._group, self.check
        group.call("decode", check, [latents], chunk=chunk)
        calls = 1 + -(-(latents.shape[2] - 1) // chunk)
        # The axis in frames, (frames, height, width, 3).
        along = longer_side(latents) - 2
        group.send("next")
        for number in range(calls):
            strips = [answer.tensors[0] for answer in group.collect(check)]
            # The next frames are decoded while these are encoded.
            if number + 1 < calls:
                group.send("next")
            try:
                # Not `torch.cat`, whose threads wait for cores that the encoder and the other processes use.
                yield torch.from_numpy(np.concatenate([strip.numpy() for strip in strips], axis=along))
            except GeneratorExit:
                if number + 1 < calls and group.alive:
                    group.collect(_not_cancelled)
                raise


class Shared:
    """A component that all processes of a group have loaded.

    Args:
        engines: protects its block engines from deletion until it is closed.

    Attributes:
        part: a denoiser or a video decoder.
    """

    def __init__(
        self, group: Group, name: str, part: SharedDenoiser | SharedVideoDecoder, engines: ExitStack | None = None
    ) -> None:
        self._group = group
        self._name = name
        self._engines = engines or ExitStack()
        self.part = part

    def close(self) -> None:
        """Free the component in all processes."""
        with self._engines:
            if self._group.alive:
                self._group.call("free", _not_cancelled, name=self._name)


class GroupManager:
    """The group of one residency, started when a job first needs it and kept for later jobs. Not safe between threads.

    Args:
        limits: after which processes count as hanging.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits
        self._group: Group | None = None
        self._texts = SentTexts()

    @property
    def group(self) -> Group | None:
        """The group, while its processes run."""
        return self._group if self._group is not None and self._group.alive else None

    def fits(self, split: Split | None) -> bool:
        """Whether the running group is the one of a split; with `None`, whether none runs."""
        return (None if self.group is None else self.group.split) == split

    def load(
        self,
        split: Split,
        spec: ModelSpec,
        name: str,
        part: ComponentPlan,
        check: Callable[[], None],
        speed: Speed | None = None,
        store: EngineStore | None = None,
        quantized: QuantizedCache | None = None,
    ) -> Shared:
        """Load a component in all processes; they are started if they do not run.

        Args:
            check: raises if the job is cancelled.
            speed: execution options, from `shared_speed`.
            store: of the part's block engines, if it has any.
            quantized: where quantized weights are cached.

        Raises:
            TandemError: if that fails; no process is left then.
        """
        group = self.group
        if group is None or group.split != split:
            self.stop_processes()
            group = self._group = Group(split, check, self._limits)
            self._texts = SentTexts()
        with ExitStack() as engines:
            if store is not None:
                for use in part.engines:
                    # A process that does not find it reports that.
                    with contextlib.suppress(EngineError):
                        engines.enter_context(store.using(use.id))
            answers = group.call(
                "load",
                check,
                name=name,
                part=_PARTS.dump_python(part, mode="json"),
                directory=str(spec.directory),
                model=spec.name,
                files={component: str(path) for component, path in spec.single_files.items()},
                configs={component: dict(spec.files[component].config) for component in spec.single_files},
                loras=[use.model_dump(mode="json") for use in spec.loras_of(name)],
                speed=(speed or EAGER).model_dump(mode="json"),
                engines=None if store is None else str(store.folder),
                quantized=None if quantized is None else str(quantized.folder),
            )
            if name == "vae":
                return Shared(group, name, SharedVideoDecoder(group, check))
            dtype = getattr(torch, answers[0].values["dtype"])
            denoiser = _denoiser_kind(spec)(group, name, dtype, self._texts, check)
            # Latents of video and sound are (1, numbers), and those of a section have nothing beside them.
            if spec.sound_latents is None and spec.section is None:
                denoiser.channels = spec.vae.z_dim
            return Shared(group, name, denoiser, engines.pop_all())

    def reset_peak_memory(self) -> None:
        """See `Group`."""
        if self.group is not None:
            self.group.reset_peak_memory()

    @property
    def peak_bytes(self) -> int:
        """See `Group`; 0 if no group runs."""
        return 0 if self.group is None else self.group.peak_bytes

    def reserved_bytes(self) -> dict[int, int]:
        """Return the memory that PyTorch reserves in the processes, by the GPU's index."""
        if self.group is None:
            return {}
        reserved = zip(self.group.split.devices, self.group.reserved_bytes, strict=True)
        return {gpu_index(device): size for device, size in reserved if device.startswith("cuda:")}

    def stop_processes(self) -> None:
        """End the group."""
        if self._group is not None:
            self._group.close()
        self._group = None


def _not_cancelled() -> None:
    """Continue in any case."""
