"""The process that decodes images: limits, cancellation, and its own end and that of its parent."""

import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import InvalidRequestError, MachineError
from runtime.core.messages import MESSAGES
from runtime.video import image_process
from runtime.video.image_messages import DecodingError
from runtime.video.image_process import Decoded, ImageProcess
from runtime.video.images import check_image
from tests.image_files import compressed_text, encoded, many_scans, picture, with_chunk
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SMALL = encoded(picture())


@pytest.fixture
def process() -> Iterator[ImageProcess]:
    made = ImageProcess()
    yield made
    made.close()


@pytest.fixture(scope="module")
def slow() -> bytes:
    return many_scans()


def size_of(decoded: Decoded) -> tuple[int, int]:
    return decoded.width, decoded.height


def is_reading(process: ImageProcess) -> bool:
    """Whether the child spends its time on an image."""
    pid = process.pid
    return pid is not None and psutil.Process(pid).cpu_times().user > 1


def test_one_process_serves_all_threads(process: ImageProcess) -> None:
    assert process.pid is None
    with ThreadPoolExecutor(4) as threads:
        sizes = threads.map(lambda side: size_of(process.decode(encoded(picture(side, 20)))), range(20, 60))
    assert list(sizes) == [(side, 20) for side in range(20, 60)]
    pid = process.pid
    assert process.decode(SMALL, pixels=False) == Decoded(64, 48, b"") and process.pid == pid
    assert process.decode(SMALL).image().tobytes() == picture().tobytes()


def test_an_image_is_given_its_own_time(process: ImageProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    process.decode(SMALL)
    assert process._child is not None
    process._child.since -= 3600  # the last image was long ago
    talk = image_process._talk

    def talk_late(*arguments: Any) -> None:
        time.sleep(4 * image_process._POLL_SECONDS)  # as on a busy machine
        talk(*arguments)

    monkeypatch.setattr(image_process, "_talk", talk_late)
    assert size_of(process.decode(SMALL)) == (64, 48)


def test_the_process_holds_nothing_but_pillow(process: ImageProcess) -> None:
    process.decode(SMALL)
    names = [Path(mapped.path).name for mapped in psutil.Process(process.pid).memory_maps()]
    assert any("_imaging" in name for name in names)
    assert not any(word in name for name in names for word in ("torch", "numpy", "pydantic", "gradio"))


@pytest.mark.slow
def test_processor_time_is_limited(slow: bytes) -> None:
    process = ImageProcess(seconds=1.5)
    with pytest.raises(DecodingError) as refused:
        process.decode(slow)
    assert (refused.value.code, refused.value.data) == ("image.slow", {"seconds": 1.5})
    assert process.pid is None and size_of(process.decode(SMALL)) == (64, 48)
    process.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="its own limits")
@pytest.mark.parametrize("limits", [{"seconds": 1.0}, {"wait_seconds": 1.0}])
def test_the_system_keeps_the_limits_too(limits: dict[str, Any], slow: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process that asks were gone or busy."""
    monkeypatch.setattr(image_process._Child, "check", lambda *_: None)
    process = ImageProcess(**limits)
    with pytest.raises(DecodingError) as refused:
        process.decode(slow)
    assert refused.value.code == "image.slow" and process.pid is None


@pytest.mark.slow
def test_memory_is_limited() -> None:
    process = ImageProcess(memory=200 << 20)
    with pytest.raises(DecodingError) as refused:
        process.decode(encoded(picture(7000, 7000), "JPEG"))
    assert (refused.value.code, refused.value.data) == ("image.memory", {"most": 200 << 20})
    assert size_of(process.decode(SMALL)) == (64, 48)
    process.close()


def test_cancelling_ends_it_within_a_second(process: ImageProcess, slow: bytes) -> None:
    """So it is for the image that is decoded, and for one that waits for its turn."""
    cancels = [Cancel(), Cancel()]
    process.decode(SMALL)
    child = psutil.Process(process.pid)
    with ThreadPoolExecutor(2) as threads:
        reads = [threads.submit(process.decode, slow, check=one.check) for one in cancels]
        until(lambda: is_reading(process))
        for cancel, read in zip(cancels[::-1], reads[::-1], strict=True):
            since = time.monotonic()
            cancel.request()
            with pytest.raises(CancelledError):
                read.result()
            assert time.monotonic() - since < 1
    assert process.pid is None and not child.is_running()


def test_a_process_that_was_killed_is_replaced(process: ImageProcess, slow: bytes) -> None:
    process.decode(SMALL)
    first = psutil.Process(process.pid)
    first.kill()
    first.wait()
    assert size_of(process.decode(SMALL)) == (64, 48)
    cancel = Cancel()
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(process.decode, slow, check=cancel.check)
        until(lambda: is_reading(process))
        second = process.pid
        psutil.Process(second).kill()
        until(lambda: process.pid not in {None, second})  # it is read again
        cancel.request()
        with pytest.raises(CancelledError):
            read.result()
    assert size_of(process.decode(SMALL)) == (64, 48)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_crash_is_a_damaged_image(process: ImageProcess, slow: bytes) -> None:
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(process.decode, slow)
        until(lambda: is_reading(process))
        os.kill(process.pid or 0, signal.SIGSEGV)
        with pytest.raises(DecodingError) as refused:
            read.result()
    assert refused.value.code == "image.damaged"


def test_a_process_that_does_not_start_is_an_error_of_the_machine(
    process: ImageProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(ROOT / "missing"))
    with pytest.raises(MachineError) as refused:
        process.decode(SMALL)
    assert refused.value.code == "image.no_process"
    monkeypatch.undo()
    monkeypatch.setattr(image_process, "_PROGRAM", "raise SystemExit(3)")
    with pytest.raises(MachineError) as ended:
        process.decode(SMALL)
    assert (ended.value.code, ended.value.data["reason"]) == ("image.no_process", "exit code 3")


PARENT = """
import sys, threading
from pathlib import Path
from runtime.video.image_process import PROCESS
PROCESS.decode(Path(sys.argv[1]).read_bytes(), pixels=False)
threading.Thread(target=PROCESS.decode, args=(Path(sys.argv[2]).read_bytes(),), daemon=True).start()
print(PROCESS.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("reading", [False, True])
def test_it_ends_with_its_parent(reading: bool, slow: bytes, tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(SMALL)
    large.write_bytes(slow if reading else SMALL)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(small), str(large)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        until(lambda: child.cpu_times().user > 1 or not reading)
        parent.kill()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, seconds=5)


def test_nothing_of_the_current_folder_is_imported(tmp_path: Path) -> None:
    (tmp_path / "PIL.py").write_text("raise SystemExit(9)")
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from runtime.video.images import check_image as check; "
    script += "import os; os.chdir(sys.argv[1]); print(check(open('boat.png', 'rb').read(), 'boat'))"
    (tmp_path / "boat.png").write_bytes(SMALL)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "(64, 48)"


def looped_tiff() -> bytes:
    """Return a TIFF whose first page names itself as the next one."""
    data = bytearray(encoded(picture(), "TIFF"))
    (first,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, first)
    struct.pack_into("<I", data, first + 2 + 12 * count, first)
    return bytes(data)


def large_webp(side: int = 16_383) -> bytes:
    data = bytearray(encoded(picture(64, 64), "WEBP", lossless=True, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"))
    assert data[12:16] == b"VP8X"
    data[24:30] = (side - 1).to_bytes(3, "little") * 2
    return bytes(data)


def large_avif(side: int = 60_000) -> bytes:
    data = encoded(picture(64, 64), "AVIF")
    at = data.index(b"ispe") + 8
    return data[:at] + struct.pack(">II", side, side) + data[at + 8 :]


def gif_with_comment(size: int = 2 << 20) -> bytes:
    data = encoded(picture(), "GIF")
    at = data.index(b"\x2c")
    return data[:at] + b"\x21\xfe" + b"\x01a" * (size // 2) + b"\0" + data[at:]


def long_tiff(count: int = 3_000_000) -> bytes:
    """Return a TIFF whose horizontal resolution has so many values."""
    data = encoded(picture(), "TIFF", dpi=(72, 72))
    at = data.index(struct.pack("<HHI", 282, 5, 1))
    return data[:at] + struct.pack("<HHII", 282, 5, count, 8) + data[at + 12 :] + bytes(8 * count)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "a GIF with a comment in two million parts": gif_with_comment,
    "a PNG with text that grows a thousand times": lambda: with_chunk(SMALL, b"zTXt", compressed_text(400 << 20)),
    "a PNG with a profile that grows": lambda: with_chunk(SMALL, b"iCCP", compressed_text(400 << 20)),
    "a PNG of huge dimensions": lambda: SMALL[:16] + struct.pack(">II", 2**31 - 1, 2**31 - 1) + SMALL[24:],
    "a WebP of huge dimensions": large_webp,
    "an AVIF of huge dimensions": large_avif,
    "a TIFF with a loop": looped_tiff,
    "a TIFF with a value of millions of parts": long_tiff,
}


# They take seconds.
SLOW = {name for name in HOSTILE if "grows" in name or "millions" in name}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in HOSTILE]
)
def test_hostile_files_end_within_the_limits(name: str) -> None:
    """Each is refused, or is an image."""
    data = HOSTILE[name]()
    try:
        assert check_image(data, "boat") == (64, 48)
    except InvalidRequestError as error:
        assert error.code in MESSAGES and error.code.startswith("image.")
        assert error.what and error.remedy
    assert check_image(SMALL, "boat") == (64, 48)


KINDS: dict[str, dict[str, Any]] = {
    "PNG": {}, "JPEG": {}, "JPEG progressive": {"progressive": True}, "WEBP": {}, "AVIF": {}, "BMP": {}, "TIFF": {},
    "TIFF packed": {"compression": "tiff_lzw"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_or_images(kind: str) -> None:
    """Whatever a decoder raises for a byte that was changed or a file that was cut, it is a fact about the image."""
    data = encoded(picture(32, 24), kind.partition(" ")[0], **KINDS[kind])
    rng = random.Random(kind)
    places = range(len(data)) if len(data) < 200 else sorted({*range(100), *rng.sample(range(len(data)), 200)})
    cut = [data[:length] for length in sorted(rng.sample(range(len(data)), 40))]
    changed = [data[:at] + bytes([data[at] ^ rng.randrange(1, 256)]) + data[at + 1 :] for at in places]
    refused = 0
    for one in cut + changed:
        try:
            width, height = check_image(one, "boat")
        except InvalidRequestError as error:
            refused += 1
            assert error.code in MESSAGES and "image." in error.code, one
        else:
            assert width >= 16 and height >= 16
    assert refused >= 30


def test_threads_of_one_image_each_end_with_it(process: ImageProcess) -> None:
    before = threading.active_count()
    for _ in range(5):
        process.decode(SMALL)
    assert threading.active_count() == before
