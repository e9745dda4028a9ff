"""What a plan is expected to take: memory per stage, seconds with their uncertainty, and the other ways there are.

Plain data: `planner.strategies` fills it in. Bytes and seconds throughout.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What one component takes on its device while it runs.

    Attributes:
        stage: "encode", "denoise" or "decode".
        component: the part that runs.
        weights_bytes: all weights that lie on the device meanwhile, this part's and others'.
        working_bytes: activations, and for the VAE its caches.
        beside_bytes: latents, and what the libraries take for themselves.
        spare_bytes: what PyTorch's allocator takes on top where there is room; a plan that fits leaves it free.
        measured: whether the peak was measured here in an earlier run.
    """

    stage: str
    component: str
    weights_bytes: int
    working_bytes: int
    overhead_bytes: int
    allocator_slack_bytes: int = 0
    measured: bool = False

    @property
    def peak_bytes(self) -> int:
        """What is held at the peak."""
        return self.weights_bytes + self.working_bytes + self.overhead_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and the peak."""
        return {**vars(self), "peak_bytes": self.peak_bytes}


@dataclass(frozen=True)
class Seconds:
    """How long something takes: most likely `likely`, between `low` and `high`.

    `measured` says that it rests on this machine's own runs.
    """

    likely: float
    low: float
    high: float
    measured: bool = False

    def __add__(self, other: "Seconds") -> "Seconds":
        """Return both one after the other; measured only if both are."""
        return Seconds(
            self.likely + other.likely,
            self.low + other.low,
            self.high + other.high,
            self.measured and other.measured,
        )

    def __mul__(self, times: float) -> "Seconds":
        """Return the same so many times."""
        return Seconds(self.likely * times, self.low * times, self.high * times, self.measured)

    def to_json(self) -> dict[str, Any]:
        """Return seconds to the millisecond."""
        return {
            "seconds": round(self.likely, 3),
            "low": round(self.low, 3),
            "high": round(self.high, 3),
            "measured": self.measured,
        }


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to hold the weights, on the ladder from fast to frugal.

    Attributes:
        title: what is done, as people read it.
        flags: what asks for it on the command line; empty where nothing but "auto" does.
        offload, quantization: what a request says for it.
        peak_bytes: on the device.
        ram_bytes: in system memory, where that is another.
        seconds: of the whole video, without loading.
        fits: whether it fits the device's free memory, `fits_ram` the free system memory.
        lossless: whether the video is the same as without it.
        decode_tile: side of the tiles that frames are decoded in, in latents; `None` where they are decoded whole.
        decode_chunk: latent frames that are decoded in one call.
        keep_loaded: whether parts stay on the device, all but those `freed` after their stage.
        lacks: why it cannot be, however much memory is free, in a few words; empty where it can.
        taken: whether the plan takes it.
        offered: whether a request with its `offload` and `quantization` takes it.
    """

    title: str
    flags: str
    offload: str
    quantization: str
    peak_bytes: int
    ram_bytes: int
    seconds: Seconds
    fits: bool
    fits_ram: bool
    lossless: bool
    decode_tile: int | None = None
    decode_chunk: int = 1
    keep_loaded: bool = False
    freed: tuple[str, ...] = ()
    lacks: str = ""
    taken: bool = False
    offered: bool = False

    def verdict(self, where: str) -> str:
        """Return in a few words whether it can be; `where` is which memory the device has."""
        if self.taken:
            return "taken"
        if self.lacks:
            return f"cannot be: {self.lacks}"
        short = [what for what, fits in ((where, self.fits), ("RAM", self.fits_ram)) if not fits]
        if short:
            return f"too little {' and '.join(short)}"
        return "fits" if self.offered else "fits, not needed"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {**vars(self), "seconds": self.seconds.to_json()}
