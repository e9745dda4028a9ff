"""Variants of published models: transformers in smaller files, perhaps with a LoRA from step distillation.

The catalogue names them, see `registry.KnownModel.variants`. A download puts a variant's files into a folder of its
own, with the model's other components and a description, `DESCRIPTION`. Imports no torch.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from runtime.core.frozen import FrozenModel
from runtime.core.loras import MAX_WEIGHT
from runtime.core.request import MAX_SHIFT, MAX_STEPS, MIN_SHIFT

DESCRIPTION = "tandem-variant.json"
# In the folder of a variant.
LORA_FOLDER = "loras"
# A file in the folder: no path, nothing hidden.
_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}$")]
_Text = Annotated[str, Field(max_length=200)]
_Strength = Annotated[float, Field(strict=True, gt=0, le=MAX_WEIGHT)]
_Steps = Annotated[int, Field(strict=True, ge=1, le=MAX_STEPS)]
_Shift = Annotated[float, Field(strict=True, ge=MIN_SHIFT, le=MAX_SHIFT)]


class PublishedFile(FrozenModel):
    """A file in a repository.

    Attributes:
        bytes: its size, to three digits or exactly, as it is published.
        sha256: in hexadecimal, where it is published; a hub that has another file is refused.
    """

    repository: str
    path: str
    bytes: int
    sha256: str = ""

    @property
    def name(self) -> str:
        """The name of the file without its folders."""
        return self.path.rpartition("/")[2]


class PublishedLora(FrozenModel):
    """A LoRA of a variant, and its strength."""

    file: PublishedFile
    weight: float = 1.0


class Variant(FrozenModel):
    """A variant of a published model.

    Attributes:
        name: in `--variant`.
        format: of the weights, for people.
        transformers: files by component.
        contains: further components in the first file.
        loras: that are always used with it.
        steps: with these LoRAs, without guidance; `None` for the model's own.
        flow_shift: with these LoRAs; `None` for that of the scheduler.
    """

    name: str
    format: str
    transformers: Mapping[str, PublishedFile]
    contains: tuple[str, ...] = ()
    loras: tuple[PublishedLora, ...] = ()
    steps: int | None = None
    flow_shift: float | None = None

    @property
    def title(self) -> str:
        """The format and the number of steps, for people."""
        return self.format if self.steps is None else f"{self.format}, {self.steps} steps"

    @property
    def replaced(self) -> frozenset[str]:
        """The components that its files have instead of the model's repository."""
        return frozenset((*self.transformers, *self.contains))

    @property
    def files(self) -> dict[str, PublishedFile]:
        """Its files by their place in the folder."""
        loras = {f"{LORA_FOLDER}/{lora.file.name}": lora.file for lora in self.loras}
        return {file.name: file for file in self.transformers.values()} | loras

    @property
    def bytes(self) -> int:
        """The size of its files."""
        return sum(file.bytes for file in self.files.values())


class InstalledLora(FrozenModel):
    """A LoRA in a variant's folder, and its strength."""

    file: _FileName
    weight: _Strength = 1.0


class InstalledVariant(FrozenModel):
    """The description of a variant in its folder.

    Attributes:
        model, name: of the published model, and of its variant.
        title, license: of the model.
        format: see `Variant`.
        transformer: the file of its only transformer, or of the high-noise expert.
        loras: files in `LORA_FOLDER`.
        steps, flow_shift: see `Variant`.
    """

    model: _Text
    name: _Text
    title: _Text
    license: _Text
    format: _Text
    transformer: _FileName
    loras: tuple[InstalledLora, ...] = ()
    steps: _Steps | None = None
    flow_shift: _Shift | None = None

    @classmethod
    def of(cls, variant: Variant, *, model: str, title: str, license_name: str) -> "InstalledVariant":
        """Return the description of a variant of a model."""
        return cls(
            model=model,
            name=variant.name,
            title=f"{title}, {variant.title}",
            license=license_name,
            format=variant.format,
            transformer=variant.transformers["transformer"].name,
            loras=tuple(InstalledLora(file=lora.file.name, weight=lora.weight) for lora in variant.loras),
            steps=variant.steps,
            flow_shift=variant.flow_shift,
        )

    @property
    def content(self) -> bytes:
        """The content of `DESCRIPTION`."""
        return self.model_dump_json(indent=2).encode()
