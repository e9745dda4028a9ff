"""Messages of `runtime.server`."""

from collections.abc import Mapping

from runtime.core.messages import Message

MESSAGES: Mapping[str, Message] = {
    "server.visitor_maximum": Message("{value} {field} exceed the limit for visitors.", "Choose at most {maximum}."),
    "server.visitor_size": Message("{width}×{height} is larger than visitors may use.", "Choose at most {maximum}."),
    "server.visitor_queue_full": Message(
        "You already have {maximum:n video} queued or running.", "Wait until one is done, or cancel one."
    ),
    "server.queue_full": Message("The queue is full.", "Try again in a few minutes."),
    "server.visitor_rate": Message(
        "Visitors may generate {maximum:n video} an hour.", "Try again in {minutes:n minute}."
    ),
    "server.visitor_images": Message(
        "Visitors may upload {maximum:n image} an hour.", "Try again in {minutes:n minute}."
    ),
    "server.visitor_image_unknown": Message(
        "{field:setting} is not an image that you uploaded since you logged in.", "Upload the image first."
    ),
    "server.images_full": Message("Visitors have uploaded too many images.", "Try again in an hour."),
    "server.disk_full": Message(
        "The disk of this server is nearly full.", "Ask the person who shared it to free some space."
    ),
    "server.no_share_link": Message(
        "There is no share link. {cause}",
        "Check the internet connection and start Tandem again with --share; the local page keeps working.",
    ),
    "server.tunnel_start": Message("The tunnel program does not start: {error}."),
    "server.tunnel_unreachable": Message("Gradio's server {host} was not reached."),
    "server.tunnel_no_server": Message("Gradio's server named no share server."),
    "server.tunnel_not_writable": Message(
        "There is no share link: {path} cannot be written: {error}.",
        "Set TANDEM_CACHE_DIR to a folder that you can write to.",
    ),
    "server.tunnel_unsupported": Message(
        "There is no share link: Gradio has no {program} for this machine.",
        "Share from another machine; the local page keeps working.",
    ),
    "server.tunnel_download": Message("The tunnel program frpc could not be downloaded from {host}."),
    "server.tunnel_not_kept": Message("The tunnel program {path} cannot be stored: {error}."),
    "server.tunnel_checksum": Message(
        "The downloaded tunnel program does not have the checksum that Gradio publishes."
    ),
    "server.tunnel_no_link": Message("The share server gave no link ({output})."),
    "server.link_internal_error": Message("There is no share link: {error}.", "The log has the details."),
    "server.link_ended": Message("The share link has ended.", "Start Tandem again with --share for a new link."),
    "server.no_visitor_model": Message(
        "There is no model that visitors may use.", "Put a model into the weights folder."
    ),
}
