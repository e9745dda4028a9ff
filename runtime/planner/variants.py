"""Which variant of a published model fits a machine: its original weights, or smaller files of its transformers.

Pure: the forecasts of `requirements.fit` for each of them, before anything is downloaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.core.facts import Fact
from runtime.machine.probe import Machine
from runtime.models.catalogue import KnownVariant, download_bytes, published_bytes
from runtime.models.hub.download import is_disk_short
from runtime.models.registry import KnownModel
from runtime.models.single_file import expert_of
from runtime.models.spec import ModelSpec
from runtime.models.stored_weights import WeightFiles
from runtime.planner.history import History
from runtime.planner.requirements import Fit, fit

# The weights of the published model, in `--variant`.
ORIGINAL = "original"
_NOWHERE = Path("none")
# Of a weight that is not quantized.
_PLAIN_BYTES = 2
# Published Wan transformers whose downloads have a known size are in float32, see `sources` of their published.json.
_ORIGINAL_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A variant of a model, or its original, on a machine.

    Attributes:
        name: in `--variant`.
        title: format and steps, for people.
        spec: as if it were downloaded.
        fit: whether its default clip runs.
        bytes: of its download, with the model's other components.
        is_exact: whether these are known; otherwise it is the most that they may be.
        has_space: whether the disk has the space.
    """

    name: str
    title: Fact | str
    spec: ModelSpec
    fit: Fit
    bytes: int
    is_exact: bool
    has_space: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {
            "variant": self.name,
            "name": self.spec.name,
            "title": str(self.title),
            "bytes": self.bytes,
            "bytes_exact": self.is_exact,
            "disk_has_space": self.has_space,
            **self.fit.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class VariantOffer:
    """What a machine is offered of a published model.

    Attributes:
        candidates: see `candidates`.
        best: see `best`.
    """

    candidates: tuple[Candidate, ...]
    best: Candidate | None

    @property
    def others(self) -> tuple[Candidate, ...]:
        """All candidates but the best one."""
        return tuple(candidate for candidate in self.candidates if candidate is not self.best)

    @property
    def reason(self) -> Fact:
        """Why it is the best one, or why none is."""
        return reason(self.best, self.candidates)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {
            "variants": [candidate.to_json() for candidate in self.candidates],
            "best_variant": None if self.best is None else self.best.name,
            "best_variant_reason": str(self.reason),
        }


def offer(each: Sequence[Candidate], free_bytes: int) -> VariantOffer:
    """Return what a machine is offered of a model.

    Args:
        each: from `candidates`.
        free_bytes: on the disk of the models.
    """
    offered = tuple(replace(candidate, has_space=not is_disk_short(candidate.bytes, free_bytes)) for candidate in each)
    return VariantOffer(candidates=offered, best=best(offered))


def candidates(model: KnownModel, machine: Machine, history: History = ()) -> tuple[Candidate, ...]:
    """Return a model's original and its variants, the largest first, for a disk with enough space."""
    original = model.spec(_NOWHERE)
    size, is_exact = download_bytes(original), published_bytes(original) > 0
    listed: list[tuple[str, Fact | str, ModelSpec, int, bool]] = [
        (ORIGINAL, Fact("variant.original"), original, size, is_exact)
    ]
    for variant in model.variants:
        known = KnownVariant(model, variant)
        listed.append((variant.name, variant.title, variant_spec(known, _NOWHERE), *variant_bytes(known)))
    return tuple(
        Candidate(name=name, title=title, spec=spec, fit=fit(spec, machine, history), bytes=size, is_exact=is_exact)
        for name, title, spec, size, is_exact in listed
    )


def best(offered: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate that fits best; `None` if none runs or has the space.

    Of those that run well, or if there are none of those that run slowly, it is the largest one whose transformers the
    memory takes whole; if it takes none whole, the fastest one.
    """
    possible = [candidate for candidate in offered if candidate.has_space and candidate.fit.runs]
    rank = min((candidate.fit.rank for candidate in possible), default=0)
    alike = [candidate for candidate in possible if candidate.fit.rank == rank]
    whole = next((candidate for candidate in alike if candidate.fit.whole), None)
    return whole or min(alike, key=_likely_seconds, default=None)


def reason(chosen: Candidate | None, offered: Sequence[Candidate]) -> Fact:
    """Return why `best` chose a candidate, or none."""
    original = offered[0]
    if chosen is None:
        runs = next((candidate for candidate in offered if candidate.fit.runs), None)
        if runs is not None:  # so the disk is too small for all that run
            return Fact("variant.no_space", {"needed": min(each.bytes for each in offered if each.fit.runs)})
        smallest = offered[-1]
        return Fact("variant.smallest", {"title": smallest.title, "verdict": smallest.fit.verdict})
    if chosen is original:
        return Fact("variant.because", {"verdict": original.fit.verdict})
    if not original.has_space and original.fit.runs:
        return Fact("variant.because_of_space", {"verdict": chosen.fit.verdict, "needed": original.bytes})
    if original.fit.kind == chosen.fit.kind:
        code = "variant.because_whole" if chosen.fit.whole else "variant.because_less"
        return Fact(code, {"verdict": chosen.fit.verdict})
    return Fact("variant.because_smaller", {"verdict": chosen.fit.verdict, "original": original.fit.verdict})


def _likely_seconds(candidate: Candidate) -> float:
    assert candidate.fit.seconds is not None, "only candidates that run have a time"
    return candidate.fit.seconds.likely


def variant_bytes(known: KnownVariant) -> tuple[int, bool]:
    """Return the bytes of a variant's download with the model's other components, and whether they are known.

    If not, the others are counted with the most bytes that published weights have.
    """
    model, variant = known.model, known.variant
    replaced = sum(model.parameters[component] for component in variant.replaced)
    if model.download_bytes:
        return variant.bytes + model.download_bytes - _ORIGINAL_BYTES * replaced, True
    others = model.spec(_NOWHERE).total_parameters - replaced
    return variant.bytes + _ORIGINAL_BYTES * others, False


def variant_spec(known: KnownVariant, weights_dir: Path) -> ModelSpec:
    """Return the spec of a variant, as if it were in `weights_dir`.

    Bytes of quantized weights follow from the size of the file and the number of the others in it.
    """
    model, variant = known.model, known.variant
    spec, folder = model.spec(weights_dir), weights_dir / known.folder
    packed = spec.transformer.block_parameters
    files: dict[str, WeightFiles] = {}
    for component, file in variant.transformers.items():
        contained = (component, *(() if files else variant.contains))
        others = _PLAIN_BYTES * (sum(spec.parameters[part] for part in contained) - packed)
        factors = sum(lora.file.bytes for lora in variant.loras if _changes(lora.file.name, component))
        files[component] = WeightFiles(
            paths=(folder / file.name,),
            config=model.configs[component],
            weights={},
            title=variant.format,
            packed_weights=packed,
            packed_bytes=file.bytes - others + factors,
        )
    if variant.steps is not None:
        spec = spec.distilled_for(variant.steps)
    description = known.description
    return replace(spec, name=known.folder, title=description.title, directory=folder, files=files, variant=description)


def _changes(lora: str, component: str) -> bool:
    """Whether a LoRA changes a transformer, by its name."""
    expert = expert_of(Path(lora))
    return expert is None or (expert == "low") == (component == "transformer_2")
