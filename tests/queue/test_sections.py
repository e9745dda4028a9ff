"""Videos made in sections, in the queue: they end after a section, are continued, and recover from killed processes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.core.errors import StoreError
from runtime.core.events import Cancelled, SectionDone, VideoSaved
from runtime.core.request import GenerationRequest
from runtime.pipeline.files import SECTIONS
from runtime.queue import recovery, storage
from runtime.queue.job_queue import JobQueue
from runtime.queue.views import Job
from tests.cli.test_jobs import stream
from tests.families.framepack_models import pipeline
from tests.image_files import picture
from tests.plans import no_engines
from tests.queue.samples import add_job
from tests.queue.test_worker import stored
from tests.thread_queue import RunningQueue
from tests.waiting import until

Ask = Callable[..., GenerationRequest]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A weights folder with a tiny model that makes sections from the start to the end."""
    folder = tmp_path_factory.mktemp("weights")
    pipeline().save_pretrained(folder / "framepack-f1")
    return folder


@pytest.fixture
def queue(weights: Path, tmp_path: Path) -> Iterator[JobQueue]:
    made = RunningQueue(weights, tmp_path / "outputs", no_engines(tmp_path), store=stored(tmp_path))
    yield made
    made.close()


@pytest.fixture
def request_of(tmp_path: Path) -> Ask:
    """A function that returns a request for a tiny video."""
    image = tmp_path / "boat.png"
    picture(32, 32).save(image)

    def made(sections: int = 3) -> GenerationRequest:
        return GenerationRequest(
            prompt="a red boat", model="framepack-f1", width=32, height=32, frames=36 * sections + 1, steps=2,
            seed=3, image=str(image),
        )  # fmt: skip

    return made


def sections(job: Job) -> list[int]:
    """Return the sections that a job has finished, in all its runs."""
    return [event.section for event in job.events if isinstance(event, SectionDone)]


def ended(job: Job) -> VideoSaved:
    """Wait for a job's result."""
    until(lambda: not job.open)
    job.refresh()
    assert isinstance(job.progress.end, VideoSaved), job.progress.end
    return job.progress.end


@pytest.mark.slow
def test_a_job_ends_after_a_section_and_is_continued(queue: JobQueue, request_of: Ask, tmp_path: Path) -> None:
    whole = queue.submit(request_of())
    wanted = stream(ended(whole).video)
    assert not queue.store.get(whole.id).resumable
    folder = queue.store.folder(whole.id)
    assert folder is not None
    assert not (folder / SECTIONS).exists()

    job = queue.submit(request_of())
    until(lambda: bool(sections(job)))
    queue.finish_early(job.id)
    early = ended(job)
    record = queue.store.get(job.id)
    assert (record.state, record.resumable, record.finish) == ("done", True, False)
    assert early.sections is not None
    made, of, frames = early.sections
    assert 1 <= made < of == 3
    assert frames == 36 * made + 1
    assert stream(early.video) != wanted

    queue.resume(job.id)
    assert ended(job).sections == (3, 3, 109)
    assert stream(early.video) == wanted
    assert sections(job) == list(range(made + 1, 4))  # in the second run
    record = queue.store.get(job.id)
    assert (record.state, record.resumable) == ("done", False)


@pytest.mark.slow
def test_a_paused_job_ends_with_the_sections_that_it_has(queue: JobQueue, request_of: Ask) -> None:
    job = queue.submit(request_of())
    until(lambda: bool(sections(job)))
    queue.hold([job.id], True)
    until(lambda: queue.store.get(job.id).held)
    made = sections(job)
    queue.finish_early(job.id)
    early = ended(job)
    assert early.sections is not None
    # Of a section that was begun, the rest is made.
    assert early.sections[0] in {len(made), len(made) + 1}


def test_only_an_open_job_with_sections_can_end_early(queue: JobQueue, request_of: Ask) -> None:
    with pytest.raises(StoreError) as caught:
        queue.finish_early(add_job(queue.store, instance="cli").id)
    assert caught.value.code == "queue.job_has_no_sections"
    job = queue.submit(request_of(1))
    ended(job)
    with pytest.raises(StoreError) as caught:
        queue.finish_early(job.id)
    assert caught.value.code == "queue.job_ended"


@pytest.mark.slow
def test_a_continuation_that_dies_or_is_cancelled_keeps_the_earlier_video(queue: JobQueue, request_of: Ask) -> None:
    """The video that ended early is the job's own, but not what it was to make."""
    job = queue.submit(request_of(2))
    queue.finish_early(job.id)
    early = ended(job)
    assert early.sections == (1, 2, 37)
    record = queue.store.start(job.id, "1-dead")
    assert record.output.is_file()
    assert list(recovery.recover(queue.store, "")) == [job.id]
    record = queue.store.get(job.id)
    assert (record.state, record.resumable) == ("interrupted", True)
    assert record.saved == early

    queue.store.start(job.id, "2-dead")
    queue.store.log.record(job.id, Cancelled())
    record = queue.store.get(job.id)
    assert (record.state, record.resumable) == ("cancelled", True)
    assert record.saved == early

    queue.resume(job.id)
    assert ended(job).sections == (2, 2, 73)
    record = queue.store.get(job.id)
    assert record.saved is not None
    assert record.saved.sections == (2, 2, 73)


@pytest.mark.slow
def test_sections_of_a_video_that_ended_early_count_as_its_checkpoints(queue: JobQueue, request_of: Ask) -> None:
    job = queue.submit(request_of(2))
    queue.finish_early(job.id)
    ended(job)
    folder = queue.store.folder(job.id)
    assert folder is not None
    size = sum(path.stat().st_size for path in (folder / SECTIONS).rglob("*") if path.is_file())
    assert storage.checkpoint_bytes(queue.store, job.id) > size > 0
    assert storage.remove_finished_checkpoints(queue.store, None) > size
    assert not [path for path in (folder / SECTIONS).rglob("*") if path.is_file()]
    queue.resume(job.id)  # from its start
    assert ended(job).sections == (2, 2, 73)
