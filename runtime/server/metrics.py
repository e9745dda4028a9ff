"""Metrics for Prometheus: queue, results, seconds of each stage, fallbacks and memory. Read when they are asked for."""

import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import psutil
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client import Counter as Count
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from runtime.core.errors import StoreError
from runtime.machine.probe import probe
from runtime.queue.job_queue import JobQueue

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Events that count.
_NAMES = ("VideoSaved", "Failed", "Cancelled", "FellBack", "OutOfMemory", "WorkerDied")
_RESULTS = {"VideoSaved": "completed", "Failed": "failed", "Cancelled": "cancelled"}
_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200)


class Metrics:
    """The metrics of one app. Safe between threads.

    What has ended before the app started is not counted.
    """

    def __init__(self, worker: JobQueue) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_Now(worker))
        self._videos = Count("tandem_videos", "Videos that ended, by result.", ["result"], registry=self._registry)
        self._stages = Histogram(
            "tandem_stage_seconds",
            "Seconds of each stage of completed videos.",
            ["model", "stage"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._fallbacks = Count(
            "tandem_fallbacks",
            "Components that continued in PyTorch because their engine failed.",
            ["component"],
            registry=self._registry,
        )
        self._memory_short = Count(
            "tandem_out_of_memory", "Times that a job ran out of memory.", ["memory"], registry=self._registry
        )
        self._deaths = Count(
            "tandem_worker_deaths", "Deaths of worker processes while they ran a job.", registry=self._registry
        )
        try:
            self._read, _ = worker.store.log.events_since(0, ())
        except StoreError:
            self._read = 0

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format.

        Raises:
            StoreError: if the job store cannot be read.
        """
        with self._lock:
            self._count()
        return generate_latest(self._registry)

    def _count(self) -> None:
        """Count what has happened since the last call."""
        read, news = self._worker.store.log.events_since(self._read, _NAMES)
        for job_id, values in news:
            name = str(values["event"])
            if name == "FellBack":
                self._fallbacks.labels(str(values.get("component"))).inc()
            elif name == "OutOfMemory":
                self._memory_short.labels(str(values.get("memory"))).inc()
            elif name == "WorkerDied":
                self._deaths.inc()
            else:
                self._videos.labels(_RESULTS[name]).inc()
                if name == "VideoSaved":
                    self._time(job_id)
        self._read = read

    def _time(self, job_id: str) -> None:
        try:
            record = self._worker.store.get(job_id)
        except StoreError:  # purged
            return
        if record.saved is None:
            return
        model = "" if record.plan is None else record.plan.model_directory.name
        for stage, seconds in {**record.saved.timings, "load": record.saved.load_seconds}.items():
            self._stages.labels(model, stage).observe(seconds)


class _Now(Collector):
    """The state of this moment."""

    def __init__(self, worker: JobQueue) -> None:
        self._worker = worker

    def collect(self) -> Iterable[Metric]:
        """Yield the length of the queue, the workers and the memory."""
        queue: Counter[tuple[str, str]] = Counter(self._worker.store.order.counts())
        jobs = GaugeMetricFamily("tandem_queue_jobs", "Jobs that are queued or run.", labels=["kind", "state"])
        for kind, state in {("video", "queued"), ("video", "running"), ("video", "paused"), *queue}:
            jobs.add_metric([kind, state], queue[kind, state])
        yield jobs
        yield GaugeMetricFamily("tandem_workers", "Worker processes that run.", value=len(self._worker.worker_pids()))
        machine = probe()
        memory = GaugeMetricFamily(
            "tandem_memory_bytes", "Memory of this machine and its GPUs.", labels=["device", "kind"]
        )
        memory.add_metric(["ram", "total"], machine.ram_bytes)
        memory.add_metric(["ram", "free"], machine.ram_free_bytes)
        for number, device in enumerate(machine.gpus):
            memory.add_metric([f"cuda:{number}", "total"], device.total_bytes)
            memory.add_metric([f"cuda:{number}", "free"], device.free_bytes)
        yield memory
        resident = GaugeMetricFamily("tandem_worker_memory_bytes", "Resident memory of the workers.", labels=["gpu"])
        for gpu, pid in self._worker.worker_pids().items():
            with suppress(psutil.Error):  # it ended
                resident.add_metric([str(gpu)], psutil.Process(pid).memory_info().rss)
        yield resident

    def describe(self) -> Iterable[Metric]:
        """Describe nothing, so that registering reads nothing."""
        return ()
