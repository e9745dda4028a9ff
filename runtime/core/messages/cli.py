"""Messages of `runtime.cli`."""

from collections.abc import Mapping

from runtime.core.messages.message import Message

MESSAGES: Mapping[str, Message] = {
    "cli.builds_known": Message(
        "Missing engines are not queued again: they are queued already, or failed or were cancelled in the last day."
    ),
    "cli.builds_not_stored": Message(
        "{set[build=idle]} has no effect: missing engines cannot be queued. {cause} Use {set[build=missing]} to build "
        "them first."
    ),
    "cli.builds_queued": Message("Missing engines are queued: the web app builds them when no video waits."),
    "cli.delete_not_confirmed": Message("Deletion needs a confirmation, and there is no terminal.", "Add --yes."),
    "cli.engines_built": Message("All engines are built already."),
    "cli.engines_ready": Message("{ready} of {engines:n engine} ready in {seconds:duration}."),
    "cli.build_makes_room": Message("A video goes first. The build continues when none waits or runs."),
    "cli.engines_to_build": Message("{engines:n engine} to build: {seconds:about}."),
    "cli.file_unreadable": Message("FILE is empty or unreadable.", "Give the path of an engine file."),
    "cli.flags_invalid": Message("{problem}.", "Give options of `generate`."),
    "cli.folder_not_created": Message("The folder {folder} cannot be created: {error}.", "Give a writable folder."),
    "cli.folder_unreadable": Message("{field:setting} is empty or unreadable.", "Give the name of a folder."),
    "cli.guidance_invalid": Message("{field:setting} is {value}.", "Give a number such as 4, or two such as 4,3."),
    "cli.jobs_deleted": Message("Deleted {jobs}. To restore within {days:n day}: `{tandem} jobs undelete {jobs}`"),
    "cli.keyframe_without_time": Message(
        "{set[keyframes]} is {value}, without a time.", "Give a file and a time in seconds, such as boat.png@2.5."
    ),
    "cli.no_settings": Message(
        "{file} has no settings of Tandem, ComfyUI, Wan2GP or FramePack-Studio.",
        "Give a video, PNG or JSON file that one of them wrote, with its metadata.",
    ),
    "cli.settings_left_out": Message("Not taken, invalid or without a counterpart: {names:list}."),
    "cli.settings_model": Message("Its model is {theirs}; the nearest one is {model}.", "Add {set[model=model]}."),
    "cli.settings_model_unknown": Message("Its model is {theirs}; none here is known to correspond."),
    "cli.settings_taken": Message("Settings of {file} ({program}): {names:list}."),
    "cli.license_not_confirmed": Message(
        "The license needs a confirmation, and there is no terminal.", "Add --yes if you agree to it."
    ),
    "cli.limit_without_share": Message("{flag} has no effect without a share link.", "Add --share."),
    "cli.model_complete": Message("{model} is downloaded and verified; nothing was missing."),
    "cli.model_downloaded": Message("{model} is downloaded and verified: {fetched:bytes} downloaded."),
    "cli.no_engines": Message("No engines."),
    "cli.no_jobs": Message("No jobs."),
    "cli.no_models_downloaded": Message("No models are downloaded."),
    "cli.nothing_saved": Message("Cancelled. No video was saved."),
    "cli.out_unreadable": Message("{field:setting} is empty or unreadable.", "Give a file name that ends in .mp4."),
    "cli.out_of_several": Message(
        "{field:setting} is for one video.", "Leave it out: several videos are saved in outputs in the cache folder."
    ),
    "cli.prompt_and_list": Message("There are a prompt and a list of prompts.", "Leave out PROMPT or --prompts."),
    "cli.image_and_folder": Message("There are an image and a folder of images.", "Leave out --image or --images-of."),
    "cli.list_unreadable": Message(
        "{field:setting} is not a text file that can be read.", "Give a UTF-8 file with a prompt in each line."
    ),
    "cli.list_empty": Message("{field:setting} has no prompts.", "Write a prompt into each line of the file."),
    "cli.images_unreadable": Message("{field:setting} is not a folder that can be read.", "Give a folder of images."),
    "cli.no_images": Message("{field:setting} has no images.", "Give a folder with PNG, JPEG or WebP files."),
    "cli.not_utf8": Message(
        "The argument {argument} has bytes that are not UTF-8, such as {byte}.",
        "Type it again in a terminal that uses UTF-8, or rename the file that it names.",
    ),
    "cli.on_and_off": Message("{field:setting} is {value}, and also turned off.", "Give one of both options."),
    "cli.output_unwritable": Message(
        "Standard output cannot be written: {error}.",
        "Send it somewhere else. What the command did stays: `{tandem} jobs list` shows the videos.",
    ),
    "cli.preset_without_lora": Message(
        "The preset {preset} is for a step-distillation LoRA, and none is given.",
        "Add {set[loras]} FILE, with both files for a model with two experts.",
    ),
    "cli.prompt_unquoted": Message(
        "{problem}", 'Put quotes around the prompt: `{command} "a red boat"`. For help, run `{command} --help`.'
    ),
    "cli.revision_unreadable": Message("{field:setting} is empty or unreadable.", "Give a branch, tag or commit."),
    "cli.size_invalid": Message("{field:setting} is {value}.", "Give a number with its unit, such as 500MB or 20GB."),
    "cli.trust_not_confirmed": Message(
        "Opening {file} needs a confirmation, and there is no terminal.", "Add --yes if you trust the file."
    ),
    "cli.usage": Message("{problem}", "For help, run `{help}`."),
    "cli.web_flag_before_command": Message(
        "{flag} before a command is an option of the web app.",
        "Put the command's own options after it. For help, run `{help}`.",
    ),
}
