"""Tones, videos with them, and the sound of files as samples."""

import re
import subprocess
from pathlib import Path

import numpy as np

from runtime.core.sound import Sound
from runtime.video.mp4 import NewSound, VideoWriter, find_ffmpeg

# The samples of one AAC frame.
AAC_FRAME = 1024
_STREAM = re.compile(r"Audio: (\w+).*?, (\d+) Hz, (\w+)")


def tone(
    seconds: float, rate: int = 48_000, hz: tuple[float, ...] = (440.0,), *, start: float = 0.0, level: float = 0.5
) -> Sound:
    """Return a tone in each channel, which begins after `start` seconds of silence."""
    time = np.arange(round(seconds * rate)) / rate
    waves = [level * np.sin(2 * np.pi * one * (time - start)) * (time >= start) for one in hz]
    return Sound(np.stack(waves).astype(np.float32), rate)


def frames(count: int, width: int = 64, height: int = 32) -> np.ndarray:
    """Return frames that move, (count, height, width, 3) uint8."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    pictures = [np.stack([3 * x + 7 * index, 4 * y, 90 + x + y], axis=-1) % 256 for index in range(count)]
    return np.stack(pictures).astype(np.uint8)


def write_clip(
    path: Path,
    sound: Sound | None,
    *,
    count: int = 12,
    fps: int = 8,
    lossless: bool = False,
) -> Path:
    """Write a video as jobs do."""
    pictures = frames(count)
    with VideoWriter(path, pictures.shape[2], pictures.shape[1], fps, 10) as writer:
        writer.write(pictures)
        writer.close_stream()
        metadata = {"request": {"prompt": "a boat", "width": 64, "height": 32, "fps": fps}}
        new = None if sound is None else NewSound(sound, "flac" if lossless else "aac")
        writer.finish("a boat", {"tandem": metadata}, new)
    return path


def sound_in(path: Path) -> tuple[str, Sound] | None:
    """Return codec and samples of a file's sound, as ffmpeg decodes it; `None` if it has none."""
    program = find_ffmpeg()
    about = subprocess.run([program, "-hide_banner", "-i", str(path)], capture_output=True, check=False)
    stream = _STREAM.search(about.stderr.decode("utf-8", "replace"))
    if stream is None:
        return None
    command = [program, "-v", "error", "-i", str(path), "-map", "0:a:0", "-f", "f32le", "-"]
    data = subprocess.run(command, capture_output=True, check=True).stdout
    channels = {"mono": 1, "stereo": 2}[stream[3]]
    return stream[1], Sound(np.frombuffer(data, "<f4").reshape(-1, channels).T, int(stream[2]))


def heard(path: Path) -> Sound:
    """Return the samples of the sound that a file must have."""
    found = sound_in(path)
    assert found is not None
    return found[1]


def pitch(sound: Sound, start: float, end: float, channel: int = 0) -> float:
    """Return the strongest frequency between two times, in hertz."""
    part = sound.samples[channel, round(start * sound.rate) : round(end * sound.rate)]
    spectrum = np.abs(np.fft.rfft(part * np.hanning(len(part)), 16 * len(part)))
    return float(np.argmax(spectrum)) * sound.rate / (16 * len(part))


def onset(sound: Sound, channel: int = 0, level: float = 0.05) -> float:
    """Return when sound is first louder than a level, in seconds."""
    return float(np.argmax(np.abs(sound.samples[channel]) > level)) / sound.rate


def loudness(sound: Sound, start: float, end: float) -> float:
    """Return the root mean square between two times."""
    part = sound.samples[:, round(start * sound.rate) : round(end * sound.rate)]
    return float(np.sqrt(np.mean(part.astype(np.float64) ** 2)))


def largest_step(sound: Sound) -> float:
    """Return the largest difference of neighboring samples: a click is far above that of a tone."""
    return float(np.abs(np.diff(sound.samples, axis=1)).max())
