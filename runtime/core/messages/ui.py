"""Messages of `runtime.ui`."""

from collections.abc import Mapping

from runtime.core.messages.message import Message

MESSAGES: Mapping[str, Message] = {
    # The status line of a job.
    "ui.starting": Message("Starting."),
    "ui.videos_ahead": Message("{count:n video} ahead."),
    "ui.tasks_ahead": Message("{count:n task} ahead."),
    "ui.starts_in": Message("Starts in {seconds:about}."),
    "ui.build_waits": Message("Starts when no video waits."),
    "ui.build_waits_idle": Message("Starts when nothing else is queued."),
    "ui.takes": Message("Takes {seconds:about}."),
    "ui.ends_after_section": Message("The video ends after this section."),
    # The status line of a group.
    "ui.group_done": Message("{done} of {videos} done"),
    "ui.group_failed": Message("{failed} failed"),
    "ui.group_cancelled": Message("{cancelled} cancelled"),
    "ui.nothing_saved": Message("No video was saved."),
    "ui.sections_kept": Message("Its finished sections are kept."),
    "ui.video_ready": Message("The video is ready."),
    "ui.video_unfinished": Message("The video has {made} of {of:n section}."),
    "ui.video_can_continue": Message("It can be continued."),
    # Which part of a control video a clip uses.
    "ui.control_part": Message("{frames:n frame}: {start:.1f} to {end:.1f} s of {seconds:.1f} s."),
    "ui.control_to_end": Message("{frames:n frame} from {start:.1f} s on."),
    "ui.control_made_later": Message(
        "{kind:setting} of these frames is shown once a video with it was made; now they are shown as they are."
    ),
    "ui.given_frames": Message("{frames:n frame}: {first} given at the start, {last} at the end."),
    "ui.video_gone": Message("The file does not exist any more: {file}"),
    "ui.video_outside": Message("The file is not in the outputs folder: {file}"),
    "ui.cannot_draw": Message("{model} cannot draw: {words}."),
    "ui.can_draw": Message("It knows: {words:list}."),
    "ui.interrupted": Message(
        "Tandem ended while this video was generated.", "Resume it: `{tandem} jobs resume {job}`"
    ),
    # The forecast of a plan.
    "ui.looking_for_engines": Message("Looking for engines…"),
    "ui.does_not_fit": Message("Does not fit"),
    "ui.cannot_generate": Message("Cannot be generated"),
    "ui.invalid_setting": Message("Invalid setting"),
    "ui.no_engine_for_size": Message(
        "There is no engine for {width}×{height} yet: building takes {seconds:about}.",
        badge="no engine for {width}×{height} yet, {seconds:about} to build",
    ),
    "ui.builds_later": Message("{engines:n engine} to build when no video waits"),
    # The queue.
    "ui.queue_total": Message("{count}, {seconds:about} in total"),
    "ui.queue_total_at_least": Message("{count}, {seconds:about} or more in total"),
    # Two videos side by side.
    "ui.pixels_equal": Message("All pixels are equal, over {frames:n frame}."),
    "ui.similar": Message("PSNR {psnr:.1f} dB, SSIM {ssim:.3f}, over {frames:n frame}."),
    "ui.plays_at_other_rate": Message("B was made for {made} fps and plays at A's {plays} fps."),
    "ui.shorter": Message("{video} is shorter and stops on its last frame."),
    # Where a job that ended without a video continues.
    "resume.not_begun": Message("Denoising had not started."),
    "resume.step_done": Message("Its only step was done."),
    "resume.steps_done": Message("All {steps} steps were done."),
    "resume.stopped": Message("It stopped at step {step} of {steps}."),
    "resume.decoding": Message("Only decoding remains."),
    "resume.no_checkpoint": Message("No checkpoint was kept: it starts over."),
    "resume.from_there": Message("It continues from there."),
    "resume.after_step": Message("It continues after step {step}."),
    "resume.first_step": Message("It starts again at the first step."),
    "resume.work_lost": Message("{seconds:duration} of work was lost."),
    "ui.unknown_action": Message("There is no such action or item.", "Reload the page."),
    "ui.host_unknown": Message("There is no host {host}.", "Listen on 127.0.0.1, or on an address of this machine."),
    "ui.host_not_local": Message(
        "{host} is not an address of this machine.", "Listen on 127.0.0.1, or on an address of this machine."
    ),
    "ui.port_forbidden": Message(
        "This user may not listen on port {port}.", "Choose a port above 1023, such as --port 7861."
    ),
    "ui.port_taken": Message(
        "Port {port} is in use by another program.",
        "Stop the other program, or choose another port: --port {other}.",
    ),
    "ui.variations": Message("The number of variations is “{given}”.", "Enter a whole number from 1 to {maximum}."),
    "ui.video_missing": Message("One of the two videos does not exist any more.", "Select another one."),
    "ui.repository_missing": Message("No repository is given.", "Enter OWNER/REPOSITORY, such as {example}."),
    "ui.latents_not_listed": Message(
        "{folder} has no such file of latents.",
        "Choose a listed file, upload one, or enter the absolute path of a .safetensors or .npy file.",
    ),
    "ui.task_exists": Message("This task is already queued or running.", "See Tasks."),
    "ui.too_many_tasks": Message(
        "{maximum} tasks are already queued or running.", "Wait until one is done, or cancel one."
    ),
    "ui.engine_file_missing": Message("No engine file is given.", "Enter the absolute path of a {kinds} file."),
    "ui.engine_file_relative": Message(
        "The path {path} is not absolute.", "Enter the absolute path, such as {example}."
    ),
    "ui.engine_file_untrusted": Message(
        "The file {file} holds executable code and is not opened before you confirm that you trust it.",
        "Tick the box if you trust the source of the file.",
    ),
    "ui.engine_file_of_another_user": Message(
        "{file} belongs to another user of this machine.",
        "Copy the file, or import it with `{tandem} engines import` on the command line.",
    ),
    "ui.no_such_component": Message("{model} has no {component}.", "Choose another component, or Automatic."),
    # The form.
    "form.nearest_model": Message("{model} is the nearest to the model that {program} used."),
    "form.nearest_not_installed": Message(
        "{model} is the nearest to the model that {program} used, and is not installed.", "Download it in Models."
    ),
    "form.no_nearest_model": Message("No model here is known to correspond to the one that {program} used."),
    "form.no_counterpart": Message("This setting of {program} has no counterpart."),
    "form.no_settings": Message("No settings of Tandem, ComfyUI, Wan2GP or FramePack-Studio were found."),
    "form.value_not_offered": Message("The form does not offer it."),
    "form.value_replaced": Message("The form has {value} instead."),
    "form.other_version": Message(
        "Version {made} of the model made this video, and version {installed} is installed. The video will differ, and "
        "other steps and guidance may suit it."
    ),
    "form.empty": Message("{field:setting} is empty.", "Give a value such as {default:g}."),
    "form.incomplete": Message("The form is incomplete.", "Reload the page."),
    "form.image_is_path": Message(
        "Images and videos are uploaded here, and “{file}” is a path.",
        "Upload the file, or make the video on the command line.",
    ),
    "form.lora_is_path": Message(
        "LoRAs are given by name here, and “{file}” is a path.",
        "Put the file into weights/loras in the cache folder and give its name, without .safetensors.",
    ),
    "form.loras_not_text": Message("The LoRAs are not text, or too long.", "Write one a line: name:weight."),
}
