"""Whether anything may be fetched, and from where: what the settings say of hubs."""

from runtime.core.errors import DownloadError
from runtime.core.settings import Settings, check_hub
from runtime.models.hub.remote import Hub


def hub_of(settings: Settings, mirror: str | None = None) -> Hub:
    """Return the hub to fetch from.

    Args:
        mirror: an address that goes before the settings'.

    Raises:
        DownloadError: if nothing is to be fetched.
        SettingsError: for an address that is none.
    """
    check_online(settings)
    if mirror is not None:
        return Hub(check_hub(mirror, "--mirror"))
    return Hub(check_hub(settings.hub, "HF_ENDPOINT or the setting `hub`"))


def check_online(settings: Settings) -> None:
    """Refuse to fetch anything where that was forbidden.

    Raises:
        DownloadError: naming who forbade it.
    """
    if settings.offline:
        by = {"TANDEM_OFFLINE": "--offline or TANDEM_OFFLINE"}.get(settings.offline, settings.offline)
        raise DownloadError(
            f"Nothing is fetched: {by} is set.",
            "Leave it out to fetch the model, or put its folder into the weights folder by hand.",
        )
