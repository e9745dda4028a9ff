"""Copies of images: they stay while a job needs them, and are removed a while after the last one is gone."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.core.images import ImageUse
from runtime.core.request import GenerationRequest
from runtime.models import images
from runtime.models.images import find_image, images_dir, remove_unused
from runtime.planner.resolve import PlanningContext, resolve
from runtime.queue import storage
from runtime.queue.records import JobRecord
from runtime.queue.store import JobStore
from tests.image_files import saved, taking_images
from tests.plans import machine
from tests.queue.samples import sample_result
from tests.queue.test_worker import stored

Use = Callable[[str], ImageUse]


def age(use: ImageUse, seconds: float = 2 * images.KEPT_SECONDS) -> None:
    """Make a copy that old."""
    then = use.path.stat().st_mtime - seconds
    os.utime(use.path, (then, then))


@pytest.fixture
def use(tmp_path: Path) -> Use:
    """A function that copies an image, of another size for each name, and makes the copy old."""
    sizes: dict[str, int] = {}

    def made(name: str) -> ImageUse:
        side = sizes.setdefault(name, 20 + len(sizes))
        found = find_image(str(saved(tmp_path / f"{name}.png", side, side)), "image", tmp_path)
        age(found)
        return found

    return made


def add(store: JobStore, use: ImageUse, tmp_path: Path) -> JobRecord:
    """Add a job that starts from an image."""
    from runtime.models.catalogue import find

    spec = replace(taking_images(find("diorama", tmp_path)), image=use)
    request = GenerationRequest.from_mapping({"prompt": "a boat", "image": str(use.path)})
    return store.add(request, resolve(request, spec, PlanningContext(machine(), tmp_path / "outputs" / "x.mp4")))


def clean(store: JobStore, outputs: Path) -> None:
    """Do what the app does every hour, and the commands on jobs."""
    storage.purge(store, outputs)
    storage.tidy(store, outputs)


def there(tmp_path: Path) -> set[str]:
    return {path.name for path in images_dir(tmp_path).iterdir()}


def test_copies_stay_as_long_as_a_job_can_be_restored(use: Use, tmp_path: Path) -> None:
    store, outputs = stored(tmp_path), tmp_path / "outputs"
    kept, unused, young = use("kept"), use("unused"), use("young")
    os.utime(young.path)
    job = add(store, kept, tmp_path)
    again = add(store, kept, tmp_path)
    assert store.images() == {kept.digest}
    for _ in range(2):
        clean(store, outputs)
        assert there(tmp_path) == {kept.digest, young.digest}
    # Of a running, a finished, a deleted and a purged job.
    store.order.claim("here")
    clean(store, outputs)
    store.log.record(job.id, sample_result())
    clean(store, outputs)
    for one in (job, again):
        store.delete(one.id)
        clean(store, outputs)
        assert kept.digest in there(tmp_path)
    storage.purge(store, outputs, older_than=-1)
    assert there(tmp_path) == {young.digest}
    assert not unused.path.exists()


def test_disk_usage_counts_an_image_of_several_jobs_once(use: Use, tmp_path: Path) -> None:
    store = stored(tmp_path)
    one, other = use("one"), use("other")
    for image in (one, one, other):
        add(store, image, tmp_path)
    sizes = [image.path.stat().st_size for image in (one, other)]
    assert storage.measure(store, None).image_bytes == sum(sizes)
    assert storage.measure(store, "visitor").image_bytes == 0
    other.path.unlink()
    assert storage.measure(store, None).image_bytes == sizes[0]


def test_an_image_of_a_job_that_cannot_be_read_stays(use: Use, tmp_path: Path) -> None:
    store, kept = stored(tmp_path), use("kept")
    job = add(store, kept, tmp_path)
    with store.database.writing() as connection:
        connection.execute("UPDATE jobs SET created = 'x' WHERE id = ?", (job.id,))
    clean(store, tmp_path / "outputs")
    assert there(tmp_path) == {kept.digest}


def test_images_of_a_store_that_was_damaged_stay(use: Use, tmp_path: Path) -> None:
    kept = use("kept")
    store = stored(tmp_path)
    backup = tmp_path / "jobs.sqlite.damaged-1"
    backup.touch()
    clean(store, tmp_path / "outputs")
    assert there(tmp_path) == {kept.digest}
    backup.unlink()
    clean(store, tmp_path / "outputs")
    assert there(tmp_path) == set()


def test_other_files_and_folders_stay(use: Use, tmp_path: Path) -> None:
    removed = use("removed")
    (images_dir(tmp_path) / "notes.txt").write_text("mine")
    (images_dir(tmp_path) / ("a" * 64)).mkdir()
    size = removed.path.stat().st_size
    assert remove_unused(tmp_path, (), older_than=-1) == size
    assert there(tmp_path) == {"notes.txt", "a" * 64}
    assert remove_unused(tmp_path / "missing", ()) == 0


def test_removal_and_use_at_once(use: Use, tmp_path: Path) -> None:
    """Whatever the order, a copy exists after its use, and old ones are removed in the end."""
    copy, ended = use("boat"), threading.Event()

    def remove() -> None:
        while not ended.is_set():
            remove_unused(tmp_path, ())

    threads = [threading.Thread(target=remove) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            found = find_image(str(tmp_path / "boat.png"), "image", tmp_path)
            assert found == copy and copy.path.is_file()
            age(found)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    remove_unused(tmp_path, ())
    assert there(tmp_path) == set()
