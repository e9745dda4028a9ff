"""Two processes' stores on one file, any calls in any order: no job is lost, none runs twice, each ends once."""

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from runtime.core.errors import StoreError
from runtime.core.events import Cancelled, Failed, VideoSaved
from runtime.core.facts import Fact
from runtime.queue.store import JobStore
from tests.queue.samples import add_job, requests, sample_result

which = st.sampled_from([0, 1])
ENDS = {"VideoSaved", "Failed", "Cancelled"}


class TwoStores(RuleBasedStateMachine):
    """The stores against a model: a list of what waits, and the state of each job."""

    jobs = Bundle("jobs")
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "jobs.sqlite"
        self.stores = JobStore(path), JobStore(path)
        self.state: dict[str, str] = {}
        self.line: list[str] = []
        self.held: set[str] = set()
        self.deleted: set[str] = set()

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        self.folder.cleanup()

    @rule(target=jobs, at=which)
    def add_job(self, at: int) -> str:
        job = add_job(self.stores[at])
        self.state[job.id] = "queued"
        self.line.append(job.id)
        return job.id

    @rule(target=running, at=which)
    def claim(self, at: int) -> str:
        claimed = self.stores[at].order.claim(str(at))
        free = [one for one in self.line if self.state[one] == "queued" and one not in self.held]
        assert (None if claimed is None else claimed.id) == (free[0] if free else None)
        if claimed is None:
            return ""
        self.state[claimed.id] = "running"
        return claimed.id

    @rule(
        at=which,
        job=consumes(running),
        event=st.sampled_from([sample_result(), Failed(fact=Fact("queue.store_locked")), Cancelled()]),
    )
    def end(self, at: int, job: str, event: VideoSaved | Failed | Cancelled) -> None:
        if not job:
            return
        runs = self.state[job] == "running"
        assert self.stores[at].log.record(job, event) == runs
        if runs:
            self._ended(job, {VideoSaved: "done", Failed: "failed", Cancelled: "cancelled"}[type(event)])

    @rule(at=which, job=jobs, event=st.sampled_from([sample_result(), Cancelled()]))
    def end_what_does_not_run(self, at: int, job: str, event: VideoSaved | Cancelled) -> None:
        if self.state[job] != "running":
            assert not self.stores[at].log.record(job, event)

    @rule(at=which, job=consumes(running), held=st.booleans())
    def put_back(self, at: int, job: str, held: bool) -> None:
        if job and self.state[job] == "running":
            if held:
                self.stores[1 - at].hold([job], True)
            wish = requests(self.stores[at], job).get(job)
            self.stores[at].put_back(job)
            if wish == "cancel":
                self._ended(job, "cancelled")
                return
            self.state[job] = "queued"
            if wish == "pause":
                self.held.add(job)

    @rule(at=which, job=consumes(running))
    def its_process_dies(self, at: int, job: str) -> None:
        if job and self.state[job] == "running":
            instance = self.stores[at].get(job).instance
            assert instance is not None
            wished = requests(self.stores[at], job)
            self._ended(job, "cancelled" if wished else "interrupted")
            assert self.stores[at].interrupt(job, instance, None) == self.state[job]
            assert self.stores[1 - at].interrupt(job, instance, None) is None

    @rule(at=which, job=jobs, other=jobs | st.none())
    def move(self, at: int, job: str, other: str | None) -> None:
        if self.state[job] != "queued" or (other is not None and self.state[other] != "queued"):
            with pytest.raises(StoreError):
                self.stores[at].order.move(job, other)
            return
        self.stores[at].order.move(job, other)
        if job != other:
            # Places of those that run stay where they are among the others.
            waiting = [one for one in self.line if self.state[one] == "queued"]
            spots = [place for place, one in enumerate(self.line) if self.state[one] == "queued"]
            waiting.remove(job)
            waiting.insert(len(waiting) if other is None else waiting.index(other), job)
            for place, one in zip(spots, waiting, strict=True):
                self.line[place] = one

    @rule(at=which, job=jobs, held=st.booleans())
    def hold(self, at: int, job: str, held: bool) -> None:
        if self.state[job] == "queued":
            self.stores[at].hold([job], held)
            (self.held.add if held else self.held.discard)(job)

    @rule(at=which, job=jobs)
    def cancel(self, at: int, job: str) -> None:
        self.stores[at].request_cancel([job])
        if self.state[job] == "queued":
            self._ended(job, "cancelled")

    @rule(at=which, job=jobs)
    def delete(self, at: int, job: str) -> None:
        if self.state[job] == "running":
            with pytest.raises(StoreError):
                self.stores[at].delete(job)
            return
        self.stores[at].delete(job)
        self.deleted.add(job)
        if self.state[job] == "queued":
            self._ended(job, "cancelled")

    @rule(at=which, job=jobs)
    def undelete(self, at: int, job: str) -> None:
        self.stores[at].undelete(job)
        self.deleted.discard(job)

    @rule(at=which, job=jobs)
    def resume(self, at: int, job: str) -> None:
        if job in self.deleted or self.state[job] not in {"failed", "cancelled", "interrupted"}:
            with pytest.raises(StoreError):
                self.stores[at].resume(job)
            return
        self.stores[at].resume(job)
        self.state[job] = "queued"
        self.line.append(job)

    @invariant()
    def both_stores_say_what_the_model_says(self) -> None:
        for store in self.stores:
            waiting = [job.id for job in store.order.jobs() if job.state == "queued"]
            assert waiting == [one for one in self.line if self.state[one] == "queued"]
            there = {job.id: job.state for job in (*store.list(), *store.list(deleted=True))}
            assert there == self.state

    @invariant()
    def queries_of_columns_agree_with_the_queue(self) -> None:
        store = self.stores[0]
        queue = store.order.jobs()
        free = [job for job in queue if job.state == "queued" and not job.held]
        assert [one.id for one in store.order.waiting(len(queue))] == [job.id for job in free]
        assert store.order.ids() == {job.id: job.state for job in queue}
        shown = Counter(("video", "paused" if job.held else job.state) for job in queue)
        assert store.order.counts() == shown
        for place, job in enumerate(queue):
            before = {one.id: one.kind for one in queue[:place] if not one.held}
            assert {one: entry.kind for one, entry in store.order.ahead(job.id).items()} == before
            assert job.state == "running" or store.order.count_ahead(job.id) == len(before)

    @invariant()
    def each_job_ends_once_for_each_time_it_began(self) -> None:
        for job, state in self.state.items():
            events = [values["event"] for _, _, values in self.stores[0].log.events(job)]
            ends = sum(name in ENDS or name == "Interrupted" for name in events)
            assert ends == events.count("QueuedAgain") + (state not in {"queued", "running"})

    def _ended(self, job: str, state: str) -> None:
        self.state[job] = state
        self.line.remove(job)
        self.held.discard(job)


TwoStores.TestCase.settings = settings(
    max_examples=15, stateful_step_count=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTwoStores = TwoStores.TestCase


def test_a_cancelled_job_that_is_put_back_ends() -> None:
    """The machine finds this order of calls rarely."""
    machine = TwoStores()
    try:
        job = machine.add_job(0)
        machine.claim(0)
        machine.cancel(0, job)
        machine.put_back(0, job, False)
        machine.both_stores_say_what_the_model_says()
        machine.each_job_ends_once_for_each_time_it_began()
    finally:
        machine.teardown()
