"""Colors of latents for previews: a linear map, fitted to what the model's own VAE decoded in earlier videos.

The colors of a position are a linear function of its latents and of those around it: a convolution. With few positions
to fit it to, only the latents of the position itself count.

    latent_colors/<digest of the VAE's files>.safetensors    sums of all videos, from which the map is computed

A file that is damaged, of another VAE, or of an earlier version, whose sums had no neighbors, is ignored, and replaced
by the next video. Processes add their videos one at a time, with a lock. A folder that cannot be written to is not an
error.
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F

from runtime.core.disk_caches import LATENT_COLORS, evict, files_of
from runtime.core.errors import ModelError
from runtime.core.files import remove_partial_files, replace_file
from runtime.core.locks import held
from runtime.models.spec import ModelSpec
from runtime.models.tensor_files import read_tensors

# Each latent position has this many colors in width and in height.
SIDE = 2
# Positions that count: earlier videos fade as others are added.
_MAX_POSITIONS = 200_000
# The side of the neighborhood; models of more channels have none, since the sums grow with its square.
_KERNEL, _MOST_CHANNELS = 3, 64
# Positions per unknown that a map without neighbors is fitted from, at least, and one with them: with fewer, that was
# worse for other clips of the shipped model.
_LEAST_POSITIONS, _LEAST_OF_KERNEL = 4, 10
# Positions of a frame that are used, about: neighbors are much alike.
_PER_FRAME = 1_024
# Ridge regression: latents have a variance of about 1.
_RIDGE = 1e-4
_VERSION = 1
_MAX_BYTES = 4 << 20
_KEY = "vae"
_LOCK, _LOCK_SECONDS = ".lock", 10.0

logger = logging.getLogger(__name__)


class Sums(NamedTuple):
    """Normal equations of the fit, float64.

    The inputs are the latents of a neighborhood, (channels, rows, columns) in one axis, and 1.

    Attributes:
        gram: (inputs, inputs); its last element is the number of positions.
        moments: (inputs, `SIDE` × `SIDE` × 3).
        lead: (), how much smaller the squared error of the fitted map was than that of the model's published one, each
            on clips that the fit did not have yet.
    """

    gram: torch.Tensor
    moments: torch.Tensor
    lead: torch.Tensor

    @classmethod
    def zero(cls, channels: int) -> "Sums":
        """Return the sums of no positions."""
        inputs, outputs = channels * _kernel(channels) ** 2 + 1, SIDE * SIDE * 3
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in ((inputs, inputs), (inputs, outputs), ())))

    @property
    def positions(self) -> float:
        """The number of latent positions."""
        return float(self.gram[-1, -1])

    def plus(self, new_sums: "Sums") -> "Sums":
        """Return both together, with less weight on these if they are too many."""
        share = min(1.0, max(_MAX_POSITIONS - new_sums.positions, 0.0) / max(self.positions, 1.0))
        return Sums(*(share * mine + its for mine, its in zip(self, new_sums, strict=True)))

    def error(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the squared error of a map at these positions, less a number that is the same for all maps."""
        factors = factors.double()
        return (factors * (self.gram @ factors - 2 * self.moments)).sum()

    def solve(self, channels: int) -> torch.Tensor | None:
        """Return the map, (inputs, `SIDE` × `SIDE` × 3) float32, the bias last; `None` if they have too little.

        Also if they are no sums at all: the matrix of real ones is positive definite.
        """
        used = torch.arange(len(self.gram))
        if not self.positions >= _LEAST_OF_KERNEL * len(used):
            used = used[_middle(channels)]
        if not self.positions >= _LEAST_POSITIONS * len(used):
            return None
        ridge = _RIDGE * self.positions * torch.eye(len(used), dtype=torch.float64)
        ridge[-1, -1] = 0.0
        factor, failed = torch.linalg.cholesky_ex(self.gram[used][:, used] + ridge)
        solution = torch.zeros_like(self.moments)
        solution[used] = torch.cholesky_solve(self.moments[used], factor)
        return None if failed.item() or not torch.isfinite(solution).all().item() else solution.float()


class DecodedColors:
    """The latents and colors of one clip that is being decoded.

    Args:
        latents: (1, channels, frames, height, width), as the transformer sees them.
        frames_each: frames of one latent frame; the first latent frame is one frame.
    """

    def __init__(self, latents: torch.Tensor, frames_each: int) -> None:
        self._latents = latents[0].float().cpu()
        self._frames_each = frames_each
        self._received = 0
        # Of positions in each direction, so many are used as one.
        self._step = math.ceil(math.sqrt(math.prod(self._latents.shape[2:]) / _PER_FRAME))
        self._used: list[int] = []
        self._colors: list[np.ndarray] = []

    def add(self, frames: np.ndarray) -> None:
        """Add the next frames, (n, height, width, 3) uint8. The last one of each latent frame is used.

        Takes little time: decoding waits for it.
        """
        _, count, height, width = self._latents.shape
        if frames.shape[1] % (SIDE * height) or frames.shape[2] % (SIDE * width):
            return  # of a VAE whose latents have fewer pixels
        end = (count - 1) * self._frames_each + 1
        first, last = -self._received % self._frames_each, min(len(frames), end - self._received)
        for number in range(first, last, self._frames_each):
            self._used.append((self._received + number) // self._frames_each)
            self._colors.append(self._colors_of(frames[number]))
        self._received += len(frames)

    def _colors_of(self, frame: np.ndarray) -> np.ndarray:
        """Return the colors of a frame at the positions that are used, (3 × `SIDE` × `SIDE`, positions), -1 to 1."""
        _, _, height, width = self._latents.shape
        cells = frame.reshape(height, SIDE, -1, width, SIDE, frame.shape[1] // (SIDE * width), 3)
        means = cells[:: self._step, :, :, :: self._step].mean(axis=(2, 5))
        return means.transpose(4, 1, 3, 0, 2).reshape(3 * SIDE * SIDE, -1) / 127.5 - 1.0

    def sums(self) -> Sums:
        """Return the sums of the frames so far."""
        channels = len(self._latents)
        sums, kernel = Sums.zero(channels), _kernel(channels)
        if self._used:
            latents = _padded(self._latents[:, self._used].transpose(0, 1), kernel)
            inputs = F.unfold(latents, kernel, stride=self._step).transpose(0, 1).flatten(1).double()
            inputs = torch.cat([inputs, inputs.new_ones(1, inputs.shape[1])])
            outputs = torch.from_numpy(np.concatenate(self._colors, axis=1))
            sums.gram.addmm_(inputs, inputs.T)
            sums.moments.addmm_(inputs, outputs.T)
        return sums


class LatentColors:
    """The colors of a model's latents, for the previews of one job.

    Args:
        folder: the cache folder; `None` stores nothing.
    """

    def __init__(self, folder: Path | None, spec: ModelSpec) -> None:
        self._spec = spec
        self._path: Path | None = None
        if folder is not None:
            try:
                self._key = _key(spec)
                self._path = folder / LATENT_COLORS.name / f"{self._key}.safetensors"
            except OSError as error:  # the job reports it when it loads the VAE
                logger.info("The VAE's files could not be read: %s", error)
        published = spec.latent_rgb
        self._published = None if published is None else torch.tensor([*published.factors, published.bias])
        self._sums = self._read()
        self._map = self._chosen()

    def colors(self, latents: torch.Tensor) -> torch.Tensor | None:
        """Return the colors of latents, (frames, rows, columns, 3) float32 in about -1 to 1.

        They are those of the fitted map, or of the model's published one, which has one color for each position, if
        that was better or no video was decoded yet; `None` without both.

        Args:
            latents: (1, channels, frames, height, width), normalised.
        """
        if self._map is None:
            return None
        factors, frames = self._map.to(latents.device), latents[0].float().transpose(0, 1)
        kernel = math.isqrt((len(factors) - 1) // frames.shape[1])
        weight = factors[:-1].T.reshape(-1, frames.shape[1], kernel, kernel)
        planes = F.conv2d(_padded(frames, kernel), weight, factors[-1])
        return F.pixel_shuffle(planes, math.isqrt(planes.shape[1] // 3)).permute(0, 2, 3, 1)

    def learn(self, clip: DecodedColors) -> None:
        """Add a decoded clip to the fit, and store it. An error is logged: the video is worth more than its preview."""
        try:
            self._learn(clip)
        except OSError as error:
            logger.warning("The colors of previews could not be stored: %s", error.strerror or error)
        except Exception:  # internal error
            logger.exception("The colors of previews could not be fitted")

    def _learn(self, clip: DecodedColors) -> None:
        added = clip.sums()
        if not all(torch.isfinite(part).all().item() for part in added):
            return
        if self._path is None:
            self._add(added)
            return
        with ExitStack() as stack:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(held(self._path.with_suffix(_LOCK), seconds=_LOCK_SECONDS))
            except OSError:  # this job's previews still improve
                self._add(added)
                raise
            sums = self._add(added)
            data = safetensors.torch.save(sums._asdict(), metadata={_KEY: self._key})
            remove_partial_files(self._path.parent)
            replace_file(self._path, data)
            files = [file for file in files_of(self._path.parent) if file.path.suffix != _LOCK]
            evict(files, LATENT_COLORS.max_bytes, keep=self._path)

    def _add(self, sums: Sums) -> Sums:
        """Add the sums of a clip to earlier ones, and use them from now on."""
        channels = self._spec.vae.z_dim
        # Other processes may have added theirs.
        before = self._read() or self._sums or Sums.zero(channels)
        fitted, published = before.solve(channels), self._published
        if fitted is not None and published is not None:
            spread = torch.zeros_like(fitted)
            spread[_middle(channels)] = published.repeat_interleave(SIDE * SIDE, dim=1)
            sums = sums._replace(lead=sums.error(spread) - sums.error(fitted))
        self._sums = before.plus(sums)
        self._map = self._chosen()
        return self._sums

    def _chosen(self) -> torch.Tensor | None:
        """Return the fitted map, unless the published one was better or is the only one."""
        fitted = None if self._sums is None else self._sums.solve(self._spec.vae.z_dim)
        if self._sums is not None and fitted is not None and (self._published is None or self._sums.lead.item() > 0):
            return fitted
        return self._published

    def _read(self) -> Sums | None:
        """Return the stored sums; `None` if there are none, or they are not what was written for this VAE."""
        if self._path is None or not self._path.exists():
            return None
        try:
            tensors, metadata = read_tensors(self._path, _MAX_BYTES)
        except ModelError as error:
            logger.warning("The colors of previews could not be read: %s", error)
            return None
        template = Sums.zero(self._spec.vae.z_dim)._asdict()
        if metadata.get(_KEY) != self._key or _types(tensors) != _types(template):
            return None
        sums = Sums(**tensors)
        finite = torch.isfinite(sums.lead).item()
        return sums if finite and sums.solve(self._spec.vae.z_dim) is not None else None


def _kernel(channels: int) -> int:
    """Return the side of the neighborhood in a model whose latents have so many channels."""
    return _KERNEL if channels <= _MOST_CHANNELS else 1


def _middle(channels: int) -> list[int]:
    """Return which inputs are the latents of the position itself, and 1."""
    area = _kernel(channels) ** 2
    return [*range(area // 2, channels * area, area), channels * area]


def _padded(frames: torch.Tensor, kernel: int) -> torch.Tensor:
    """Return latents (frames, channels, height, width) with copies of those at the edges around them."""
    return F.pad(frames, (kernel // 2,) * 4, mode="replicate")


def _types(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _key(spec: ModelSpec) -> str:
    """Return a digest of the names, sizes and times of a VAE's files, and of what decides its latents' meaning.

    Raises:
        OSError: if a file does not exist.
    """
    files = [(path, path.stat()) for path in spec.component_files("vae")]
    file_states = [[str(path.resolve()), status.st_size, status.st_mtime_ns] for path, status in files]
    return hashlib.sha256(json.dumps([_VERSION, SIDE, repr(spec.vae), file_states]).encode()).hexdigest()[:32]
