"""Messages of `runtime.server`."""

from collections.abc import Mapping

from runtime.core.messages.message import Message

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
    "server.visitor_video": Message("Visitors cannot start from a video.", "Leave the video out."),
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
    "server.watch_ended": Message(
        "Progress is no longer shown here, because {maximum} newer pages or programs show videos. The video continues.",
        "Close other pages, then reload this one.",
    ),
    # The HTTP API.
    "server.api_key_missing": Message(
        "This server needs an API key.",
        "Send the header `Authorization: Bearer KEY`; `{tandem} serve keys add NAME` makes one.",
    ),
    "server.api_key_wrong": Message(
        "The API key is not valid.",
        "Check the key; the owner of this server makes a new one with `{tandem} serve keys add NAME`.",
    ),
    "server.api_keys_unreadable": Message(
        "The file of the API keys cannot be read: {file}.", "Restore the file, or delete it and add the keys again."
    ),
    "server.api_keys_not_written": Message(
        "The file of the API keys cannot be written: {file}: {error}.", "Make its folder writable."
    ),
    "server.api_key_exists": Message(
        "There is a key with the name {name}.", "Revoke it first, or choose another name."
    ),
    "server.api_key_unknown": Message("There is no key with the name {name}.", "Select one of: {known:list}."),
    "server.api_key_name": Message(
        "The name {name} cannot be used.", "Use 1 to 40 letters, digits, - or _; the first is a letter or digit."
    ),
    "server.api_host_without_key": Message(
        "The host {host} can be reached from other machines, and there is no API key.",
        "Make a key with `{tandem} serve keys add NAME`, or listen on 127.0.0.1.",
    ),
    "server.api_no_route": Message("There is no route {method} {path}.", "See /v1/docs."),
    "server.api_no_method": Message("{path} does not support {method}.", "Use {allowed}."),
    "server.api_no_batch": Message("There is no batch {batch}.", "Use the batch of a video of GET /v1/videos."),
    "server.api_no_video": Message("There is no video {video}.", "List your videos with GET /v1/videos."),
    "server.api_not_ready": Message("The video {video} is not completed.", "Wait until its status is completed."),
    "server.api_no_clip": Message(
        "There is no such clip of the video {video}.",
        "Use the newest path in its events, or its content once it is completed.",
    ),
    "server.api_range": Message(
        "The range starts beyond the end of the file.", "Ask for a range within the size in Content-Range."
    ),
    "server.api_no_file": Message("The file of the video {video} does not exist any more.", "Generate it again."),
    "server.api_still_stopping": Message(
        "The video {video} is being stopped.", "Delete it again once its status is failed."
    ),
    "server.api_media_type": Message("The content type is {given}.", "Send application/json or multipart/form-data."),
    "server.api_charset": Message("The charset of the form is {given}.", "Send it in UTF-8."),
    "server.api_not_json": Message("The body is not valid JSON: {problem}.", "Send one JSON object."),
    "server.api_no_settings": Message(
        "These tags have no settings of ComfyUI, Wan2GP or FramePack-Studio.",
        "Send the texts of comment, prompt and workflow, or in json the text of a JSON file.",
    ),
    "server.api_not_a_switch": Message(
        "{field:setting} is neither true nor false.", "Give one of them, or leave it out."
    ),
    "server.api_not_a_form": Message(
        "The body is not a valid form: {problem}.", "Send at most {fields} fields of text and {files} images."
    ),
    "server.api_field_repeated": Message("The field {name} occurs more than once.", "Send it once."),
    "server.api_excludes": Message("{name} and {other} exclude each other.", "Send one of them."),
    "server.api_image": Message(
        "{field} is not an image.",
        'Send a file in a form, or {{"image_url": "data:image/png;base64,…"}} in JSON; no other address is fetched.',
    ),
    "server.api_video": Message(
        "{field} is not a video.",
        'Send a file in a form, or {{"video_url": "data:video/mp4;base64,…"}} in JSON; no other address is fetched.',
    ),
    "server.api_mask": Message(
        "{field} is not a video or an image.",
        'Send a file in a form, or {{"video_url": "data:video/mp4;base64,…"}} or '
        '{{"image_url": "data:image/png;base64,…"}} in JSON, or boxes as text; no other address is fetched.',
    ),
    "server.api_query": Message("{name} is {value}: {problem}.", "See /v1/docs."),
    "server.api_idempotency_key": Message(
        "The Idempotency-Key is not valid.", "Use 1 to 255 printable ASCII characters."
    ),
    "server.api_maximum": Message(
        "{field} is {value}; this key allows at most {maximum}.", "Choose at most {maximum}."
    ),
    "server.api_maximum_interpolated": Message(
        "The interpolated video has {value} frames; this key allows at most {maximum}.",
        "Interpolate by less, or choose fewer frames.",
    ),
    "server.api_maximum_size": Message(
        "The size is {width}×{height}; this key allows at most {maximum}.", "Choose a smaller size."
    ),
    "server.api_queue_full": Message(
        "{maximum:n video} of this key are queued or running.", "Wait until one is completed, or delete one."
    ),
    "server.api_rate": Message("This key allows {maximum:n video} an hour.", "Try again in {minutes:n minute}."),
    "server.interrupted": Message("Tandem ended while this video was generated.", "Generate it again."),
    "server.api_cancelled": Message("The video was cancelled.", "Create it again."),
    # The MCP server.
    "server.mcp_not_installed": Message(
        "The package mcp is not installed, or is older than version 2.",
        "Run `.venv/bin/python -m pip install -r requirements-mcp.txt`.",
    ),
    "server.mcp_key": Message(
        "The Tandem at {address} needs an API key.",
        "Set {variable} to a key; `serve keys add NAME` makes one.",
    ),
    "server.mcp_unreachable": Message(
        "The Tandem at {address} does not answer.", "Start it again, or restart this MCP server."
    ),
    "server.mcp_broken_off": Message(
        "The Tandem at {address} has broken the connection off.", "List the videos before you try again."
    ),
    "server.mcp_no_api": Message(
        "{address} answered with status {status}, which Tandem does not.", "Choose another port with --port."
    ),
    "server.mcp_tool": Message("There is no tool {name}.", "Call one of: {known:list}."),
    "server.mcp_argument": Message("{name}: {problem}.", "See the input schema of the tool."),
    "server.mcp_no_paths": Message(
        "{field} is not a data URL.", "Send it as data:image/png;base64,… or data:video/mp4;base64,…"
    ),
    "server.mcp_relative_path": Message("{path} is not an absolute path.", "Give the whole path of the file."),
    "server.mcp_file": Message("{path} cannot be read: {problem}.", "Give the path of a file that exists."),
    "server.mcp_mixed_files": Message("{field} has paths and data URLs.", "Name all files in the same way."),
    "server.mcp_resource": Message("There is no resource {uri}.", "Name a video as tandem://videos/ID."),
    "server.mcp_too_large": Message(
        "The video {video} is larger than {maximum:bytes}.", "Download it from its url, which get_video returns."
    ),
    # The cluster.
    "server.cluster_no_ray": Message(
        "Ray is not installed, which a cluster needs.",
        "Run `.venv/bin/python -m pip install -r requirements-cluster.txt`.",
    ),
    "server.cluster_ray_failed": Message(
        "Ray does not start: {output}.",
        "Check that no firewall blocks it and that memory and disk have space; try again.",
    ),
    "server.cluster_key_file": Message(
        "The file of the cluster's key cannot be used: {file}: {error}.",
        "Make it readable, or delete it for a new key.",
    ),
    "server.cluster_key_missing": Message(
        "The key of the cluster is missing.", "Set {variable} to the key that `serve --cluster` shows on the head."
    ),
    "server.cluster_key_invalid": Message(
        "{source} has no cluster key.", "Copy the 64 characters that `serve --cluster` shows on the head."
    ),
    "server.cluster_key_wrong": Message(
        "The head at {address} does not accept the key.", "Copy the key that `serve --cluster` shows on the head."
    ),
    "server.cluster_address": Message(
        "{address} is not an address of a head.", "Give HOST:PORT, as in 192.168.1.5:7860."
    ),
    "server.cluster_unreachable": Message(
        "There is no head at {address}: {error}.",
        "Start it with `serve --cluster --host ADDRESS`, or check the address.",
    ),
    "server.cluster_not_a_head": Message(
        "The server at {address} is not the head of a cluster.", "Start it with `serve --cluster`."
    ),
    "server.cluster_version": Message(
        "The head has {name} {theirs}, this machine {own}.", "Install the same version on both."
    ),
    "server.cluster_refused": Message(
        "It was refused: it has {found}; the head has {wanted}.",
        "Install {wanted} there, then start `worker --join` there again.",
    ),
    "server.cluster_place_loaded": Message("{model} is loaded on {host}."),
    "server.cluster_place_stored": Message("{model} is on the disk of {host}."),
    "server.cluster_place_sent": Message("{host} is the next to be free; the head sends {model} to it."),
    "server.cluster_place_held": Message("Paused."),
    "server.cluster_place_none": Message("No machine makes videos yet."),
    "server.cluster_place_gpus": Message("It needs {gpus:n GPU}; the largest worker has {most}."),
    "server.cluster_place_memory": Message("It needs {needed:memory} of memory; the largest worker has {most:memory}."),
    "server.cluster_place_later": Message("Other videos run first."),
    "server.cluster_start_slow": Message(
        "Its worker has not answered for {seconds:duration}.", "If it never does, see the log of the machine."
    ),
    "server.cluster_start_environment": Message(
        "Ray cannot prepare a worker there: {reason}.", "Correct it on the machine; the head tries again."
    ),
    "server.cluster_start_resources": Message(
        "Ray has too few free GPUs or workers there.", "Start `worker --join` there again."
    ),
    "server.cluster_start_memory": Message(
        "Ray ended the worker because memory ran out.", "Free memory on the machine; the head tries again."
    ),
    "server.cluster_start_failed": Message(
        "The worker does not start: {reason}.",
        "Install the requirements there in the versions of the head; the head tries again.",
    ),
    "server.cluster_start_died": Message(
        "The worker's process ended while it started.", "See the log of the machine; the head tries again."
    ),
    "server.cluster_gpus": Message(
        "{count} GPUs cannot be divided into groups of {size}.", "Choose a divisor of {count}."
    ),
    "server.cluster_other_model": Message(
        "The machine {host} has another version of {model}: {file} differs.",
        "Delete the model there; the head sends its own.",
    ),
    "server.cluster_file_refused": Message("The file name {name} is not accepted.", "See the log of the machine."),
    "server.cluster_events_refused": Message(
        "The machine sends events of {job} that no video has.", "Update Tandem on the machine, or remove it."
    ),
    "server.cluster_file_damaged": Message("{name} was damaged while it was sent.", "Try again."),
    "server.cluster_not_sent": Message("A file could not be sent: {error}.", "See the log."),
    "server.api_internal": Message("Internal error.", "The log of the server has the details."),
    # Requests of the page that are refused.
    "server.session_name": Message("The session's name must be 1 to 64 letters, digits, - or _."),
    "server.session_of_another": Message("This session is another visitor's."),
    "server.not_found": Message("There is no such {kind}."),
    "server.call_values": Message(
        '"data" must be a list of {count} values, in the order of the endpoint\'s parameters.'
    ),
    "server.call_too_many_values": Message(
        '"data" must be a list of at most {count} values, in the order of the endpoint\'s parameters.'
    ),
    "server.call_unsupported": Message("Batches and tokens are not supported."),
    "server.call_type": Message('"{name}" has the wrong type.'),
    "server.call_too_large": Message("The body holds more values than any form here."),
    "server.call_files": Message("Files are not accepted."),
    "server.panel_call_incomplete": Message("The request is incomplete."),
    "server.not_json": Message("The body is not JSON."),
    "server.not_an_object": Message("The body is not a JSON object.", "Send one JSON object."),
    "server.content_type": Message("The content type must be application/json."),
    "server.form_encoding": Message("Forms must be in UTF-8."),
    "server.form_not_one_file": Message("The body is not a form with one file."),
    "server.request_incomplete": Message("The request was incomplete.", "Send it again."),
    "server.body_too_large": Message(
        "The body has more than {maximum:bytes}.", "Shorten its texts, or send smaller images."
    ),
    "server.other_site": Message("Requests from other sites are refused."),
    "server.host_invalid": Message("Invalid Host header."),
    "server.host_other": Message("This server only answers to its own host name."),
    "server.route_closed": Message("This route is closed."),
    "server.login_needed": Message("Log in first."),
    "server.logins_busy": Message("Too many login attempts.", "Wait a minute."),
    "server.requests_busy": Message("Too many requests at once.", "Close a tab and try again."),
    "server.uploads_busy": Message("Too many uploads at once.", "Try again."),
}
