"""Parts that several GPUs run together, called like those of one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import torch

from runtime.core.step_cache import NONE
from runtime.execution.denoiser import PROMPTED, UNPROMPTED
from runtime.execution.parallel.group import Group
from runtime.execution.video_decoder import longer_side
from runtime.models.spec import ModelSpec

_TEXTS_KEPT = 2


class Texts:
    """Which embeddings the processes have, so that each is sent once."""

    def __init__(self) -> None:
        self._known: list[tuple[int, torch.Tensor]] = []
        self._numbers = count()

    def number(self, texts: list[torch.Tensor]) -> tuple[list[int], list[int], list[int], list[torch.Tensor]]:
        """Return each text's number, which numbers are to be forgotten, which are new, and the new ones' tensors."""
        numbers, new, sent = [], [], []
        for text in texts:
            known = next((number for number, other in self._known if other is text), None)
            if known is None:
                known = next(self._numbers)
                self._known.append((known, text))
                new.append(known)
                sent.append(text)
            numbers.append(known)
        spare = [number for number, _ in self._known if number not in numbers]
        forgotten = spare[: max(len(self._known) - _TEXTS_KEPT, 0)]
        self._known = [(number, text) for number, text in self._known if number not in forgotten]
        return numbers, forgotten, new, sent


class SharedDenoiser:
    """One expert on several GPUs; see `Denoiser`.

    Args:
        dtype: that it takes: what it would round to is rounded before it is sent.
        check: raises where somebody wants the job to stop.
    """

    def __init__(
        self, group: Group, spec: ModelSpec, name: str, dtype: torch.dtype, texts: Texts, check: Callable[[], None]
    ) -> None:
        self._group = group
        self._patch = spec.transformer.patch_size
        self._name = name
        self._dtype = dtype
        self._texts = texts
        self._fresh = False
        self.check = check

    pairs = True

    @contextmanager
    def caching(self, step_cache: str) -> Iterator[None]:
        """Reuse across steps, while entered, what `step_cache` says; nothing of it stays.

        Those who share the tokens of a pass decide together; each pass of guidance has a cache of its own.
        """
        if step_cache == NONE:
            yield
            return
        self._group.call("cache", self.check, name=self._name, step_cache=step_cache)
        try:
            yield
        finally:
            if self._group.alive:
                self._group.call("cache", _nobody_asks, name=self._name, step_cache=NONE)

    def reset_cache(self) -> None:
        """See `Denoiser`; they are told with the next pass."""
        self._fresh = True

    def __call__(
        self, latents: torch.Tensor, timestep: torch.Tensor, text_embeds: torch.Tensor, which: str = PROMPTED
    ) -> torch.Tensor:
        """See `Denoiser`."""
        return self._passes(latents, timestep, {which: text_embeds})[0]

    def pair(
        self, latents: torch.Tensor, timestep: torch.Tensor, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict the velocity with each of two texts, at the same time where they run on different GPUs."""
        one, other = self._passes(latents, timestep, {PROMPTED: first, UNPROMPTED: second})
        return one, other

    def _passes(
        self, latents: torch.Tensor, timestep: torch.Tensor, texts: dict[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        fresh, self._fresh = self._fresh, False
        numbers, forgotten, new, sent = self._texts.number(list(texts.values()))
        _, _, frames, height, width = latents.shape
        tokens = (frames // self._patch[0]) * (height // self._patch[1]) * (width // self._patch[2])
        answers = self._group.call(
            "forward",
            self.check,
            [latents.to(self._dtype), timestep, *(text.to(self._dtype) for text in sent)],
            name=self._name,
            texts=numbers,
            which=list(texts),
            fresh=fresh,
            forget=forgotten,
            new=new,
            tokens=tokens,
        )
        made: dict[int, torch.Tensor] = {}
        for answer in answers:
            made |= zip(answer.said["places"], answer.tensors, strict=True)
        return [made[place].to(latents.device) for place in range(len(texts))]


class SharedVideoDecoder:
    """The VAE's decoder on several GPUs, each with a strip of every frame; see `VideoDecoder`."""

    def __init__(self, group: Group, check: Callable[[], None]) -> None:
        self._group = group
        self.check = check

    def frames(self, latents: torch.Tensor, chunk: int, tile: int | None = None) -> Iterator[torch.Tensor]:
        """See `VideoDecoder`; frames come as bytes, (frames, height, width, 3) uint8 on the CPU."""
        assert tile is None, "frames that are decoded in tiles are not shared"
        group, check = self._group, self.check
        group.call("decode", check, [latents], chunk=chunk)
        calls = 1 + -(-(latents.shape[2] - 1) // chunk)
        # In the frames: (frames, height, width, 3).
        along = longer_side(latents) - 2
        group.send("next")
        for number in range(calls):
            strips = [answer.tensors[0] for answer in group.collect(check)]
            # The next are decoded while these are saved.
            if number + 1 < calls:
                group.send("next")
            try:
                yield torch.cat(strips, dim=along)
            except GeneratorExit:
                if number + 1 < calls and group.alive:
                    group.collect(_nobody_asks)
                raise


def _nobody_asks() -> None:
    """Wait in any case."""
