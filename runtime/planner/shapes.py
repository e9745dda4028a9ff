"""Which sizes an engine was built for. Only the latents' size varies, so that is all a profile says."""

from dataclasses import dataclass

from runtime.core.plan import LatentSize

__all__ = ["LatentSize", "ShapeProfile"]


@dataclass(frozen=True, order=True)
class ShapeProfile:
    """A box of latent sizes that one engine serves, and the size it is fastest at.

    Attributes:
        min, opt, max: (frames, height, width) in latent units. For `vae_next` frames counts the latent frames of one
            call, for `vae_first` it is 1, and `text_encoder`, which sees no latents, has (1, 1, 1).

    Raises:
        ValueError: if a size is below 1, or min ≤ opt ≤ max does not hold.
    """

    min: LatentSize
    opt: LatentSize
    max: LatentSize

    def __post_init__(self) -> None:
        for low, best, high in zip(self.min, self.opt, self.max, strict=True):
            if not 1 <= low <= best <= high:
                raise ValueError(f"not a shape profile: {self.min}, {self.opt}, {self.max}")

    @classmethod
    def fixed(cls, latent: LatentSize) -> "ShapeProfile":
        """Return the profile that serves one size only."""
        return cls(latent, latent, latent)

    def serves(self, latent: LatentSize) -> bool:
        """Whether an engine built for this profile takes latents of this size."""
        return all(low <= n <= high for low, n, high in zip(self.min, latent, self.max, strict=True))

    def __str__(self) -> str:
        """Return "9×14×24", or "1×14×24 to 21×60×104": frames × height × width in latent units."""
        sizes = [self.min] if self.min == self.max else [self.min, self.max]
        return " to ".join("×".join(map(str, size)) for size in sizes)
