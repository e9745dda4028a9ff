"""Visitors' jobs, sessions and limits on a running queue."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.core.errors import InvalidRequestError, LimitError, ModelError, TandemError
from runtime.core.request import GenerationRequest
from runtime.core.settings import Settings
from runtime.models.catalogue import find
from runtime.models.images import find_image
from runtime.models.spec import ModelSpec
from runtime.pipeline.files import CLIP, clip_name
from runtime.queue.instances import Instance
from runtime.queue.job_queue import JobQueue
from runtime.queue.store import JobStore
from runtime.queue.views import Job
from runtime.server.visitors import Visitors, cancel_orphaned, stop_videos, visitor_jobs
from tests.facts import fact
from tests.image_files import bomb, encoded, picture, saved
from tests.plans import no_engines, tiny_plan
from tests.thread_queue import RunningQueue
from tests.waiting import until


@pytest.fixture
def worker(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Iterator[JobQueue]:
    shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / "weights" / "tiny")
    made = RunningQueue(tmp_path / "weights", tmp_path / "outputs", no_engines(tmp_path))
    yield made
    made.close()


@pytest.fixture
def visitors(worker: JobQueue, tmp_path: Path) -> Visitors:
    settings = Settings(
        cache_dir=tmp_path, share_frames=9, share_steps=1000, share_queue=1, share_queue_all=2, share_rate=2
    )
    return Visitors(worker, settings, {"tiny": find("tiny", tmp_path / "weights")})


def long(**values: object) -> GenerationRequest:
    wanted: dict[str, object] = {"prompt": "a red boat", "model": "tiny", "width": 32, "height": 32, "frames": 5}
    return GenerationRequest.from_mapping(wanted | {"steps": 1000, "fps": 8} | values)


def end_of(job: Job) -> str:
    """Wait until a job has ended, and return how."""

    def ended() -> bool:
        job.refresh()
        return not job.open

    until(ended)
    return job.state


def test_a_visitor_gets_the_clip_of_the_sections_of_their_own_video(
    tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    shutil.copytree(tiny("wan2.2-a14b").directory, tmp_path / "weights" / "tiny")
    worker = RunningQueue(
        tmp_path / "weights", tmp_path / "outputs", no_engines(tmp_path), store=JobStore(tmp_path / "jobs.sqlite")
    )
    settings = Settings(cache_dir=tmp_path, share_frames=9, share_steps=1000)
    visitors = Visitors(worker, settings, {"tiny": find("tiny", tmp_path / "weights")})
    try:
        job = visitors.submit(long(), "a")
        folder = worker.store.folder(job.id)
        assert folder is not None
        clip = folder / CLIP / clip_name(2)
        clip.parent.mkdir(parents=True)
        clip.write_bytes(b"sections")
        assert visitors.video(f"{job.id}-2.mp4", "a") == clip
        for name in (f"{job.id}-1.mp4", f"{job.id}-2.h264", f"{job.id}--2.mp4", f"{job.id}-2.mp4/"):
            assert visitors.video(name, "a") is None
        assert visitors.video(f"{job.id}-2.mp4", "b") is None
        assert visitors.video(f"{job.id}.mp4", "a") is None
    finally:
        worker.close()


def test_a_visitor_waits_for_their_own_video(visitors: Visitors, worker: JobQueue) -> None:
    first = visitors.submit(long(), visitors.name_of("anna"))
    with pytest.raises(LimitError) as refused:
        visitors.submit(long(), visitors.name_of("anna"))
    assert refused.value.fact == fact("server.visitor_queue_full", maximum=1)
    second = visitors.submit(long(), visitors.name_of("ben"))
    with pytest.raises(LimitError) as refused:
        visitors.submit(long(), visitors.name_of("cleo"))
    assert refused.value.code == "server.queue_full"
    # The limits do not apply to the owner.
    own = worker.submit(long(steps=1))
    assert {*visitor_jobs(worker)} == {first.id, second.id}
    assert (
        visitors.job(first.id, visitors.name_of("anna")),
        visitors.job(first.id, visitors.name_of("ben")),
        visitors.job(own.id, visitors.name_of("ben")),
    ) == (first, None, None)
    assert stop_videos(worker) == 2
    assert [end_of(job) for job in (first, second, own)] == ["cancelled", "cancelled", "done"]


def test_concurrent_submissions_do_not_exceed_the_limit(visitors: Visitors, worker: JobQueue) -> None:
    start = threading.Barrier(6)
    refused: list[TandemError] = []

    def wish() -> None:
        start.wait()
        try:
            visitors.submit(long(), visitors.name_of("anna"))
        except TandemError as error:
            refused.append(error)

    threads = [threading.Thread(target=wish) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 5
    assert len(worker.store.list(owner=visitors.name_of("anna"))) == 1


def test_visitors_jobs_are_not_the_owners(visitors: Visitors, worker: JobQueue) -> None:
    visitors.submit(long(), visitors.name_of("anna"))
    assert worker.active() is None and worker.latest() is None
    assert worker.active(visitors.name_of("anna")) is not None


def test_visitors_cannot_use_other_models(visitors: Visitors, tmp_path: Path) -> None:
    for name in (str(tmp_path / "weights" / "tiny"), "../tiny", "diorama"):
        with pytest.raises(ModelError) as refused:
            visitors.submit(long(model=name), visitors.name_of("anna"))
        assert refused.value.code == "model.not_offered"


def test_sessions_and_requests_are_counted(visitors: Visitors) -> None:
    assert (
        visitors.owns("one", visitors.name_of("anna"))
        and visitors.owns("one", visitors.name_of("anna"))
        and not visitors.owns("one", visitors.name_of("ben"))
    )
    allowed = [visitors.enter(visitors.name_of("anna")) for _ in range(40)]
    assert allowed.count(True) == 24 and visitors.enter(visitors.name_of("ben"))
    assert visitors.present() == 2
    for _ in range(24):
        visitors.leave(visitors.name_of("anna"))
    assert visitors.present() == 1


def test_queued_jobs_of_visitors_of_a_killed_app_are_cancelled(
    tiny: Callable[[str], ModelSpec], tmp_path: Path
) -> None:
    store = JobStore(tmp_path / "jobs.sqlite")
    plan = tiny_plan(tiny("wan2.2-a14b"), tmp_path / "a.mp4")
    with Instance(store.path) as alive:
        owners = (f"{alive.id}-anna", "0badc0de-ben", None)
        jobs = [store.add(long(seed=1, model=plan.model), plan, owner=owner).id for owner in owners]
        cancel_orphaned(store)
        assert [store.get(job).state for job in jobs] == ["queued", "cancelled", "queued"]
    store.close()


def test_on_a_full_disk_nothing_is_queued(
    visitors: Visitors, worker: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.server.visitors.free_disk_bytes", lambda folder: 4096)
    with pytest.raises(LimitError) as refused:
        visitors.submit(long(), "a visitor")
    assert refused.value.code == "server.disk_full"
    assert worker.store.order.jobs() == []


@pytest.fixture
def able(worker: JobQueue, tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Visitors:
    """Visitors whose model starts from an image."""
    folder = tmp_path / "weights" / "able"
    shutil.copytree(tiny("wan2.2-ti2v-5b").directory, folder)
    defaults = {"width": 64, "height": 32, "frames": 5, "fps": 8, "steps": 1, "guidance_scale": 1.0}
    sizes = {"sizes": [[64, 32]], "frame_counts": [5], "title": "Able", "license": "none"}
    (folder / "tandem.json").write_text(json.dumps({"defaults": defaults | {"negative_prompt": ""}, **sizes}))
    spec = find("able", tmp_path / "weights")
    assert spec.image_input is not None
    return Visitors(worker, Settings(cache_dir=tmp_path, share_steps=1000), {"able": spec})


def test_a_visitor_starts_a_video_from_their_own_uploads_only(able: Visitors, tmp_path: Path) -> None:
    anna, ben = able.name_of("anna"), able.name_of("ben")
    own = able.keep_image(encoded(picture()), "boat.png", anna).reference
    owners = find_image(str(saved(tmp_path / "mine.png", 50, 50)), "image", tmp_path)
    link = tmp_path / "images" / ("b" * 64)
    link.symlink_to("/etc/passwd")
    for visitor, file in (
        (ben, own),
        (anna, owners.reference),
        (anna, str(owners.path)),
        (anna, str(tmp_path / "mine.png")),
        (anna, "/etc/passwd"),
        (anna, f"sha256:{link.name}"),
    ):
        for field in ("image", "last_image"):
            with pytest.raises(InvalidRequestError) as refused:
                able.submit(long(model="able", **{"image": own if visitor == anna else None, field: file}), visitor)
            assert (refused.value.field, refused.value.code) == (field, "server.visitor_image_unknown")
    for field in ("control", "mask"):
        with pytest.raises(InvalidRequestError) as refused:
            able.submit(long(model="able", **{field: own}), anna)
        assert (refused.value.field, refused.value.code) == (field, "server.visitor_video")
    with pytest.raises(InvalidRequestError) as refused:
        able.submit(long(model="able", references=[own, owners.reference]), anna)
    assert (refused.value.field, refused.value.code) == ("references", "server.visitor_image_unknown")
    job = able.submit(long(model="able", image=own, steps=1), anna)
    assert end_of(job) == "done"
    assert job.plan.image is not None and job.plan.image.reference == own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("image", "asked", "size"),
    [
        ((60, 60), {}, (32, 32)),  # at the model's number of pixels it would be larger than any allowed size
        ((30, 60), {}, (32, 64)),
        ((60, 45), {}, (64, 32)),
        ((60, 60), {"width": 64, "height": 32}, (64, 32)),
        ((60, 30), {"width": 64}, (64, 32)),
    ],
)
def test_a_visitors_size_follows_from_the_image_within_the_limits(
    image: tuple[int, int], asked: dict[str, int], size: tuple[int, int], able: Visitors
) -> None:
    file = able.keep_image(encoded(picture(*image)), "boat.png", "anna").reference
    job = able.submit(long(model="able", image=file, steps=1, **({"width": "auto", "height": "auto"} | asked)), "anna")
    assert (job.plan.width, job.plan.height) == size
    assert end_of(job) == "done"


def test_a_visitors_image_is_checked_when_it_is_uploaded(able: Visitors, tmp_path: Path) -> None:
    anna = able.name_of("anna")
    for data, code in (
        (encoded(picture(640, 480))[:1500], "image.damaged"),
        (b"", "image.empty"),
        (b"text", "image.format_unknown"),
        (bomb(10_000), "image.too_large"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            able.keep_image(data, "boat.png", anna)
        assert refused.value.code == code
    assert not (tmp_path / "images").exists()


def test_visitors_upload_a_limited_number_of_images(
    able: Visitors, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("runtime.server.visitor_limits.MOST_IMAGES", 3)
    data = encoded(picture())
    for _ in range(3):
        able.keep_image(data, "boat.png", "anna")
    with pytest.raises(LimitError) as refused:
        able.keep_image(data, "boat.png", "anna")
    assert refused.value.code == "server.visitor_images" and "60 minutes" in refused.value.remedy
    # The limit for all together counts bytes, whoever sent them.
    able.keep_image(data, "boat.png", "ben")
    monkeypatch.setattr("runtime.server.visitor_limits.MOST_IMAGE_BYTES", 4 * len(data))
    with pytest.raises(LimitError) as full:
        able.keep_image(data, "boat.png", "cleo")
    assert full.value.code == "server.images_full"
    later = time.monotonic() + 3601
    monkeypatch.setattr(time, "monotonic", lambda: later)
    able.keep_image(data, "boat.png", "anna")
