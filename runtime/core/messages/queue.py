"""Messages of `runtime.queue`."""

from collections.abc import Mapping

from runtime.core.messages.message import Message

MESSAGES: Mapping[str, Message] = {
    "queue.lease_lost": Message("The job {job} was started again elsewhere.", "Nothing needs to be done."),
    "queue.pytorch_broken": Message(
        "PyTorch or one of its libraries cannot be imported: {error}.",
        "Run `{installer} doctor`; see the log for details.",
    ),
    "queue.no_such_job": Message("There is no job '{job}'.", "Run `{tandem} jobs list` to list the jobs."),
    "queue.short_job_id": Message(
        "'{job}' is too short for the ID of a job to delete.",
        "Give at least {digits} digits of the ID: `{tandem} jobs list` shows them.",
    ),
    "queue.ambiguous_job": Message(
        "Several jobs start with '{beginning}'.", "Give more digits of the ID: `{tandem} jobs list` shows them."
    ),
    "queue.job_queued": Message("Job {job} is already queued.", "Wait for it, or cancel it."),
    "queue.job_running": Message("Job {job} is already running.", "Watch it in the web app, or wait until it ends."),
    "queue.job_running_delete": Message("Job {job} is running.", "Cancel it first."),
    "queue.job_ended": Message(
        "Job {job} has ended.", "Run `{tandem} jobs resume {job}` to continue it, if it can be."
    ),
    "queue.job_has_no_sections": Message(
        "The video of job {job} is not made in sections.", "Wait until it ends, or cancel it."
    ),
    "queue.job_done": Message("Job {job} is done.", "Its video is {video}."),
    "queue.no_video": Message("Job {job} has no video.", "Choose a job that is done; `{tandem} jobs list` lists them."),
    "queue.job_deleted": Message("Job {job} is deleted.", "Run `{tandem} jobs undelete {job}` to restore it first."),
    "queue.job_not_queued": Message("Job {job} is no longer queued.", "Refresh the queue."),
    "queue.not_in_batch": Message(
        "Job {job} is not part of a batch.", "Resume it alone: `{tandem} jobs resume {job}`."
    ),
    "queue.batch_done": Message(
        "No video of the batch of job {job} waits or can be resumed here.", "See `{tandem} jobs list`."
    ),
    "queue.no_batch": Message("There is no batch {batch}.", "See the batch of a video, or `{tandem} jobs list`."),
    "queue.batch_too_large": Message("The batch has {videos:,} videos.", "Queue at most {maximum:,} at once."),
    "queue.job_unreadable": Message(
        "Job {job} cannot be read: invalid {columns:list}.", "Correct its row in jobs.sqlite, or restore a backup."
    ),
    "queue.jobs_unreadable": Message(
        "{count:n job} cannot be read and left out of all lists: {jobs:list}.",
        "Nothing was deleted. Correct their rows in jobs.sqlite, or restore a backup.",
    ),
    "queue.store_damaged": Message("The list of jobs was damaged and starts empty; the damaged file is {backup}."),
    "queue.store_file_damaged": Message(
        "{file} is damaged.", "Start Tandem again: it keeps the damaged file as a backup and starts a new list of jobs."
    ),
    "queue.store_disk_full": Message("The disk is full: {file} cannot be written.", "Free some disk space."),
    "queue.store_read_only": Message(
        "{file} cannot be written: it or its folder is read-only, or belongs to another user.",
        "Make both writable, or set TANDEM_CACHE_DIR to another folder.",
    ),
    "queue.checkpoint_not_removed": Message(
        "{file} cannot be removed: {error}.", "Make its folder writable, and try again."
    ),
    "queue.locks_not_writable": Message(
        "{folder} cannot be written: {error}.", "Make the folder writable, or set TANDEM_CACHE_DIR to another folder."
    ),
    "queue.store_locked": Message("{file} is locked by another program.", "Close that program and try again."),
    "queue.store_deleted": Message(
        "{file} was deleted while Tandem runs.", "Restore the file, or start Tandem again with an empty list of jobs."
    ),
    "queue.store_unusable": Message(
        "{file} cannot be used: {reason}.", "Check the folder and its disk, or set TANDEM_CACHE_DIR to another folder."
    ),
    "queue.store_too_new": Message(
        "{file} was written by a newer Tandem (version {version}; this one supports {supported}).",
        "Update Tandem, or set TANDEM_CACHE_DIR to another folder.",
    ),
    "queue.store_too_old": Message(
        "{file} was written by an older Tandem (version {version}; this one needs {supported}).",
        "Move the file to another folder, or set TANDEM_CACHE_DIR to another folder; the videos stay where they are.",
    ),
    "queue.job_not_stored": Message("This video will not be in the list of jobs: {cause:advice}"),
    "queue.job_not_stored_yet": Message("This video is not in the list of jobs yet: {cause:advice}"),
    "task.loading_enhancer": Message("Loading {model}."),
    "task.enhancing": Message("Writing the prompt."),
    "task.enhancement_waits": Message("Waits until the video or task that runs has ended."),
    "task.enhanced": Message("The prompt is ready."),
    "task.enhanced_prompt": Message("{prompt}"),
    "task.enhance": Message("Enhance a prompt"),
    "queue.on_done_failed": Message(
        "The command '{program}' failed at the end of this video: {how}.", "The setting `on_done` names it."
    ),
    "queue.on_done_not_started": Message(
        "The command '{program}' could not be started at the end of this video: {error}.",
        "Correct TANDEM_ON_DONE, or `on_done` in settings.json.",
    ),
    "queue.on_done_too_long": Message(
        "The command '{program}' was killed: it ran for more than {seconds:.0f} s at the end of this video.",
        "Have it start longer work in the background.",
    ),
    "queue.worker_died": Message(
        "The worker process ended unexpectedly ({how}).", "Try again; see the log for details."
    ),
    "queue.worker_died_again": Message(
        "The worker process ended unexpectedly again with this job (the last time: {how}).",
        "Resume it, or make a new one with a smaller size or in PyTorch; see the log for details.",
    ),
    "queue.exit_out_of_memory": Message("killed by the system because memory ran out"),
    "queue.exit_probably_out_of_memory": Message("probably killed by the system because memory ran out"),
    "queue.node_lost": Message("the machine {host} was lost"),
    "queue.exit_unknown": Message("unknown reason"),
    "queue.exit_not_responding": Message("no response for {seconds:.0f} s"),
    "queue.exit_not_stopping": Message("not stopped within {seconds:.0f} s"),
    "queue.exit_device_lost": Message("CUDA error"),
    "queue.exited": Message("{how}"),
    "queue.worker_replaced": Message("The worker process of this job ended unexpectedly ({how}); the job was resumed."),
    "queue.engine_disabled": Message(
        "Its {backend:backend} engine was running when the worker process ended unexpectedly ({how})."
    ),
    # Titles of tasks
    "task.build_all": Message("Build engines for all components of {model} at {width}×{height}, {frames:n frame}"),
    "task.build_all_with": Message(
        "Build engines for all components of {model} at {width}×{height}, {frames:n frame} with {backend:backend}"
    ),
    "task.build": Message(
        "Build engines for the {components:named_components} of {model} at {width}×{height}, {frames:n frame}"
    ),
    "task.build_with": Message(
        "Build engines for the {components:named_components} of {model} at {width}×{height}, {frames:n frame} "
        "with {backend:backend}"
    ),
    "task.loading": Message("Loading the engines for the next video."),
    "task.compile": Message("Compile {model} for {width}×{height}, {frames:n frame}"),
    "task.compiling": Message("Compiling."),
    "task.compiled": Message("Compiled in {seconds:duration}, for later clips of this size."),
    "task.not_compiled": Message("Not compiled: {cause:clause}."),
    "task.verify": Message("Verify {program:lower_component} {engine}"),
    "task.delete": Message("Delete {program:lower_component} {engine}"),
    "task.import": Message("Import {file}"),
    "task.inspect": Message("Inspect {file}"),
    "task.decode": Message("Decode {file}"),
    "task.prune": Message("Prune to the limit"),
    # Tasks
    "task.cancelled": Message("Cancelled. Completed work is kept."),
    "task.built": Message("{built} of {wanted} ready."),
    "task.built_faster": Message(
        "{built} of {wanted} ready. Clips of this size now take {seconds:latency} instead of {before:latency}."
    ),
    "task.built_in_part": Message("{built} of {wanted} ready. {cause}"),
    "task.nothing_to_build": Message("No engine to build: PyTorch was chosen for every component."),
    "task.inspected": Message("It can be imported if it contains the model's own weights."),
    "task.looking": Message("Looking for engines to build."),
    "task.finished": Message("Done."),
    "task.opening": Message("Opening {file}."),
    "task.imported": Message("Imported as {engine}: {detail:sentence}."),
    "task.imported_unverified": Message(
        "Imported as {engine}. It is not used yet: there was not enough memory to compare it with PyTorch.",
        "Close other programs, then press Verify.",
    ),
    "task.verified": Message("Verified: {detail:sentence}."),
    "task.decoding": Message("Decoding frames."),
    "task.decoded": Message("{frames:n frame}, {rate:.1f} frames/s on {backend:backend}: {video}"),
    "task.deleted": Message("Deleted, {freed:bytes} freed."),
    "task.pruned": Message("Deleted {count:n engine}; {left:bytes} are left."),
    "task.pruned_in_part": Message(
        "Deleted {count:n engine}; {left:bytes} are left. Pinned engines and engines in use are kept."
    ),
    # Tasks on models
    "download.already_queued": Message("{model} is already being downloaded.", "Wait for it, or cancel it."),
    "download.cancelled": Message("Paused. Received data is kept; the download resumes from it."),
    "download.stopped": Message("Cancelled."),
    "download.busy": Message("A task on {model} is running.", "Wait for it, or cancel it."),
    "download.found": Message("{files:n file}, {size:bytes} to download."),
    "download.verified": Message("Verified: {files:n file}, {size:bytes}."),
    "download.wrong_files": Message(
        "{wrong} of {files:n file} are wrong. {cause}", "Download the model again: only these files are fetched."
    ),
    "download.done": Message("{model} is downloaded and verified: {size:bytes}."),
    "queue.submission_differs": Message(
        "This Idempotency-Key belongs to a video with another request.", "Use a new key."
    ),
    "queue.submission_deleted": Message("This Idempotency-Key belongs to a deleted video.", "Use a new key."),
}
