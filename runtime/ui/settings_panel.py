"""What the server draws of the sheet Settings: default models, the share link, the folder of videos, and disk space."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from runtime.core.disk_caches import DISK_CACHES, files_of
from runtime.core.environment import program
from runtime.core.errors import SettingsError
from runtime.core.settings import CACHE_VARIABLE, LOOPBACK, Settings, check_share
from runtime.core.units import byte_size
from runtime.engines.store import EngineStore
from runtime.machine.probe import free_disk_bytes
from runtime.models.spec import ModelSpec
from runtime.queue import storage
from runtime.queue.job_queue import JobQueue
from runtime.server.serve import address_of
from runtime.server.visitor_limits import describe_limits, limits_of
from runtime.ui import form
from runtime.ui.formatting import page_text, render
from runtime.ui.panels import Call, Reply, drawn, unknown_action
from runtime.ui.sharing import Sharing

# Folders of the cache whose files make later starts faster.
_CACHES = frozenset({*(cache.name for cache in DISK_CACHES), *storage.CACHES})
# Quiet zone of a QR code, in modules, as ISO/IEC 18004 demands.
_QUIET_ZONE = 4


@dataclass(frozen=True)
class DiskUse:
    """A part of the disk space that Tandem uses.

    Attributes:
        info: what it contains, or how it is freed.
        tab: the tab on which it is freed; empty for none.
    """

    title: str
    size: int
    info: str
    tab: str = ""


class SettingsPanel:
    """What the server draws of the sheet; see `panels.Panel`.

    Args:
        models: what the page offers, by name.
        sharing: the share link, if there is one.
    """

    def __init__(
        self,
        worker: JobQueue,
        store: EngineStore,
        models: dict[str, ModelSpec],
        settings: Settings,
        sharing: Sharing | None,
    ) -> None:
        self._worker = worker
        self._store = store
        self._models = models
        self._settings = settings
        self._sharing = sharing

    def act(self, call: Call) -> Reply:
        """Carry out an action: "open" also measures the folders, which takes longer."""
        if call.action not in {"refresh", "open"}:
            raise unknown_action()
        return {}

    def draw(self, call: Call, _reply: Reply) -> dict[str, str]:
        """Return the state of the share link and, when the sheet opens, everything else."""
        parts = {"sharing": lambda: self._sharing_html(with_login=call.view.get("login") is True)}
        if call.action == "open":
            parts |= {"defaults": lambda: form.defaults_html(self._models), "storage": self._storage_html}
        return drawn(parts)

    def _sharing_html(self, *, with_login: bool) -> str:
        settings, sharing = self._settings, self._sharing
        link = ""
        if sharing is not None and sharing.state == "open":
            link = sharing.login_link() if with_login and sharing.generated else sharing.url
        conflict = ""
        try:
            check_share(settings)
        except SettingsError as error:
            conflict = page_text(error.fact).what
        spec = self._models.get(settings.model)
        return render(
            "settings_sharing.html",
            limits=describe_limits(limits_of(settings, spec)) if spec else "",
            address=address_of(settings.host, settings.port),
            local=settings.host in LOOPBACK,
            user=settings.auth[0] if settings.auth else "",
            program=program(),
            sharing=sharing,
            conflict=conflict,
            with_login=with_login,
            code=qr_code(link) if link else "",
        )

    def _storage_html(self) -> str:
        settings = self._settings
        uses = disk_uses(settings.cache_dir, storage.measure(self._worker.store, None).total_bytes, self._store)
        return render(
            "settings_storage.html",
            outputs_dir=settings.outputs_dir,
            cache_dir=settings.cache_dir,
            variable=CACHE_VARIABLE,
            free=free_disk_bytes(settings.outputs_dir),
            uses=uses,
            total=sum(use.size for use in uses),
        )


def disk_uses(cache_dir: Path, history_bytes: int, store: EngineStore) -> list[DiskUse]:
    """Return what uses disk space: what the tabs can free, as they show it, then the rest of the cache folder.

    Args:
        history_bytes: of the owner's videos and jobs, as History shows it.
        store: of the engines, which may be elsewhere.
    """
    folders: Counter[str] = Counter()
    for entry in files_of(cache_dir):
        folders[entry.path.relative_to(cache_dir).parts[0]] += entry.size
    inside = cache_dir in store.folder.parents
    limit = f"At most {byte_size(store.max_bytes)}{'' if inside else f', in {store.folder}'}."
    models_info = "With LoRAs and unfinished downloads, without linked folders."
    models = DiskUse("Models", folders["weights"], models_info, "Models")
    engines = DiskUse("Engines", store.total_bytes(), limit, "Engines")
    history_info = "Videos, checkpoints, images, and deleted videos that can be restored."
    history = DiskUse("History", history_bytes, history_info, "History")
    latents = DiskUse("Latents", folders["latents"], "Files to decode: uploaded in Models, or put into the folder.")
    caches_info = "Make later starts faster. Delete them only while Tandem is stopped."
    caches = DiskUse("Caches", sum(folders[name] for name in _CACHES), caches_info)
    in_cache = [models, *([engines] if inside else []), history, latents, caches]
    # The history may have videos that were saved elsewhere.
    rest = max(folders.total() - sum(use.size for use in in_cache), 0)
    other = DiskUse("Other", rest, "Videos of visitors and API keys, logs, files of the page.")
    return [use for use in (models, engines, history, latents, caches, other) if use.tab or use.size]


def qr_code(text: str) -> str:
    """Return a QR code as SVG without a size: dark on light in both color schemes, because some scanners need that."""
    import segno  # takes 30 ms, and only share links need it

    code = segno.make(text, error="m", micro=False)
    return str(code.svg_inline(omitsize=True, border=_QUIET_ZONE, svgclass=None, lineclass=None))
