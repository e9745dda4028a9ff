"""Messages of `runtime.models`."""

from collections.abc import Mapping

from runtime.core.messages.message import Message

_RETRY_LATER = "Check the connection and try again later. The download continues where it stopped."
_ANOTHER_REPOSITORY = "Choose another repository; nothing was fetched from this one."
_TOKEN = "set HF_TOKEN to a token of your account, or: hf auth login"

_HUB: Mapping[str, Message] = {
    # Whether and from where
    "hub.offline": Message(
        "Downloads are disabled: {by} is set.",
        "Unset it to download the model, or copy the model's folder into the weights folder.",
    ),
    "hub.variable_unusable": Message(
        "Downloads need the environment variable {variable}, whose value cannot be used.",
        "Correct it, or unset it. Proxies are http:// or https:// addresses, certificates files in PEM format.",
    ),
    "hub.name_invalid": Message(
        "{name!r} is not a model's name.", "Use a name of `{tandem} models list`, or OWNER/REPOSITORY."
    ),
    # Answers of a hub
    "hub.malformed_answer": Message("The hub's answer is malformed.", "Check the hub's address."),
    "hub.gated": Message(
        "The hub requires an account that has accepted the license of {repository}.",
        f"Accept it on the page of {{repository}}, then {_TOKEN}",
    ),
    "hub.no_revision": Message(
        "The repository has no such revision.", "Omit --revision, or name a branch, tag or commit."
    ),
    "hub.revision_of_parts": Message(
        "{model} is in several repositories, so --revision cannot be used.", "Omit --revision."
    ),
    "hub.no_repository": Message(
        "The hub has no such repository ({repository}), or this account may not read it.",
        f"Check the name. For a private repository, {_TOKEN}",
    ),
    "hub.token_refused": Message("The hub refuses the token (401).", "Renew HF_TOKEN, or unset it."),
    "hub.forbidden": Message("The hub denies access (403).", f"To get access, {_TOKEN}"),
    "hub.status": Message(
        "The hub answers with status {status}.", "Check the model's name, the revision and the hub's address."
    ),
    "hub.redirect_loop": Message("The hub redirects in a loop.", "Check the hub's address."),
    "hub.unsafe_redirect": Message(
        "The hub redirects to {target!r}, which does not use https.", "Download the model from another hub."
    ),
    # Connections
    "hub.silent": Message("The hub did not answer for {seconds:g} s."),
    "hub.unreachable": Message("The hub cannot be reached ({reason})."),
    "hub.disconnected": Message("The connection was lost."),
    "hub.other_range": Message("The hub sent another part of the file."),
    "hub.rate_limited": Message("The hub's rate limit is reached."),
    "hub.failed": Message("The hub failed with status {status}."),
    "hub.retrying": Message("{cause:sentence}; trying again in {seconds:n second}."),
    "hub.unavailable": Message("{cause:sentence} ({failures:n attempt} failed).", _RETRY_LATER),
    "hub.busy": Message("{cause:sentence}; it asks to wait {seconds:duration}.", _RETRY_LATER),
    # Repositories
    "hub.path_outside": Message(
        "{repository} has a file whose path is outside of its folder: {path!r}.", _ANOTHER_REPOSITORY
    ),
    "hub.not_a_pipeline": Message(
        "{repository} has no {file}: it is not a pipeline in diffusers' format.",
        "Choose the repository whose name ends with -Diffusers, or another model.",
    ),
    "hub.names_differ_in_case": Message(
        "{repository} has two files whose names differ in case only.", _ANOTHER_REPOSITORY
    ),
    "hub.only_pickled_weights": Message(
        "{repository} has only pickled weights for its {component}; they can run code when loaded.",
        "Choose a repository with safetensors in diffusers' format.",
    ),
    "hub.no_safetensors": Message(
        "{repository} has no safetensors for its {component}.",
        "Choose a repository with safetensors in diffusers' format.",
    ),
    "hub.file_too_large": Message("{file} has {size:bytes}, although it holds no weights.", _ANOTHER_REPOSITORY),
    "hub.no_file": Message(
        "{repository} has no file {file}.", "Its owner has removed or renamed it. Download another variant."
    ),
    "hub.other_file": Message(
        "The hub's {file} of {repository} is not the file that this variant was published with.",
        "Its owner or the hub has replaced it. Download another variant.",
    ),
    "hub.no_hash": Message(
        "The hub states no valid size and hash for {file}, so it cannot be verified.", "Use another hub."
    ),
    # Content
    "hub.file_missing": Message("{file} is missing."),
    "hub.file_size": Message("{file} has {size:,} bytes instead of {expected:,}."),
    "hub.file_unreadable": Message("{file} cannot be read ({reason})."),
    "hub.file_hash": Message("{file} does not match its hash."),
    "hub.file_other_size": Message("{file} does not have {expected:,} bytes."),
    "hub.fetching_again": Message("{cause:sentence}; fetching it again."),
    "hub.content_mismatch": Message(
        "{cause:sentence}, twice: the hub does not send the file that it lists.",
        "Use another hub; nothing of that file was kept.",
    ),
    # Folders
    "hub.download_running": Message(
        "{model} is already being downloaded by another Tandem process.", "Wait for it, or cancel it there."
    ),
    "hub.not_a_download": Message(
        "The folder of {model} already exists and was not created by `{tandem} models download`.",
        "Use it as it is, or move {folder} away to download it again.",
    ),
    "hub.other_repository": Message(
        "The folder of {model} already exists, from {repository}.",
        "Move {folder} away to download another model of that name.",
    ),
    "hub.folder_is_link": Message(
        "{folder} is a link.", "Remove it, or set TANDEM_CACHE_DIR to a folder on the disk that you want to use."
    ),
    "hub.partial_is_link": Message("{folder} is a link.", "Remove it and try again."),
    "hub.disk_full": Message(
        "Not enough disk space: {needed:bytes} to fetch, {free:bytes} free in {folder}.",
        "Free some space, or set TANDEM_CACHE_DIR to a folder on another disk.",
    ),
    "hub.disk_may_be_full": Message(
        "The disk may be too small: up to {needed:bytes} to fetch, {free:bytes} free in {folder}.",
        "Free some space, or set TANDEM_CACHE_DIR to a folder on another disk.",
    ),
    "hub.cannot_write": Message(
        "{folder} cannot be written: {reason}.",
        "Free some space or set TANDEM_CACHE_DIR to another folder, then try again. Received data is kept.",
    ),
    "hub.model_unusable": Message(
        "{repository} was downloaded and verified, but cannot be used: {cause}",
        "Choose another repository. You can delete {folder}.",
    ),
    "hub.manifest_damaged": Message(
        "{file} is damaged, so the model cannot be verified.",
        "Move the folder away and download the model again, or delete the file to use the model unverified.",
    ),
    "hub.no_manifest": Message(
        "{model} was not created by `{tandem} models download`: there are no hashes to verify it against.",
        "Compare it with its source.",
    ),
    # Progress
    "hub.asking": Message("Asking {host}."),
    "hub.verifying": Message("Verifying {file}."),
    "hub.checking_model": Message("Checking the model."),
}

_AGAIN = "Copy or download the model again."
_COMPONENTS = "Put the folders text_encoder, tokenizer, vae, scheduler and others of such a model beside the file."

_FILES: Mapping[str, Message] = {
    "model.in_use": Message("{model} is used by {jobs:n job} in the queue.", "Wait for them, or cancel them in Queue."),
    "model.not_deletable": Message("{model} is not in the models folder.", "Delete it in {folder} if you want to."),
    "model.not_offered": Message("There is no model of that name here.", "Choose one of: {models:list}."),
    "model.weights_folder_unreadable": Message(
        "The weights folder {folder} cannot be read: it belongs to another user.",
        "Make it readable, or set TANDEM_CACHE_DIR to another folder.",
    ),
    "model.file_unreadable": Message("{file} cannot be read: {reason}.", "Check the file {path} and its permissions."),
    "model.file_too_many": Message("{file} has more than {most:,} values; no configuration has so many.", _AGAIN),
    "model.lfs_pointer": Message(
        "{file} is only a Git LFS pointer: its content has not been fetched.",
        "Run `git lfs pull` in {folder}, or download the model in another way.",
    ),
    "model.byte_order_mark": Message(
        "{file} begins with a byte order mark, with which its library cannot read it.",
        "Save the file as UTF-8 without a byte order mark.",
    ),
    "model.tokenizer_missing": Message(
        "{model} has no tokenizer: {folder} has none of {files:list}.",
        "Copy the folder {folder} of the same model.",
    ),
    "model.boundary_missing": Message(
        "{model} has two experts, and its model_index.json does not state at which noise level the second one begins.",
        'Add "boundary_ratio": {value:g} to {file}.',
    ),
    "model.file_damaged": Message("{file} is damaged or truncated ({size:,} bytes).", _AGAIN),
    "model.tensors_invalid": Message("{file} is not a valid safetensors file: {cause:clause}.", _AGAIN),
    "model.gguf_invalid": Message("{file} is not a valid GGUF file: {cause:clause}.", _AGAIN),
    "gguf.no_magic": Message("It does not begin with GGUF."),
    "gguf.version": Message("Its version is {version}; versions 2 and 3 are read."),
    "gguf.too_many": Message("It states more than {most:,} tensors or values."),
    "gguf.alignment": Message("Its data are not aligned as it states."),
    "gguf.metadata_invalid": Message("Its metadata or a name is malformed."),
    "gguf.type_unknown": Message("{tensor!r} has the type {type}, which cannot be read."),
    "model.ncnn_invalid": Message("{file} is not a model of ncnn that Tandem reads: {cause:clause}.", _AGAIN),
    "ncnn.no_magic": Message("It does not begin with 7767517."),
    "ncnn.layers": Message("It has {layers:n layer} and states another number, or more than {most:,}."),
    "ncnn.layer_malformed": Message("The line {line} is no layer."),
    "ncnn.layer_unknown": Message("The layer {kind} is not one of {known:list}."),
    "ncnn.shape": Message("A layer {layer} has no valid shape, changes the size of frames, or is quantized."),
    "ncnn.flag": Message("Weights begin with {flag}, which is neither float16 nor float32."),
    "ncnn.other_network": Message("Its network is neither Real-ESRGAN's for videos nor an RRDBNet."),
    "ncnn.more_weights": Message("It has {size:bytes}, but its layers have {read:bytes}."),
    "model.file_no_format": Message(
        "{file} is neither a safetensors nor a GGUF file.", "Choose the file of a model, or copy it again."
    ),
    "model.not_deleted": Message("{file} could not be deleted: {reason}", "Check its permissions."),
    "model.file_is_part": Message(
        "{file} is a {component:lower_component} in a single file ({format}), and makes no videos alone.",
        "Leave it in the weights folder or beside the transformer's file, and use {set[model=FILE]} with that.",
    ),
    "model.file_needs_folder": Message(
        "{file} is the {component:lower_component} of {title} or a model like it. Tandem reads it from folders only.",
        "Use a folder in diffusers' format: `{tandem} models download {model}`.",
    ),
    "model.file_has_control_blocks_only": Message(
        "{file} has only the blocks that read control videos, without the transformer that they are added to.",
        "Use a file of the whole model, such as wan2.1_vace_14B_fp16.safetensors.",
    ),
    "model.file_unknown": Message(
        "{file} is no transformer of a model that Tandem runs from a single file; it has {tensors:list}.",
        "Use a file of a Wan or LTX-2 transformer. A LoRA belongs to {set[lora]}; other families are used as folders.",
    ),
    "model.format_unknown": Message(
        "{file} stores {tensor} as {dtype}, in a format that cannot be read.",
        "Use BF16, FP16, fp8_scaled, fp8_e4m3fn, GGUF (Q2_K to Q8_0), ModelOpt's FP8 or NVFP4, or ComfyUI's NVFP4, "
        "MXFP8, INT8 or W4A8.",
    ),
    "model.format_not_stated": Message("{file} does not state the format of {tensor} as ComfyUI does.", _AGAIN),
    "model.file_tensor_missing": Message("{file} lacks {tensor}.", _AGAIN),
    "model.file_tensor_unknown": Message(
        "{file} has {tensor}, which the models that Tandem runs do not have.",
        "Use a file of a plain model or of VACE, without other additions.",
    ),
    "model.file_other_shape": Message("{file} has {tensor} of {shape}; its other tensors require {expected}.", _AGAIN),
    "model.file_expert_unknown": Message(
        "{file} is one of two experts ({title}), and its name does not say which.",
        "Name it with high_noise or low_noise, and the other file alike, in the same folder.",
    ),
    "model.file_expert_missing": Message(
        "{file} is one of two experts ({title}); the {expert}-noise expert is missing.",
        "Put its file in the same folder, named {path}.",
    ),
    "model.file_alone": Message("The text encoder and VAE of {file} ({title}) are not here.", _COMPONENTS),
    "model.file_unfit": Message("No text encoder and VAE here fit {file} ({title}): {cause:clause}.", _COMPONENTS),
    "model.components_not_downloaded": Message(
        "Parts of {model} are not downloaded: {missing:list}.",
        "Run `{tandem} models download {name} --without-transformers`, or copy {missing:list} of such a model, as "
        "folders, into a folder of {folder}.",
    ),
    "safetensors.header_too_many": Message("Its header has more than {most:,} values."),
    "safetensors.header_too_long": Message("Its header has {size:bytes}; at most {most:bytes} are read."),
    "safetensors.header_not_json": Message("Its header is not a JSON object."),
    "safetensors.metadata_invalid": Message("Its metadata is not text."),
    "safetensors.duplicate": Message("Its header has {tensor!r} twice."),
    "safetensors.tensor_invalid": Message("The dtype, shape or position of {tensor!r} is invalid."),
    "safetensors.dtype_unknown": Message("{tensor!r} has the unknown dtype {dtype!r}."),
    "safetensors.tensor_size": Message("The size of {tensor!r} does not follow from its shape and dtype."),
    "safetensors.hole": Message("No tensor has the bytes before {tensor!r}."),
    "safetensors.overlap": Message("{tensor!r} overlaps the tensor before it."),
    "model.unknown": Message("There is no model {name!r}.", "Use one of {names:list}, or the path of a folder."),
    "model.weights_not_downloaded": Message(
        "The weights of {model} are not downloaded.",
        "Run `{tandem} models download {name}` to download them. Or copy the folder {repository} of "
        "huggingface.co into {folder}, or give its path with {set[model]}.",
    ),
    "model.component_unloadable": Message(
        "The {component:lower_component} of {model} cannot be loaded: {reason}.", _AGAIN
    ),
    "model.component_incomplete": Message(
        "The weights of the {component:lower_component} of {model} do not match its configuration: {missing:n tensor} "
        "missing.",
        _AGAIN,
    ),
    "model.scale_missing": Message(
        "{file} lacks the scale of {tensor}, although its other weights in FP8 have one.", _AGAIN
    ),
    "model.scale_not_finite": Message("A scale of {tensor} in {file} is not a finite number.", _AGAIN),
    "model.tensor_missing": Message("The model's files have no {tensor}.", _AGAIN),
    "model.part_unloadable": Message("The {part} of {model} cannot be loaded.", _AGAIN),
    "model.tokenizer_without_places": Message(
        "The model's tokenizer cannot tell which words have weights.", "Remove the weights, as in (word:1.3)."
    ),
    "model.scheduler_other": Message(
        "The scheduler of {model}, {scheduler}, is not set up for flow matching, for which the model was trained.",
        "Put the published model's file in place of {file}, or set prediction_type to flow_prediction and "
        "use_flow_sigmas to true in it.",
    ),
    "model.scheduler_unknown": Message(
        "{model} needs the scheduler {scheduler!r}, which diffusers {version} does not have.",
        "Update Tandem, or choose another model.",
    ),
}

_IMAGES: Mapping[str, Message] = {
    "image.changed": Message("The image {file} has changed since the job was planned.", "Start a new job."),
    "image.copy_missing": Message(
        "The copy of the image {file} is no longer in the cache folder.", "Give the image's file again."
    ),
    "image.disk_full": Message(
        "The disk is full: the image was not copied to {folder}.", "Free some disk space and try again."
    ),
    "image.gone": Message("The image {file} cannot be read any more: {cause:clause}.", "Start a new job."),
    "image.last_required": Message("{model} needs a last image too.", "Give one with {set[last_image]}."),
    "image.model_without": Message("{model} does not start from an image.", "Select one of {models:list}."),
    "image.model_without_last": Message(
        "{model} does not end with an image.", "Leave {set[last_image]} out, or select another model."
    ),
    "image.model_without_keyframes": Message(
        "{model} takes no keyframes.", "Leave {set[keyframes]} out, or select a model that takes them, such as LTX-2."
    ),
    "image.keyframe_times": Message(
        "There are {count:n keyframe} and {times:n time}.", "Give a time in seconds for each keyframe."
    ),
    "image.no_model": Message("{model} does not start from an image.", "Leave the image out."),
    "image.not_kept": Message(
        "The image cannot be written to {folder}.", "Set TANDEM_CACHE_DIR to a folder that you can write to."
    ),
    "image.only_last": Message("A last image needs a first one.", "Give one with {set[image]}."),
    "image.required": Message("{model} makes videos from an image only.", "Give one with {set[image]}."),
}

_VIDEOS: Mapping[str, Message] = {
    "source.changed": Message("The video {file} has changed since the job was planned.", "Start a new job."),
    "source.copy_missing": Message(
        "The copy of the video {file} is no longer in the cache folder.", "Give the video's file again."
    ),
    "source.disk_full": Message(
        "The disk is full: the video was not copied to {folder}.", "Free some disk space and try again."
    ),
    "source.file_too_large": Message(
        "{file} is larger than {most:bytes}.", "Cut out the part to start from with another program, and give that."
    ),
    "source.gone": Message("The video {file} cannot be read any more.", "Start a new job."),
    "source.model_without": Message("{model} does not start from a video.", "Select one of {models:list}."),
    "source.not_kept": Message(
        "The video cannot be written to {folder}.", "Set TANDEM_CACHE_DIR to a folder that you can write to."
    ),
    "source.no_model": Message("{model} does not start from a video.", "Leave the video out."),
    "source.shorter": Message(
        "{file} has {frames:n frame} now, and {planned} were planned.", "Copy the video again and start a new job."
    ),
    "source.two_starts": Message(
        "A video that is extended starts from its last frame.", "Leave out {set[image]} and {set[video]}."
    ),
    "source.two_ends": Message(
        "The new part leads either to an image or to a video.", "Leave out {set[last_image]} or {set[join]}."
    ),
    "source.join_alone": Message(
        "{field:setting} is for a video that is extended, and there is none.", "Give one with {set[extend]}."
    ),
    "source.one_frame": Message(
        "{field:setting} is given; {model} starts from the last frame of a video only.",
        "Leave {field:setting} out, or select one of {models:list}.",
    ),
    "source.extend_frames": Message(
        "{set[extend_frames]} is {value}; the video {video} has {frames:n frame}.", "Use at most {frames}."
    ),
    "source.not_continued": Message(
        "{model} does not start from an image, so it cannot continue a video.", "Select one of {models:list}."
    ),
    "source.finished": Message(
        "{file} was enlarged or interpolated after it was made, and what follows would not be.",
        "Extend {plain}, which is in the same folder.",
    ),
    "source.too_many_frames": Message(
        "{file} has {most} frames or more.", "Cut off its end with `jobs export`, and extend that."
    ),
    "source.other_size": Message(
        "{field:setting} is {value}; the video {video} has {able}, and its continuation too.",
        "Use {able}, or leave it out.",
    ),
    "control.model_without": Message(
        "{field:setting} is given; {model} is not steered by control videos, masks or reference images.",
        "Select one of {models:list}.",
    ),
    "control.no_model": Message(
        "{field:setting} is given; {model} is not steered by control videos, masks or reference images.",
        "Leave {field:setting} out, or install a model with a control branch, such as Wan2.1 VACE.",
    ),
    "control.other_model": Message(
        "{field:setting} is given; {model} does not take it.", "Select one of {models:list}."
    ),
    "control.not_taken": Message("{field:setting} is given; {model} does not take it.", "Leave {field:setting} out."),
    "control.required": Message("{model} needs {field:setting}.", "Give a video with {field:setting}."),
    "control.mask_without_background": Message(
        "A mask shows where the character is put into a background video, and there is none.",
        "Give one with {set[background]}.",
    ),
    "control.background_alone": Message(
        "A background video is given, and no mask that is white where the character is put into it.",
        "Give one with {set[mask]}.",
    ),
    "control.mask_alone": Message(
        "A mask shows where a control video changes, and there is none.", "Give one with {set[control]}."
    ),
    "control.preprocess_alone": Message(
        "Control frames are made of a control video, and there is none.", "Give one with {set[control]}."
    ),
    "control.mask_black": Message(
        "The mask is black in all frames: the control video stays as it is.",
        "What is white in the mask changes: check that it is not inverted.",
    ),
    "control.mask_white": Message("The mask is white in all frames: all of the control video changes."),
    "control.outpaint_alone": Message(
        "Borders are added to a control video, and there is none.", "Give one with {set[control]}."
    ),
    "control.preprocess_kept": Message(
        "{set[outpaint]} keeps the control video as it is, so that nothing of it is preprocessed.",
        "Give a mask of what changes with {set[mask]}, or leave one of them out.",
    ),
    "enhancer.none": Message(
        "No enhancer is set.",
        "Set TANDEM_ENHANCER to a chat model, such as {model}, or to a chat server's address, and start Tandem again.",
    ),
    "enhancer.not_downloaded": Message(
        "The enhancer {model} is not downloaded, {license}, {size:bytes}.", "Run `{tandem} models download {name}`."
    ),
    "enhancer.repository_not_downloaded": Message(
        "The enhancer {name} is not downloaded.", "Run `{tandem} models download --enhancer {name}`."
    ),
    "enhancer.no_such_folder": Message(
        "TANDEM_ENHANCER is {name}, and there is no such chat model.",
        "Give the folder of one, or the name of a folder in {folder}.",
    ),
    "enhancer.no_model_name": Message(
        "TANDEM_ENHANCER is {address}, without the name of a model there.", "Set TANDEM_ENHANCER_MODEL to one."
    ),
    "enhancer.offline": Message(
        "The enhancer is at {address}, and {offline} keeps Tandem offline.", "Use one on this machine."
    ),
    "enhancer.not_a_chat_model": Message(
        "{model} is no chat model: its config.json names {architecture}.",
        "Choose a model for text alone.",
    ),
    "enhancer.quantized": Message("{model} is quantized.", "Choose the chat model in BF16 or FP16, or a chat server."),
    "enhancer.no_chat_template": Message(
        "{model} has no chat template, as a model that only continues texts.", "Choose its chat or instruct version."
    ),
    "enhancer.unloadable": Message("{model} cannot be loaded: {reason}.", "Choose another chat model."),
    "enhancer.weights_missing": Message(
        "{model} lacks {missing:n tensor}.", "Run `{tandem} models verify`, or copy its folder again."
    ),
    "enhancer.template_failed": Message("The chat template of {model} fails: {reason}.", "Choose another chat model."),
    "enhancer.prompt_too_long": Message(
        "The prompt is too long for {model}: {tokens} tokens with its instructions, of at most {most}.",
        "Shorten the prompt, or choose another chat model.",
    ),
    "enhancer.no_memory": Message(
        "{model} needs {needed:bytes} of memory, and {free:bytes} are free.",
        "Close programs, or choose a smaller chat model.",
    ),
    "enhancer.template": Message(
        "The prompt is a template, which stands for several prompts.",
        "Enhance one without choices and lists, or use `{tandem} generate --enhance`.",
    ),
    "enhancer.batch": Message(
        "The prompts of a batch are not enhanced by the HTTP API.",
        "Enhance each with POST /v1/prompts/enhance, or use `{tandem} generate --enhance`.",
    ),
    "enhancer.unreachable": Message(
        "The enhancer at {address} cannot be reached: {reason}.", "Start it, or correct TANDEM_ENHANCER."
    ),
    "enhancer.silent": Message(
        "The enhancer at {address} gave no answer within {seconds:duration}.",
        "Try again, or choose a smaller model.",
    ),
    "enhancer.key_refused": Message(
        "The enhancer at {address} refuses the key ({status}).", "Set TANDEM_ENHANCER_KEY to a valid one."
    ),
    "enhancer.not_found": Message(
        "The enhancer at {address} has no model {model} (404).",
        "Correct TANDEM_ENHANCER_MODEL; most addresses end in /v1.",
    ),
    "enhancer.server_busy": Message("The enhancer at {address} is busy (429).", "Try again later."),
    "enhancer.status": Message(
        "The enhancer at {address} answers with status {status}.", "Read its log; most addresses end in /v1."
    ),
    "enhancer.wrong_format": Message(
        "The answer of {address} is not in the format of OpenAI's chat completions.",
        "Correct TANDEM_ENHANCER; most addresses end in /v1.",
    ),
    "enhancer.answer_empty": Message(
        "The enhancer's answer has no prompt.", "Write more of the prompt, and try again."
    ),
    "enhancer.only_thoughts": Message(
        "The enhancer was still thinking at the end of its answer.", "Choose a chat model that does not think aloud."
    ),
    "enhancer.answer_too_long": Message(
        "The enhancer's answer has {characters:,} characters, of at most {most:,}.", "Choose another chat model."
    ),
    "enhancer.answer_unusable": Message(
        "The enhancer's answer cannot be a prompt: {cause}", "Choose another chat model."
    ),
    "enhancer.unavailable": Message(
        "The enhancer of this Tandem does not answer as it should.", "Use the prompt as it is, or ask the owner."
    ),
    "enhancer.busy": Message("{maximum:n prompt} are being enhanced.", "Wait until one is done."),
    "enhancer.rate": Message(
        "This key allows {maximum:n enhanced prompt} an hour.", "Try again in {minutes:n minute}."
    ),
    "enhancer.stopped": Message("The prompt was not enhanced: this was cancelled.", "Try again."),
    "preprocess.model_missing": Message(
        "{set[preprocess]} {kind} needs a model that is not installed: {model}, {license}, {size:bytes}.",
        "Run `{tandem} models download {name}`, or put the folder of such a model into {folder}.",
    ),
    "preprocess.no_model": Message(
        "{folder} contains no model that makes control frames: its config.json names none of {classes:list}.",
        "Choose another folder.",
    ),
    "preprocess.no_person": Message(
        "No person was found in {blank} of {frames:n frame} of the control video; these control frames are black.",
        "Check that the video shows whole people, or use another {set[preprocess]}.",
    ),
    "control.start_alone": Message(
        "{set[control_start]} is a second of a control video, and there is none.", "Give one with {set[control]}."
    ),
    "control.starts_after_end": Message(
        "{file} has no frames after {start:g} s.", "Give an earlier second with {set[control_start]}."
    ),
    "control.scales": Message(
        "{set[control_scale]} has {count} numbers; {model} has {blocks:n block} that read control videos.",
        "Give one number, or {blocks}.",
    ),
    "source.with_image": Message(
        "A video starts from an image or from a video, not from both.", "Leave one of them out."
    ),
}

_LORA_AGAIN = "Copy or download the LoRA again."
_OTHER_LORA = "Choose one that was made for this model."

_LORA: Mapping[str, Message] = {
    "lora.unknown": Message(
        "There is no LoRA {lora}.",
        "Put its .safetensors file into {folder}. The command line also takes the file's path.",
    ),
    "lora.not_safetensors": Message(
        "The LoRA {lora} is not a safetensors file; other formats can run code when loaded.",
        "Download it as safetensors, or convert it.",
    ),
    "lora.unreadable": Message("The LoRA {lora} cannot be read: {reason}.", "Check the file and its permissions."),
    "lora.damaged": Message("A LoRA cannot be used: {cause:clause}.", _LORA_AGAIN),
    "lora.dtype_unsupported": Message(
        "The LoRA {lora} has the dtype {dtype}, which is not supported.",
        "Use one in float32, float16, bfloat16 or float8.",
    ),
    "lora.metadata_invalid": Message("The LoRA {lora} has malformed metadata of its adapter.", _OTHER_LORA),
    "lora.not_finite": Message("The LoRA {lora} contains NaN or Inf, in {tensor!r}.", _LORA_AGAIN),
    "lora.no_such_expert": Message(
        "The LoRA {lora} is for the {expert}-noise expert, and {model} has one transformer.",
        "Use a LoRA for this model, without high= or low=; or two stages where the model can, for one of them.",
    ),
    "lora.unknown_tensor": Message("The LoRA {lora} changes {tensor!r}, which {model} does not have.", _OTHER_LORA),
    "lora.duplicate_module": Message("The LoRA {lora} changes {module} twice.", _LORA_AGAIN),
    "lora.empty": Message("The LoRA {lora} is empty.", "Choose another."),
    "lora.larger_model": Message(
        "The LoRA {lora} is for a larger model: it changes {module}, which {model} does not have.", _OTHER_LORA
    ),
    "lora.kind_unsupported": Message(
        "The file {lora} is an adapter of the kind {kind}, which is not supported.",
        "Use a LoRA, LoHa, LoKr or DoRA, or merge the adapter into the model with the program that made it.",
    ),
    "lora.factor_missing": Message("The {kind} {lora} is incomplete: factors of {module} are missing.", _LORA_AGAIN),
    "lora.magnitude_invalid": Message(
        "The DoRA {lora} does not scale {module} by one magnitude for each output.", _OTHER_LORA
    ),
    "lora.not_matrices": Message("The LoRA {lora} does not change {module} by matrices.", _OTHER_LORA),
    "lora.ranks_differ": Message(
        "The LoRA {lora} is damaged: the factors of {module} have the ranks {ranks:list}.", _LORA_AGAIN
    ),
    "lora.alpha_invalid": Message("The LoRA {lora} is damaged: alpha of {module} is not one number.", _LORA_AGAIN),
    "lora.other_size": Message(
        "The LoRA {lora} is for another size of model: {module} is {shape} there and {expected} in {model}.",
        _OTHER_LORA,
    ),
    "lora.changed": Message("The LoRA {lora} has changed since the job was planned.", "Start the job again."),
    "lora.no_bias": Message("A LoRA changes the bias of {module}, which has none.", "Choose another LoRA."),
    "lora.fusing_failed": Message("A LoRA cannot be applied: {reason}.", _LORA_AGAIN),
}

_SCHEDULER: Mapping[str, Message] = {
    "scheduler.no_shift": Message("It has no shift."),
    "scheduler.shift_by_size": Message("Its shift follows from the size and length of the video."),
    "scheduler.fixed_levels": Message("The model was distilled for fixed noise levels."),
    "scheduler.levels_of_lora": Message("Its LoRA was distilled for fixed noise levels."),
    "scheduler.other_spacing": Message("The option {option} determines its timesteps."),
    "scheduler.no_flow_matching": Message("It is not configured for flow matching (prediction_type, use_flow_sigmas)."),
    "scheduler.shift_fixed": Message(
        "The shift of {model} cannot be set; its scheduler is {scheduler}: {cause:clause}.",
        "Use {set[shift=auto]}.",
    ),
}

_QUANTIZATION: Mapping[str, Message] = {
    "quantization.cache_damaged": Message(
        "Quantized weights in {folder} were damaged ({reason}) and removed. The model was quantized again."
    ),
    "quantization.needs_gpu": Message(
        "Quantization {kind} needs an NVIDIA GPU; this plan runs on {device}.", "Use {set[quantization=none]}."
    ),
    "quantization.needs_newer_gpu": Message(
        "Quantization {kind} needs a GPU of compute capability {needed} or newer; this one has {capability}.",
        "Use {set[quantization=bnb-8bit]}, {set[quantization=bnb-4bit]} or {set[quantization=none]}.",
    ),
    "quantization.no_layer_fits": Message(
        "Quantization {kind} supports no layer of the {component:lower_component} of {model}: their sizes are not "
        "supported.",
        "Use {set[quantization=none]}.",
    ),
    "quantization.package_missing": Message(
        "Quantization {kind} needs {package}, which is not installed.",
        "Run `{installer} doctor` on a computer with a GPU, or use {set[quantization=none]}.",
    ),
    "quantization.package_broken": Message(
        "Quantization {kind} needs {package}, which cannot be imported: {reason}.",
        "Run `{installer} doctor`, or use {set[quantization=none]}.",
    ),
}

_SAVE_AGAIN = "Save float32 or float16 latents with numpy.save."

_LATENTS: Mapping[str, Message] = {
    "latents.unknown_type": Message(
        "{file} is neither a .safetensors nor an .npy file.", "Save the latents with safetensors or numpy.save."
    ),
    "latents.upload_parts": Message("{file} was not received completely.", "Upload it again."),
    "latents.upload_disk_full": Message(
        "{file} has {size:bytes}; {free:bytes} are free in {folder}.", "Free some space, or decode it where it is."
    ),
    "latents.upload_unwritten": Message(
        "{file} cannot be saved in {folder}: {reason}.", "Make the folder writable, or decode the file where it is."
    ),
    "latents.path_unreadable": Message("LATENTS is empty or unreadable.", "Give the path of a file of latents."),
    "latents.unreadable": Message("{file} cannot be read: {reason}.", "Give the path of a readable file of latents."),
    "latents.file_invalid": Message("{cause}", "Save the latents again with safetensors."),
    "latents.not_numpy": Message("{file} is no array of NumPy: {reason}.", _SAVE_AGAIN),
    "latents.pickled": Message("{file} contains pickled objects, which can run code when loaded.", _SAVE_AGAIN),
    "latents.dtype": Message("The latents in {file} are {dtype}.", "Convert them to float32, float16 or bfloat16."),
    "latents.fortran": Message(
        "The latents in {file} are stored in Fortran order.", "Save numpy.ascontiguousarray of them."
    ),
    "latents.which_tensor": Message(
        "{file} has {count:n tensor}, none of them named latents.", "Save the latents as a tensor with that name."
    ),
    "latents.axes": Message(
        "The latents in {file} have the shape {shape}.",
        "Save four axes, or five with a batch: frames, channels, height, width; channels come first for a video VAE.",
    ),
    "latents.none": Message("There are no latents in {file}: its shape is {shape}.", "Save at least one frame."),
    "latents.cut_short": Message(
        "{file} is cut short: {needed:bytes} are needed, it has {size:bytes}.", "Copy or save the latents again."
    ),
    "latents.channels": Message(
        "The latents ({shape}) have {found:n channel}; {model} takes {wanted}.",
        "Give latents of this model as {layout}, or select the model that made them.",
    ),
    "latents.of_another_model": Message(
        "The latents ({shape}) have {found:n channel}; {model} takes {wanted}.",
        "Select the model that made them. Of the models here, {models:list} can decode them.",
    ),
    "latents.not_finite": Message(
        "Frame {frame} of the latents in {file} contains NaN or Inf.",
        "Make the latents again, or cut the file before that frame.",
    ),
    "latents.frame_size": Message(
        "The frames would have {width}×{height} pixels.",
        "Give latents of frames with even sides of at most {most} pixels, or show fewer channels.",
    ),
    "latents.channels_invalid": Message(
        "The channels to show are {value!r}.", "Give rgb or numbers of channels, up to {most}, such as rgb,3."
    ),
    "latents.no_such_channel": Message(
        "The frames of {model} have no channel {channel}.", "Give rgb or a number from 0 to {last}."
    ),
}

_VARIANTS: Mapping[str, Message] = {
    "variant.damaged": Message("The description of the variant {model} is damaged ({file}).", _AGAIN),
    "variant.incomplete": Message("The folder of the variant {model} lacks components.", _AGAIN),
    "variant.not_downloaded": Message(
        "{title} is not downloaded.", "Run `{tandem} models download {name}`, or choose it in the tab Models."
    ),
    "variant.unknown": Message("{model} has no variant {name!r}.", "Choose one of {names:list}."),
    "variant.none": Message("{model} has no variants.", "Omit --variant."),
    "variant.nothing_fits": Message(
        "No variant of {model} fits this machine: {cause:clause}.",
        "Choose a smaller model, or name a variant, one of {names:list}.",
    ),
    "variant.excludes": Message("--variant cannot be used with {option}.", "Omit one of the two."),
}

MESSAGES: Mapping[str, Message] = {
    **_VARIANTS, **_HUB, **_FILES, **_IMAGES, **_VIDEOS, **_LORA, **_SCHEDULER, **_QUANTIZATION, **_LATENTS,
}  # fmt: skip
