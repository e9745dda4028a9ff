"""Messages of `runtime.video`."""

from collections.abc import Mapping

from runtime.core.messages.message import Message

MESSAGES: Mapping[str, Message] = {
    "export.busy": Message("Another export is running.", "Wait until it is done, or cancel it."),
    "export.clip_gone": Message("There is no such video.", "Reload the page."),
    "export.clips_differ": Message(
        "{file} has {size} pixels at {rate:g} frames per second, {first} {first_size} at {first_rate:g}.",
        "Join clips of one size and one frame rate.",
    ),
    "export.copied": Message("The frames are copied: no quality is lost."),
    "export.folder_exists": Message("The folder {folder} exists already.", "Give a folder that does not exist."),
    "export.gif_delays": Message(
        "GIFs count time in 10 ms: at {rate:g} frames per second, frames last {short} or {long} ms. The length is kept."
    ),
    "export.gif_rate": Message("{most} of {rate:g} frames per second: browsers slow down GIFs with more."),
    "export.no_encoder": Message(
        "This ffmpeg cannot write {format}: it lacks {encoders:or}.",
        "Choose one of {usable:list}, or set IMAGEIO_FFMPEG_EXE to the path of a complete ffmpeg.",
    ),
    "export.no_frames": Message(
        "There is no frame from {start:g} to {end:g} s.",
        "Give an end that is at least one frame, {frame:.3g} s, after the start.",
    ),
    "export.no_job_video": Message("Job {job} has no video: it is {state}.", "Export a job that is done."),
    "export.no_lossless": Message(
        "The format {format} has no sound without loss.", "Choose one of {usable:list}, or leave out {field:setting}."
    ),
    "export.no_sound": Message("The format has no sound."),
    "export.not_in_browsers": Message("Most browsers do not play it."),
    "export.out_unreadable": Message("{field:setting} is empty or unreadable.", "Give the name of a file."),
    "export.smaller": Message("{width} pixels wide instead of {before}."),
    "export.suffix": Message(
        "{file} is not a name for the format {format}.", "Give a name that ends in {suffix}, or another format."
    ),
    "export.time_outside": Message(
        "{field:setting} is {value}.", "Give seconds from 0 to {most:.6g}, the length of {file}."
    ),
    "export.too_few": Message("There is only one clip to join.", "Give at least two."),
    "export.too_many": Message("{count} clips are too many to join.", "Join at most {most} at once."),
    "image.animated": Message(
        "{file} is animated, or has several pages.", "Save the frame to start from as a PNG or JPEG, and give that."
    ),
    "image.damaged": Message("{file} is damaged or incomplete.", "Open it in another program and save it again."),
    "image.empty": Message("{file} is empty.", "Give the file of an image, such as a PNG or JPEG."),
    "image.file_too_large": Message("{file} is larger than {most:bytes}.", "Save it as a JPEG, and give that."),
    "image.format_gif": Message(
        "{file} is a GIF, which Tandem does not read.",
        "Save the picture to start from as a PNG or JPEG.",
    ),
    "image.format_heic": Message("{file} is a HEIC image, which Tandem does not read.", "Save it as a PNG or JPEG."),
    "image.format_unknown": Message("{file} is not an image that Tandem reads.", "Give one of: {formats:list}."),
    "image.kind_unknown": Message(
        "{file} is damaged, or a kind of {format} that Tandem does not read, such as one with 32 bits per value.",
        "Open it in another program and save it as a PNG or JPEG.",
    ),
    "image.memory": Message(
        "Reading {file} takes more than {most:bytes} of memory.",
        "Open it in another program and save it again as a PNG or JPEG.",
    ),
    "image.no_process": Message(
        "The program that reads images did not start: {reason}.",
        "Free some memory and try again. If that does not help, install Tandem again.",
    ),
    "image.not_a_file": Message("{file} is not a file.", "Give the file of an image, such as a PNG or JPEG."),
    "image.slow": Message(
        "Reading {file} takes more than {seconds:.0f} seconds.",
        "Open it in another program and save it again as a PNG or JPEG.",
    ),
    "image.too_large": Message("{file} has more than {most} million pixels.", "Make it smaller, and try again."),
    "image.too_long": Message(
        "{file} has {width} × {height} pixels: one side is more than {most} times the other.",
        "Crop it to the part that the video is about.",
    ),
    "image.too_small": Message(
        "{file} has {width} × {height} pixels; both sides need at least {least}.", "Give a larger image."
    ),
    "image.unreadable": Message("{file} cannot be read: {reason}.", "Check its name and permissions."),
    "source.not_a_file": Message("{file} is not a file.", "Give the file of a video, such as an MP4."),
    "source.unreadable": Message("{file} cannot be read: {reason}.", "Check its name and permissions."),
    "source.path_unreadable": Message("FILE is empty or unreadable.", "Give the path of a video."),
    "source.empty": Message("{file} is empty.", "Copy or download the video again."),
    "source.slow": Message(
        "Reading {file} takes more than {seconds:.0f} seconds.",
        "Convert the video to an MP4 with another program first.",
    ),
    "source.memory": Message(
        "Reading {file} takes more than {most:bytes} of memory.",
        "Convert the video to an MP4 with another program first.",
    ),
    "source.only_sound": Message("{file} has sound, but no frames.", "Give a file with a video."),
    "source.no_video": Message(
        "{file} is not a video that can be read, or it is damaged.", "Give a video, such as an MP4, MKV, WebM or GIF."
    ),
    "source.no_frames": Message("No frame of {file} can be decoded.", "Check that the video plays, or copy it again."),
    "source.hdr": Message(
        "{file} is an HDR video, which cannot be kept: Tandem writes 8 bits in the colors of HDTV.",
        "Convert it to SDR with a program that maps its tones first.",
    ),
    "source.too_large": Message(
        "The frames of {file} are too large: at most {most:,} pixels a side, and 33 million in all.",
        "Make the video smaller first.",
    ),
    "source.too_small": Message(
        "The frames of {file} are too small: both sides need at least {least} pixels.", "Give a larger video."
    ),
    "source.damaged": Message("A part of {file} is damaged ({line}): what can be decoded of it is kept."),
    "source.same_file": Message("{file} would be replaced by the result.", "Give the result another name."),
    "interpolate.failed": Message(
        "ffmpeg could not interpolate the frames: {line}.",
        "Try again. If it fails again, set IMAGEIO_FFMPEG_EXE to the path of another ffmpeg.",
    ),
    "interpolate.no_filter": Message(
        "{program} cannot interpolate frames: {line}.",
        "Install an ffmpeg with minterpolate and set IMAGEIO_FFMPEG_EXE to its path, or unset IMAGEIO_FFMPEG_EXE.",
    ),
    "interpolate.silent": Message("The sound of {file} is left out: it does not fit a slower video."),
    "interpolate.too_fast": Message(
        "{factor} times {fps:.4g} frames per second are more than {most}.",
        "Use {nearest:setting}.",
        "at most {most} fps",
    ),
    "upscale.tiles": Message("Frames are upscaled in tiles of {side} pixels, because memory is short."),
    "upscale.too_large": Message(
        "{width} × {height} pixels, {scale} times larger, are more than {most:,} pixels a side.",
        "Enlarge by less, or make the video smaller first.",
    ),
    "video.not_mp4": Message("{file} does not end in .mp4.", "Give the video a name that ends in .mp4."),
    "video.folder_missing": Message("The folder {folder} does not exist.", "Create it first, or choose another one."),
    "video.not_a_file": Message("{file} is not a regular file, so it cannot be replaced.", "Choose another file name."),
    "video.no_file_name": Message(
        "Windows allows no file named {file}.",
        'Choose another name, without < > : " | ? * and not that of a device, such as con or nul.',
    ),
    "video.disk_full": Message("The disk is full: {file} was not saved.", "Free some disk space and try again."),
    "video.disk_too_small": Message(
        "Saving the video in {folder} needs about {needs:bytes} of disk space; {free:bytes} are free.",
        "Free some disk space, or choose another folder.",
    ),
    "video.no_encoder": Message(
        "{program} cannot encode H.264 videos: {line}.",
        "Install an ffmpeg with libx264 and set IMAGEIO_FFMPEG_EXE to its path, or unset IMAGEIO_FFMPEG_EXE.",
    ),
    "video.no_sound_encoder": Message(
        "{program} cannot encode the sound: {line}.",
        "Use {set[sound=off]}, or install a complete ffmpeg and set IMAGEIO_FFMPEG_EXE to its path.",
    ),
    "video.not_writable": Message("{file} cannot be written: {reason}.", "Choose a folder that you can write to."),
    "video.no_ffmpeg": Message(
        "ffmpeg was not found, or does not run.",
        "Run `{installer} doctor`, or install ffmpeg and set IMAGEIO_FFMPEG_EXE to its path.",
    ),
    "video.ffmpeg_failed": Message(
        "ffmpeg could not write {file}: {line}.", "Check the folder and its free space, and try again."
    ),
    "video.part_damaged": Message(
        "A finished part of the video, {file}, is missing or damaged.", "Generate the video again from its start."
    ),
    "video.no_metadata": Message("{file} has no metadata of Tandem.", "Use an MP4 that Tandem generated."),
    "video.unreadable_file": Message("{file} cannot be read: {error}.", "Give the path of a readable file."),
    "video.frame_unreadable": Message(
        "The frame of {file} cannot be read.", "Check that the video plays, and try again."
    ),
    "video.comparison_timeout": Message("Comparing the two clips takes too long.", "Compare shorter clips."),
    "video.not_comparable": Message("The two clips cannot be compared.", "Use two complete videos of the same size."),
}
