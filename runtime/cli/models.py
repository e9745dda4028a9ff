"""`models list`, `show`, `download` and `verify`: print the result and return it for `--json`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.cli import terminal
from runtime.cli.exit_codes import cancel_on_signals
from runtime.core import settings
from runtime.core.environment import program, quoted
from runtime.core.errors import InvalidRequestError, ModelError, TandemError
from runtime.core.facts import Fact, cut, render, short
from runtime.core.request import UPSCALER
from runtime.core.units import byte_size
from runtime.families.esrgan.upscalers import upscalers
from runtime.machine.probe import Machine, free_disk_bytes, probe
from runtime.models.catalogue import (
    decoders,
    download_bytes,
    find,
    folders,
    from_file,
    is_part,
    known_as,
    known_variant,
    look_up,
    not_downloaded,
    published,
    published_bytes,
    published_name,
    read_model,
    stored_bytes,
    transformer_files,
)
from runtime.models.enhancers import PUBLISHED as ENHANCERS
from runtime.models.helpers import PublishedHelper, folder_of_helper
from runtime.models.hub.client import check_repository, hub_of
from runtime.models.hub.download import (
    Download,
    DownloadPlan,
    DownloadProgress,
    bytes_in,
    downloaded,
    partial_bytes,
    source_of,
)
from runtime.models.hub.files import Verification, read_manifest
from runtime.models.hub.files import verify as verify_folder
from runtime.models.preprocessors import PUBLISHED as PREPROCESSORS
from runtime.models.registry import family_of
from runtime.models.single_file import expert_of
from runtime.models.spec import VAE_ENCODER, Defaults, ModelSpec, is_transformer
from runtime.pipeline.history_file import HistoryFile
from runtime.planner.history import History
from runtime.planner.requirements import Needs, needs
from runtime.planner.variants import ORIGINAL, Candidate, VariantOffer, candidates, offer

_LONGEST_SHOWN = 60
# The variant that fits this machine, in `--variant`.
FITS = "fits"


def show_models() -> dict[str, Any]:
    """Print and return installed models, with the reason if one cannot be used, and published ones to download."""
    loaded = settings.load()
    machine = probe()
    history = HistoryFile(loaded.cache_dir, machine).read()
    listed = []
    rows: list[tuple[str, ...]] = []
    specs: list[ModelSpec] = []
    parts: list[dict[str, Any]] = []
    for name, folder in folders(loaded.weights_dir).items():
        try:
            specs.append(read_model(folder, name))
        except TandemError as error:
            listed.append({"name": name, "folder": str(folder), "here": True, "problem": error.what})
            terminal.result(f"{name}: {error.what} {error.remedy}")
    for name, path in transformer_files(loaded.weights_dir).items():
        try:
            specs.append(from_file(path, loaded.weights_dir))
        except TandemError as error:
            if is_part(error):
                parts.append({"name": name, "folder": str(path), **error.fact.data})
                terminal.result(f"{name}: {error.what}")
                continue
            listed.append({"name": name, "folder": str(path), "here": True, "problem": error.what})
            terminal.result(f"{name}: {error.what} {error.remedy}")
    all_needs = [(spec, needs(spec, machine, history)) for spec in (*specs, *not_downloaded(loaded.weights_dir))]
    for spec, need in sorted(all_needs, key=lambda pair: _place(*pair)):
        offered = _offer(spec, machine, loaded.weights_dir, history)
        listed.append(_model(spec, need, offered))
        rows.append(_summary_row(spec, need, offered))
    frame_decoders = decoders(loaded.weights_dir)
    for spec in frame_decoders:
        rows.append((spec.name, spec.title, byte_size(stored_bytes(spec)), "yes", "", "decodes latents", ""))
    enlarging = upscalers(loaded.weights_dir)
    for spec in enlarging:
        size = byte_size(_upscaler(spec)["bytes"])
        rows.append((spec.name, spec.title, size, "yes", "", f"upscales {spec.vae.scale_factor_spatial} times", ""))
    makers = [{**_helper(model, loaded.weights_dir), "kind": model.kind} for model in PREPROCESSORS]
    enhancers = [_helper(model, loaded.weights_dir) for model in ENHANCERS]
    uses = [*(f"makes control frames: {maker['kind']}" for maker in makers), *["enhances prompts"] * len(enhancers)]
    for helper, use in zip([*makers, *enhancers], uses, strict=True):
        installed = "yes" if helper["here"] else "no"
        rows.append((helper["name"], helper["title"], byte_size(helper["bytes"]), installed, "", use, ""))
    terminal.table(("Name", "Title", "Size", "Installed", "Smallest GPU", "This machine", "Variant for it"), rows)
    terminal.line(f"Details of a model: `{program()} models show NAME`.")
    return {
        "models": listed,
        "parts": parts,
        "decoders": [_decoder(spec) for spec in frame_decoders],
        "upscalers": [_upscaler(spec) for spec in enlarging],
        "preprocessors": makers,
        "enhancers": enhancers,
    }


def show_model(name: str) -> dict[str, Any]:
    """Print and return what one model is, makes and needs.

    Raises:
        TandemError: if there is no such model, or it cannot be used.
    """
    loaded = settings.load()
    spec, machine = look_up(name, loaded.weights_dir), probe()
    if spec.only_decodes:
        title = f"{spec.name}: {spec.title}, {spec.license}, {spec.total_parameters / 1e6:,.1f} M parameters"
        terminal.result(f"{title}, {byte_size(stored_bytes(spec))}, decodes latents")
        return _decoder(spec)
    history = HistoryFile(loaded.cache_dir, machine).read()
    need, offered = needs(spec, machine, history), _offer(spec, machine, loaded.weights_dir, history)
    for line in (*describe(spec, need), *_variant_lines(spec, offered)):
        terminal.result(line)
    return _model(spec, need, offered)


def _place(spec: ModelSpec, need: Needs) -> tuple[bool, int, int]:
    """Return a key that sorts installed models first, then those that run well, then small ones."""
    return (not spec.is_downloaded, need.fit.rank, spec.total_parameters)


def _offer(spec: ModelSpec, machine: Machine, weights_dir: Path, history: History) -> VariantOffer | None:
    """Return the variants of a published model that is not installed; `None` if it has none."""
    model = None if spec.is_downloaded else known_as(spec.name)
    if model is None or not model.variants:
        return None
    return offer(candidates(model, machine, history), free_disk_bytes(weights_dir))


def _variant_lines(spec: ModelSpec, offered: VariantOffer | None) -> list[str]:
    """Return lines on the LoRAs of a variant, or on the variants of a model that is not installed."""
    if spec.variant is not None:
        loras = ", ".join(f"{lora.file} (strength {lora.weight:g})" for lora in spec.variant.loras)
        return [f"    variant {spec.variant.name} of {spec.variant.model}, always with {loras or 'no LoRA'}"]
    if offered is None:
        return []
    best = offered.best
    first = "none" if best is None else f"{_candidate(best)}: `{program()} models download {spec.name} --variant fits`"
    others = "; ".join(map(_candidate, offered.others))
    return [
        f"    variant for this machine: {first}",
        f"    {str(offered.reason).rstrip('.')}.",
        f"    other variants: {others}",
    ]


def _candidate(candidate: Candidate) -> str:
    """Return the name of a variant with its format and size."""
    size = byte_size(candidate.bytes) if candidate.is_exact else f"at most {byte_size(candidate.bytes)}"
    title = str(candidate.title).rstrip(".")
    return f"{candidate.name} ({title[:1].lower() + title[1:] if candidate.name == ORIGINAL else title}, {size})"


def _summary_row(spec: ModelSpec, need: Needs, offered: VariantOffer | None) -> tuple[str, ...]:
    """Return a model's row of the table."""
    installed = "yes" if spec.is_downloaded else "no"
    if _begun(spec):
        installed = f"{byte_size(_begun(spec))} of it"
    least = f"{need.least.gib} GB" if need.least else "none"
    if need.runs_well_without_gpu:
        least = "not needed"
    best = "" if offered is None else "none" if offered.best is None else offered.best.name
    if offered is not None and offered.best is not None:
        best += f", {byte_size(offered.best.bytes)}"
    return (spec.name, spec.title, _size(spec), installed, least, short(need.fit.verdict), best)


def _decoder(spec: ModelSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "folder": str(spec.directory),
        "title": spec.title,
        "license": spec.license,
        "parameters": spec.total_parameters,
        "bytes": stored_bytes(spec),
        "latent_channels": spec.vae.z_dim,
        "stride": spec.vae.scale_factor_spatial,
    }


def _helper(model: PublishedHelper, weights_dir: Path) -> dict[str, Any]:
    folder = folder_of_helper(model, weights_dir)
    return {
        "name": model.name,
        "title": model.title,
        "license": model.license,
        "repositories": model.repositories,
        "here": folder.is_dir(),
        "bytes": bytes_in(folder) if folder.is_dir() else model.size,
    }


def _upscaler(spec: ModelSpec) -> dict[str, Any]:
    (file,) = spec.weight_paths(UPSCALER)
    return {
        "name": spec.name,
        "file": str(file),
        "title": spec.title,
        "license": spec.license,
        "parameters": spec.total_parameters,
        "bytes": file.stat().st_size,
        "scale": spec.vae.scale_factor_spatial,
    }


def _model(spec: ModelSpec, need: Needs, offered: VariantOffer | None) -> dict[str, Any]:
    model = published(spec)
    return {
        "name": spec.name,
        "folder": str(spec.location),
        "here": spec.is_downloaded,
        "problem": None,
        "title": spec.title,
        "license": spec.license,
        "repository": _repository(spec) or (model.repository if model else None),
        "parameters": spec.total_parameters,
        "bytes": _bytes(spec),
        "bytes_estimated": not spec.is_downloaded,
        "files": {
            name: {"path": str(path), "format": spec.files[name].title, "expert": expert_of(path)}
            for name, path in spec.single_files.items()
        },
        "begun_bytes": _begun(spec),
        "sizes": [list(size) for size in spec.sizes],
        "frame_counts": list(spec.frame_counts),
        "defaults": vars(spec.defaults)
        | {"flow_shift": spec.flow_shift, "published_flow_shift": model.flow_shift if model else None},
        "needs": need.to_json(),
        "variant": None if spec.variant is None else spec.variant.model_dump(mode="json"),
        **({} if offered is None else offered.to_json()),
    }


def describe(spec: ModelSpec, need: Needs) -> list[str]:
    """Return lines of text on a model: title, license and size; default clip; memory that it needs."""
    defaults = spec.defaults
    begun = f"{byte_size(_begun(spec))} already downloaded" if _begun(spec) else "not installed"
    where = "installed" if spec.is_downloaded else f"{begun}: `{program()} models download {spec.name}`"
    if spec.files and not spec.is_downloaded:
        command = f"{program()} models download {published_name(spec)} --without-transformers"
        where = f"its other components are not installed: `{command}`"
    guidance, of_images = (_guidance(defaults, from_image=from_image) for from_image in (False, True))
    if of_images != guidance:
        guidance = f"{guidance} (from an image {of_images})"
    shift = _shift(spec)
    is_apart = need.resident and str(need.resident) != str(need.least) and not need.runs_well_without_gpu
    resident = f"; to stay loaded: {need.resident}" if is_apart else ""
    parameters = f"{spec.total_parameters / 1e6:,.1f} M parameters"
    return [
        f"{spec.name}: {spec.title}, {spec.license}, {parameters}, {_size(spec)}, {where}",
        f"    makes {defaults.width}x{defaults.height}, {defaults.frames} frames at {defaults.fps} fps, "
        f"{defaults.steps} steps, guidance {guidance}{shift}, negative prompt {_shown(spec)}",
        *(f"    {line}" for line in _files(spec)),
        f"    smallest GPU: {_smallest_gpu(need)}{resident}",
        f"    on this machine: {need.fit.summary}",
    ]


def _smallest_gpu(need: Needs) -> str:
    """Return the smallest GPU with the strategy on it."""
    if need.runs_well_without_gpu:
        return "not needed"
    if need.least is None:
        return "none; it needs more than any single GPU has"
    return f"{need.least} ({str(need.least.strategy).rstrip('.')})"


def _files(spec: ModelSpec) -> list[str]:
    """Return lines on the files of a model's transformers, and on where its other components are."""
    if not spec.single_files:
        return []
    experts = {name: expert_of(path) for name, path in spec.single_files.items()}
    files = [
        f"{path.name} ({_role(name, experts[name])})" for name, path in spec.single_files.items() if name != VAE_ENCODER
    ]
    return [", ".join(files), f"other components: {spec.directory}" if spec.is_downloaded else "no other components"]


def _role(component: str, expert: str | None) -> str:
    """Return what a file is used for."""
    if not is_transformer(component):
        return component.replace("_", " ").replace("vae", "VAE")
    return f"{expert}-noise expert" if expert else "expert unknown, used for all steps"


def _guidance(defaults: Defaults, *, from_image: bool) -> str:
    scales = defaults.guidance(from_image=from_image)
    return " and ".join(f"{scale:g}" for scale in scales if scale is not None)


def _shift(spec: ModelSpec) -> str:
    """Return the scheduler's shift, and that of the authors' code if it differs or the model is not installed."""
    model = published(spec)
    text = f"{model.flow_shift:g} in the model authors' code" if model else ""
    if spec.flow_shift is None:
        return f", shift {text}" if text else ""
    return f", shift {spec.flow_shift:g}" + (f" ({text})" if model and model.flow_shift != spec.flow_shift else "")


def _shown(spec: ModelSpec) -> str:
    negative = spec.defaults.negative_prompt
    if negative and negative == family_of(spec.family).negative_prompt:
        return "the model authors' own"
    short = cut(negative, _LONGEST_SHOWN)
    return f"“{short}”" if short else "none"


def _bytes(spec: ModelSpec) -> int:
    return stored_bytes(spec) if spec.single_files or spec.is_downloaded else download_bytes(spec)


def _size(spec: ModelSpec) -> str:
    """Return the size on disk or of the download."""
    is_exact = spec.single_files or spec.is_downloaded or published_bytes(spec)
    return byte_size(_bytes(spec)) if is_exact else f"at most {byte_size(_bytes(spec))}"


def _begun(spec: ModelSpec) -> int:
    return 0 if spec.is_downloaded else partial_bytes(spec.directory.parent, spec.directory.name)


def _repository(spec: ModelSpec) -> str | None:
    try:
        manifest = read_manifest(spec.directory) if spec.is_downloaded else None
    except TandemError:
        return None
    return manifest.repository if manifest else None


def download(
    name: str,
    revision: str | None,
    mirror: str | None,
    *,
    agreed: bool,
    without_transformers: bool = False,
    enhancer: bool = False,
    variant: str | None = None,
) -> dict[str, Any]:
    """Download a model after showing its license and asking for consent.

    Args:
        agreed: skips the question.
        without_transformers: leaves their weights out, for models whose transformers are in single files.
        enhancer: whether a repository is that of a chat model.
        variant: name of a variant of the model, `ORIGINAL`, or `FITS` for the one that fits this machine.

    Raises:
        TandemError: if the model is not available, the disk is too small, or downloads are disabled.
        CancelledError: on Ctrl-C; received data is kept.
    """
    loaded = settings.load()
    hub = hub_of(loaded, mirror)
    if revision is not None and not (revision.strip() and revision.isprintable()):
        raise InvalidRequestError("revision", "cli.revision_unreadable")
    if variant is not None:
        for option, conflicts in (("--without-transformers", without_transformers), ("--revision", revision)):
            if conflicts:
                raise InvalidRequestError("variant", "variant.excludes", option=option)
        name = _variant_folder(name, variant, loaded)
    line = _Line()
    source = source_of(name, revision, enhancer=enhancer)
    source = replace(source, without_transformers=without_transformers and source.makes_videos)
    with Download(source, loaded.weights_dir, hub, line.update, loaded.cache_dir) as transfer:
        with cancel_on_signals() as cancel, line.shown():
            plan = transfer.plan(cancel)
        terminal.line(_summary(plan))
        if plan.missing:
            terminal.line(_license(plan, hub.address))
            if not agreed:
                _ask(plan)
        with cancel_on_signals() as cancel, line.shown():
            transfer.run(plan, cancel)
    data = {"model": plan.folder.name, "fetched": plan.fetched_bytes}
    terminal.result(str(Fact("cli.model_downloaded" if plan.missing else "cli.model_complete", data)))
    listing = plan.listing
    return {
        "name": plan.folder.name,
        "folder": str(plan.folder),
        "repository": listing.repository,
        "revision": listing.commit,
        "license": listing.license,
        "bytes": listing.total_bytes,
        "fetched_bytes": plan.fetched_bytes,
        "files": [file.path for file in listing.files],
    }


def _variant_folder(name: str, variant: str, loaded: settings.Settings) -> str:
    """Return the name under which a variant of a model is downloaded.

    Raises:
        InvalidRequestError: if the model has no such variant, or it is no model's name.
        ModelError: if none fits this machine.
    """
    model = known_as(name)
    names = [] if model is None else [known.name for known in model.variants]
    if model is None:
        check_repository(name)
    if model is None or not names:
        raise InvalidRequestError("variant", "variant.none", model=name)
    if variant == FITS:
        machine = probe()
        history = HistoryFile(loaded.cache_dir, machine).read()
        offered = offer(candidates(model, machine, history), free_disk_bytes(loaded.weights_dir))
        if offered.best is None:
            raise ModelError("variant.nothing_fits", model=model.title, cause=offered.reason, names=[ORIGINAL, *names])
        terminal.line(f"{_candidate(offered.best)}: {str(offered.reason).rstrip('.')}.")
        variant = offered.best.name
    if variant == ORIGINAL:
        return model.name
    chosen = next((known for known in model.variants if known.name == variant), None)
    if chosen is None:
        raise InvalidRequestError(
            "variant", "variant.unknown", model=model.title, name=variant[:40], names=[FITS, ORIGINAL, *names]
        )
    return model.variant_folder(chosen)


def verify(names: Sequence[str]) -> dict[str, Any]:
    """Compare the files of downloaded models, by default all, with the hashes recorded at download.

    Raises:
        ModelError: if a model is not installed, or was not downloaded by Tandem.
        CancelledError: on Ctrl-C.
    """
    weights_dir = settings.load().weights_dir
    chosen = [_folder(name, weights_dir) for name in names] if names else downloaded(weights_dir)
    if not chosen:
        terminal.line(str(Fact("cli.no_models_downloaded")))
    rows, line = [], _Line()
    with cancel_on_signals() as cancel:
        for folder in chosen:

            def show_progress(path: str, done: int, total: int, folder: Path = folder) -> None:
                line.update(
                    DownloadProgress(
                        note=Fact("hub.verifying", {"file": f"{folder.name}/{path}"}), done=done, total=total
                    )
                )

            with line.shown():
                verification = verify_folder(folder, cancel, show_progress)
            _print_verified(verification)
            rows.append(_row(verification))
    return {"ok": all(not row["wrong"] for row in rows), "models": rows}


def _folder(name: str, weights_dir: Path) -> Path:
    """Return a model's folder by any of its names, also if files are missing."""
    fits = {folder.name.lower(): folder for folder in downloaded(weights_dir)}
    try:
        key = source_of(name, None).folder.lower()
    except InvalidRequestError:
        key = name.lower()
    match = fits.get(key) or fits.get(name.lower())
    if match is not None:
        return match
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser().resolve()
    return find(name, weights_dir).directory


def _print_verified(verification: Verification) -> None:
    name, count = verification.folder.name, len(verification.manifest.files)
    if not verification.differences:
        terminal.result(f"{name}: verified, {count} files, {byte_size(verification.total_bytes)}.")
        return
    for difference in verification.differences.values():
        terminal.result(f"{name}: {render(difference).what}")
    repository = name if known_variant(name) is not None else verification.manifest.repository
    again = f"`{program()} models download {quoted(repository)}`"
    terminal.warning(f"{len(verification.differences)} of {count} files are wrong. Download them again: {again}")


def _row(verification: Verification) -> dict[str, Any]:
    return {
        "name": verification.folder.name,
        "folder": str(verification.folder),
        "repository": verification.manifest.repository,
        "revision": verification.manifest.commit,
        "files": len(verification.manifest.files),
        "bytes": verification.total_bytes,
        "wrong": {path: render(difference).what for path, difference in verification.differences.items()},
    }


def _summary(plan: DownloadPlan) -> str:
    listing = plan.listing
    what = (
        f"{listing.repository} at {listing.commit[:12]}: {len(listing.files)} files, {byte_size(listing.total_bytes)}"
    )
    if not plan.missing:
        return f"{what}."
    here = f", {byte_size(plan.downloaded_bytes)} already downloaded" if plan.downloaded_bytes else ""
    return (
        f"{what}{here}; {byte_size(plan.fetched_bytes)} to download, {byte_size(plan.free_bytes)} of disk space free."
    )


def _license(plan: DownloadPlan, address: str) -> str:
    if plan.listing.license:
        pages = ", ".join(f"{address}/{repository}" for repository in plan.listing.repositories)
        return f"License: {plan.listing.license}. Text: {pages}"
    return f"The repository states no license; see {address}/{plan.listing.repository}"


def _ask(plan: DownloadPlan) -> None:
    cannot = InvalidRequestError("yes", "cli.license_not_confirmed")
    terminal.ask(f"Download {plan.listing.repository}?", cannot)


class _Line(terminal.LiveLine):
    """Progress of a download: a live line on a terminal; on a pipe, one line per file and per wait."""

    def __init__(self) -> None:
        super().__init__()
        self._progress = DownloadProgress()
        self._last = ""

    def update(self, progress: DownloadProgress) -> None:
        """Show new progress."""
        with self._lock:
            self._progress = progress
            text = progress.note_text or (f"{progress.file}, {byte_size(progress.file_size)}" if progress.file else "")
            new = bool(text) and text != self._last
            self._last = text or self._last
        if new:
            number = f"{progress.number} of {progress.count}: " if progress.file and not progress.note else ""
            self.print_on_pipe(f"{number}{text}")

    def text(self) -> str:
        """See `terminal.LiveLine`."""
        with self._lock:
            progress = self._progress
        return progress_text(progress)


def progress_text(progress: DownloadProgress) -> str:
    """Return a download's progress as one line, with a bar if the total size is known."""
    if progress.share is None:
        return progress.line
    return f"{terminal.bar(progress.share)} {progress.line}"
