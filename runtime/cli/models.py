"""`models list`: print text on standard error and return the data for `--json`."""

from pathlib import Path
from typing import Any

from runtime.cli import terminal
from runtime.core import settings
from runtime.core.errors import TandemError
from runtime.core.units import byte_size
from runtime.machine.probe import probe
from runtime.models.catalogue import download_bytes, folders, named, not_downloaded, published
from runtime.models.hub.download import partial_bytes
from runtime.models.hub.files import read_manifest
from runtime.models.registry import family_of, read_spec
from runtime.models.spec import ModelSpec
from runtime.pipeline.history import HistoryFile
from runtime.planner.requirements import Needs, needs

_LONGEST_SHOWN = 60


def show_models() -> dict[str, Any]:
    """Print and return installed models, with the reason if one cannot be used, and published ones to download."""
    loaded = settings.load()
    machine = probe()
    history = HistoryFile(loaded.cache_dir, machine).read()
    listed = []
    specs: list[ModelSpec] = []
    for name, folder in folders(loaded.weights_dir).items():
        try:
            specs.append(named(read_spec(folder, name)))
        except TandemError as error:
            listed.append({"name": name, "folder": str(folder), "here": True, "problem": error.what})
            terminal.line(f"{name}: {error.what} {error.remedy}")
    for spec in (*specs, *not_downloaded(loaded.weights_dir)):
        need = needs(spec, machine, history)
        listed.append(_model(spec, need))
        for line in describe(spec, need):
            terminal.line(line)
    return {"models": listed}


def _model(spec: ModelSpec, need: Needs) -> dict[str, Any]:
    known = published(spec)
    return {
        "name": spec.name,
        "folder": str(spec.directory),
        "here": spec.is_downloaded,
        "problem": None,
        "title": spec.title,
        "license": spec.license,
        "repository": _repository(spec) or (known.repository if known else None),
        "parameters": spec.total_parameters,
        "bytes": _bytes(spec),
        "bytes_estimated": not spec.is_downloaded,
        "begun_bytes": _begun(spec),
        "sizes": [list(size) for size in spec.sizes],
        "frame_counts": list(spec.frame_counts),
        "defaults": vars(spec.defaults)
        | {"flow_shift": spec.flow_shift, "published_flow_shift": known.flow_shift if known else None},
        "needs": need.to_json(),
    }


def describe(spec: ModelSpec, need: Needs) -> list[str]:
    """Return lines of text on a model: title, license and size; default clip; memory that it needs."""
    defaults = spec.defaults
    begun = f"{byte_size(_begun(spec))} already downloaded" if _begun(spec) else "not installed"
    where = "installed" if spec.is_downloaded else f"{begun}: models download {spec.name}"
    size = byte_size(_bytes(spec)) if spec.is_downloaded else f"at most about {byte_size(_bytes(spec))}"
    pair = [scale for scale in (defaults.guidance_scale, defaults.guidance_scale_2) if scale is not None]
    guidance = " and ".join(f"{scale:g}" for scale in pair)
    shift = _shift(spec)
    least = f"{need.least} ({need.least.way})" if need.least else "more than any single GPU has"
    resident = f"; to stay loaded: {need.resident}" if need.resident else ""
    return [
        f"{spec.name}: {spec.title}, {spec.license}, {spec.total_parameters / 1e6:,.1f} M weights, {size}, {where}",
        f"    makes {defaults.width}x{defaults.height}, {defaults.frames} frames at {defaults.fps} fps, "
        f"{defaults.steps} steps, guidance {guidance}{shift}, negative prompt {_shown(spec)}",
        f"    needs at least: {least}{resident}",
        f"    on this machine: {need.here}",
    ]


def _shift(spec: ModelSpec) -> str:
    """Return the scheduler's shift, and that of the authors' code if it differs or the model is not installed."""
    known = published(spec)
    own = f"{known.flow_shift:g} in the model authors' code" if known else ""
    if spec.flow_shift is None:
        return f", shift {own}" if own else ""
    return f", shift {spec.flow_shift:g}" + (f" ({own})" if known and known.flow_shift != spec.flow_shift else "")


def _shown(spec: ModelSpec) -> str:
    negative = spec.defaults.negative_prompt
    if negative and negative == family_of(spec.family).negative_prompt:
        return "the model authors' own"
    short = negative if len(negative) <= _LONGEST_SHOWN else f"{negative[:_LONGEST_SHOWN]}…"
    return f"“{short}”" if short else "none"


def _bytes(spec: ModelSpec) -> int:
    return _on_disk(spec.directory) if spec.is_downloaded else download_bytes(spec)


def _begun(spec: ModelSpec) -> int:
    return 0 if spec.is_downloaded else partial_bytes(spec.directory.parent, spec.directory.name)


def _on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _repository(spec: ModelSpec) -> str | None:
    try:
        manifest = read_manifest(spec.directory) if spec.is_downloaded else None
    except TandemError:
        return None
    return manifest.repository if manifest else None
