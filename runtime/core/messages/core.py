"""Messages of `runtime.core`."""

from collections.abc import Mapping

from runtime.core.messages.message import Message

_DESCRIBE = "Describe the video in a sentence."

MESSAGES: Mapping[str, Message] = {
    # Text that earlier versions stored, and messages of other programs.
    "text": Message("{what}", "{remedy}"),
    "event.waits_for_disk": Message("Waiting for {wanted:bytes} of free disk space."),
    "event.waits_for_gpus": Message("Waiting for {wanted} GPUs: {free} free."),
    "event.fell_back": Message("{component:component}: PyTorch instead of {backend:backend}. {reason:advice}"),
    "event.slower": Message("About {times:.1f} times as long."),
    "event.less_exact": Message("The video is slightly less exact."),
    "event.out_of_memory": Message("Out of memory ({memory}) in the {stage} stage ({component:lower_component})."),
    "event.out_of_memory_strategy": Message(
        "Out of memory ({memory}) in the {stage} stage ({component:lower_component}). "
        "The job can continue with less memory: {effects:clauses}."
    ),
    "event.out_of_memory_retried": Message(
        "Out of memory ({memory}) in the {stage} stage ({component:lower_component}). "
        "The job continues with less memory: {effects:clauses}."
    ),
    "event.out_of_memory_repeated": Message(
        "Out of memory ({memory}) in the {stage} stage ({component:lower_component}). "
        "The job continues with less memory: {effects:clauses}. {lost_seconds:duration} of work is repeated."
    ),
    "event.internal_error": Message("Internal error: {error}", "See the log for details."),
    "internal_error": Message("Internal error: {error}", "See {log} for details."),
    "internal_error_without_log": Message(
        "Internal error: {error}", "Make it possible to write {log} and try again: the log then has the details."
    ),
    # Request fields.
    "request.not_an_object": Message("The request is not an object.", "Give the fields by name."),
    "request.unknown_field": Message("Unknown field {name}.", "The fields are: {known:list}."),
    "request.prompt_empty": Message("The prompt is empty.", _DESCRIBE),
    "request.not_text": Message("{field:setting} is not text.", "Give a sentence."),
    "request.text_too_long": Message(
        "{field:setting} has {characters:,} characters; the limit is {most:,}.", "Shorten the text."
    ),
    "request.grid_without_values": Message(
        "{value} gives no values.", "Give a field with its values, as in steps=10,20."
    ),
    "request.grid_not_lists": Message(
        "The grid is not an object of lists.", 'Give the values of each field, as in {{"steps": [10, 20]}}.'
    ),
    "request.grid_field": Message("A grid cannot vary {name}.", "The fields are: {known:list}."),
    "request.grid_range": Message(
        "{value} is not a range of values.", "Give the smaller number first, and at most {most:,} values."
    ),
    "request.grid_axes": Message("The grid varies {axes} fields.", "Vary at most {most}."),
    "request.grid_repeated": Message("The grid varies {field} twice.", "Give all of its values at once."),
    "request.template_too_deep": Message(
        "The prompt has choices within choices, more than {most} deep, or too many: {part}.",
        "Nest fewer choices, and remove a list that leads back to itself from wildcards in the cache folder.",
    ),
    "request.template_count": Message(
        "The prompt asks for {count} of {options} options.", "Give a number from 1 to {options} before $$."
    ),
    "request.list_missing": Message(
        "There is no list {name}.",
        "Create {folder}/{name}.txt in the cache folder, an entry in each line, or write \\__{name}__ for the text.",
    ),
    "request.list_unreadable": Message(
        "The list {name} cannot be read.",
        "Save {folder}/{name}.txt in the cache folder as UTF-8 text that you may read.",
    ),
    "request.list_too_large": Message("The list {name} is larger than {maximum:bytes}.", "Shorten it."),
    "request.list_empty": Message(
        "The list {name} has no entries.", "Write one into each line of {folder}/{name}.txt in the cache folder."
    ),
    "request.control_character": Message(
        "{field:setting} contains the control character {character}.", "Remove it, or type the text again."
    ),
    "request.model_name": Message(
        "The model's name is empty or unreadable.", "Give a name from `{tandem} models list`, or a folder."
    ),
    "request.upscaler_name": Message(
        "{value} is not the name of an upscaler.",
        "Give a name from `{tandem} models list`; put files into weights/upscalers in the cache folder.",
    ),
    "request.not_whole": Message(
        "{field:setting} is {value}, not a whole number.", "Give a number from {low:.16g} to {high:.16g}, or auto."
    ),
    "request.not_a_number": Message(
        "{field:setting} is {value}, not a number.", "Give a number from {low:.16g} to {high:.16g}, or auto."
    ),
    "request.not_numbers": Message(
        "{field:setting} is {value}, not a number.",
        "Give one from {low:.16g} to {high:.16g}, or several with commas between them.",
    ),
    "request.out_of_range": Message(
        "{field:setting} is {value}.", "Give a number from {low:.16g} to {high:.16g}; the nearest is {nearest:.16g}."
    ),
    "request.not_a_choice": Message("{field:setting} is {value}.", "Select one of {choices:list}."),
    "request.not_backends": Message(
        "{field:setting} is {value}.", 'Give a backend for each component, as in {{"vae": "pytorch"}}.'
    ),
    "request.not_a_backend": Message(
        "{field:setting} is {value}.", "Give COMPONENT=BACKEND, as in vae=inductor or all=pytorch."
    ),
    "request.backend_repeated": Message(
        "{field:setting} names the component {component} twice.", "Give one backend for each component."
    ),
    "request.unknown_component": Message(
        "Unknown component {component}.", "The components are {components:list}; all stands for every component."
    ),
    "request.unknown_backend": Message("Unknown backend {backend}.", "Select one of {choices:list}."),
    # Images, LoRAs and the step cache.
    "request.scales": Message(
        "{field:setting} is {value}.", "Give a number, or up to {most} numbers with commas between them."
    ),
    "request.too_many_images": Message("{field:setting} has {count} images.", "Give at most {most}."),
    "request.image_file": Message(
        "{field:setting} is not a file's name: {value}.", "Give the path of an image, such as a PNG or JPEG."
    ),
    "request.video_file": Message(
        "{field:setting} is not a file's name: {value}.", "Give the path of a video, such as an MP4."
    ),
    "request.mask_file": Message(
        "{field:setting} is not a file's name: {value}.", "Give the path of a video or an image, such as an MP4 or PNG."
    ),
    "request.boxes": Message(
        "{field:setting} is {value}, which is no box within the frame, or more than {most}.",
        "Give box:LEFT,TOP,WIDTH,HEIGHT in percent of the frame, such as box:10,20,30,40, and join several with +.",
    ),
    "request.sides": Message(
        "{field:setting} is {value}, which is neither one number nor four.",
        "Give one for all sides, or LEFT,TOP,RIGHT,BOTTOM, such as 25,0,25,0.",
    ),
    "request.input_reference": Message(
        "{field:setting} is {value}, which names no file.", "Give a path, or sha256: and 64 hexadecimal digits."
    ),
    "lora.not_a_list": Message("{field:setting} is {value}.", 'Give a list, as in ["style", "high=fast:0.8"].'),
    "lora.too_many": Message("{count} LoRAs are too many.", "Give at most {most}."),
    "lora.repeated": Message(
        "The LoRA {file} is given twice.", "Give it once, or with ranges of steps that do not overlap."
    ),
    "lora.bad_range": Message(
        "The LoRA {file} has the range {start} to {end}.",
        "Give two fractions of the steps from 0 to 1, the smaller one first, as in style:0.8@0-0.5.",
    ),
    "lora.not_a_lora": Message("{field:setting} contains {value}.", "Give FILE, FILE:WEIGHT, high=FILE or low=FILE."),
    "lora.bad_name": Message(
        "The LoRA's name {file} is empty or unreadable.", "Give a name, or the path of a .safetensors file."
    ),
    "lora.weight_not_a_number": Message(
        "The weight of the LoRA {file} is {weight}, not a number.", "Give a number above 0 and up to {most:g}."
    ),
    "lora.weight_out_of_range": Message(
        "The weight of the LoRA {file} is {weight:g}.",
        "Give a number above 0 and up to {most:g}; most LoRAs are made for 1.",
    ),
    "lora.unknown_expert": Message("The LoRA {file} is for the expert {expert}.", "Select one of {choices:list}."),
    "step_cache.unknown": Message(
        "{field:setting} is {value}.", "Select one of {choices:list}; {example} also sets the strength."
    ),
    "step_cache.strength_out_of_range": Message(
        "The strength of {field:setting} is {strength}.",
        "Give a number above 0 and up to {most:g}; the default is {default:g}.",
    ),
    "step_cache.interval_out_of_range": Message(
        "The strength of {field:setting} is {strength}.",
        "Give a whole number from 2 to {most:g}: one step of so many is computed; the default is {default:g}.",
    ),
    "sparse_attention.tau": Message(
        "The threshold of {field:setting} is {tau}.",
        "Give a number from {least:g} to {most:g}; the default is {default:g}.",
    ),
    # Settings; `source` is a flag, an environment variable or a file.
    "settings.auth_invalid": Message(
        "{source} does not have the form USER:PASSWORD.", "Give both, separated by a colon."
    ),
    "settings.empty": Message("{source} is empty or unreadable.", "Give a {name}."),
    "settings.file_unreadable": Message(
        "{file} cannot be read: it or its folder belongs to another user.",
        "Make it readable, or set {variable} to another folder.",
    ),
    "settings.file_invalid": Message("{file} cannot be read as JSON.", "Repair it, or delete it to use the defaults."),
    "settings.host_without_password": Message(
        "The host {host} can be reached from other machines, and no password is set.",
        "Add --auth USER:PASSWORD, or listen on 127.0.0.1.",
    ),
    "settings.hub_with_password": Message(
        "{source} contains a user or a password.", "Remove it; HF_TOKEN sets an access token."
    ),
    "settings.hub_without_https": Message(
        "{source} is {value}: without https, models and hashes could be replaced in transit.",
        "Give an address that begins with https://, such as {hub}.",
    ),
    "settings.no_cache_folder": Message(
        "The cache folder {folder} cannot be created: {error}.", "Set {variable} to a writable folder."
    ),
    "settings.not_a_command": Message(
        "{source} is {value}, not a command.",
        "Give a program and its arguments, and close each quote. No shell reads them, and on Windows no .bat or .cmd.",
    ),
    "settings.not_a_word": Message(
        "{source} is empty, or has characters that it cannot have.", "Give the {name} as it was given to you."
    ),
    "settings.not_an_enhancer": Message(
        "{source} is not the address of a chat server.",
        "Give one such as http://127.0.0.1:11434/v1, without a user or a password, or the name or folder of a chat "
        "model.",
    ),
    "settings.not_a_count": Message("{source} is {value}.", "Give a whole number from 1 to {most}."),
    "settings.not_days": Message("{source} is {value}.", "Give a number of days above 0, up to {most}."),
    "settings.not_a_folder": Message("{source} is {value}, not a folder.", "Give a folder; it is created when needed."),
    "settings.not_a_hub": Message("{source} is {value}, not a hub's address.", "Give an address such as {hub}."),
    "settings.not_a_size": Message("{source} is {value}, not a size.", "Give WIDTHxHEIGHT, as in 832x480."),
    "settings.not_a_precision": Message("{source} is {value}.", "Give fp16, bf16 or fp32."),
    "settings.not_a_switch": Message("{source} is {value}.", "Give true or false."),
    "settings.not_gigabytes": Message("{source} is {value}, not a size.", "Give a number of gigabytes, as in 50."),
    "settings.share_offline": Message(
        "--share and {offline} exclude each other: a link needs the internet.", "Remove one of them."
    ),
    "settings.share_with_host": Message(
        "--share and the host {host} exclude each other: visitors could open your own page by that host.",
        "Remove --host.",
    ),
    "settings.tensorrt_invalid": Message(
        "{source} is {value}.", "Give all, none, or some of {known:list}, separated by commas."
    ),
    "settings.tensorrt_not_enabled": Message(
        "{flag} was given, but TensorRT is not enabled.", "Add --enable-tensorrt, or remove it."
    ),
    "settings.unknown": Message("{file} contains unknown settings: {unknown:list}.", "The settings are: {known:list}."),
}
