"""The panel Cluster: machines, what they run, where waiting videos will run, and how another machine joins."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.core.errors import TandemError
from runtime.core.facts import BACKEND_TITLES, Fact, lowered
from runtime.core.settings import LOOPBACK, Settings
from runtime.core.units import about, counted, memory_size
from runtime.queue.job_queue import JobQueue
from runtime.server.cluster.cluster_key import NAME, VARIABLE, make_key
from runtime.server.cluster.views import ClusterView, Fallback, JobProgress, NodeView, QueuedView, WorkerView
from runtime.server.serve import join_command
from runtime.ui import formatting
from runtime.ui.formatting import WORDS, page_text, paragraph, render
from runtime.ui.panels import Call, Reply, drawn, unknown_action

_STATES = {"ready": "", "starting": "Starting…", "lost": "Disconnected", "refused": "Refused"}


@dataclass(frozen=True)
class _Worker:
    """A worker as the template shows it.

    Attributes:
        title: the prompt of its video; empty if it runs none.
        line: how far the video is, or what is loaded.
        percent: progress of the video.
        gpu: its GPUs, if its machine has several kinds.
    """

    id: str
    title: str
    line: str
    percent: int | None
    gpu: str


@dataclass(frozen=True)
class _Machine:
    """A machine as the template shows it.

    Attributes:
        state: a tag; empty for one that can be used.
        hardware: GPUs and memory, or the processor.
        line: why it has no workers; empty if it has.
        fallbacks: sentences.
    """

    id: str
    name: str
    head: bool
    state: str
    hardware: str
    line: str
    workers: Sequence[_Worker]
    fallbacks: Sequence[str]


@dataclass(frozen=True)
class _Waiting:
    """A waiting video as the template shows it: `place` is the machine's name, empty if it is not known."""

    id: str
    title: str
    place: str
    when: str
    why: str


class ClusterPanel:
    """The panel; see `panels.Panel`.

    Args:
        view: returns the cluster, as `GET /v1/cluster` does.
    """

    def __init__(self, view: Callable[[], ClusterView], worker: JobQueue, settings: Settings) -> None:
        self._view = view
        self._worker = worker
        self._settings = settings

    def act(self, call: Call) -> Reply:
        """Carry out an action: the panel only shows."""
        if call.action != "refresh":
            raise unknown_action()
        return {}

    def draw(self, call: Call, _reply: Reply) -> dict[str, str]:
        """Return the machines, the queue, and how a machine joins; with the key if the page asks for it."""
        try:
            view = self._view()
        except TandemError as error:
            problem = render("problem.html", text=paragraph(error.fact))
            return {"machines": problem} | drawn({"join": lambda: self._join(call)})
        return drawn(
            {
                "machines": lambda: self._machines(view),
                "queue": lambda: self._queue(view),
                "join": lambda: self._join(call),
            }
        )

    def _machines(self, view: ClusterView) -> str:
        machines = [self._machine(node) for node in view.nodes]
        running = sum(worker.job is not None for node in view.nodes for worker in node.workers)
        workers = sum(len(node.workers) for node in view.nodes)
        summary = f"{counted(running, 'video')} running on {counted(workers, 'worker')}" if workers else ""
        return render("cluster_machines.html", machines=machines, summary=summary)

    def _machine(self, node: NodeView) -> _Machine:
        line = ""
        if node.head and not node.workers:
            line = "Has no GPU and makes no videos. To use its processor, run the command below here too."
        elif node.problem is not None:
            line = paragraph(node.problem)
        elif node.state == "starting":
            line = "Its workers start."
        elif node.state == "lost":
            line = "Its videos resume on another machine. It joins again when it can be reached."
        fallbacks = [_fallback(fallback) for worker in node.workers for fallback in worker.fallbacks]
        return _Machine(
            id=node.id,
            name=node.name,
            head=node.head,
            state=_STATES[node.state],
            hardware=_hardware(node),
            line=line,
            workers=[self._shown(worker, several=len({gpu.name for gpu in node.gpus}) > 1) for worker in node.workers],
            fallbacks=list(dict.fromkeys(fallbacks)),
        )

    def _shown(self, worker: WorkerView, *, several: bool) -> _Worker:
        gpu = ", ".join(dict.fromkeys(worker.gpus)) if several else ""
        if worker.job is None:
            loaded = "" if worker.model is None else f", {self._worker.title(worker.model)} is loaded"
            return _Worker(worker.id, "", f"Idle{loaded}", None, gpu)
        progress = worker.progress
        percent = None if progress is None else progress.percent
        return _Worker(worker.id, self._title(worker.job), _line(progress), percent, gpu)

    def _queue(self, view: ClusterView) -> str:
        rows = [
            _Waiting(
                entry.job,
                self._title(entry.job),
                entry.name or "",
                _when(entry),
                page_text(self._named(entry.reason)).what,
            )
            for entry in view.queue
        ]
        return render("cluster_queue.html", rows=rows, more=view.queued - len(rows))

    def _named(self, reason: Fact) -> Fact:
        """Return a reason with the title of its model."""
        model = reason.data.get("model")
        return reason if model is None else Fact(reason.code, reason.data | {"model": self._worker.title(model)})

    def _title(self, job_id: str) -> str:
        job = self._worker.job(job_id)
        return job_id if job is None else formatting.shown(job.summary.prompt)

    def _join(self, call: Call) -> str:
        settings = self._settings
        command, key = join_command(settings), ""
        if call.view.get("key") is True:
            key = make_key(settings.cache_dir)
        return render(
            "cluster_join.html",
            command=command,
            with_key=f"{VARIABLE}={key} {command}" if key else "",
            file=settings.cache_dir / NAME,
            variable=VARIABLE,
            loopback=settings.host in LOOPBACK,
        )


def _hardware(node: NodeView) -> str:
    """Return "2 × NVIDIA H100 80GB HBM3, 79.6 GB each", or the processor and the memory of a machine without GPUs."""
    if not node.gpus:
        return f"{node.cpu}, {memory_size(node.ram_bytes)} of memory" if node.ram_bytes else ""
    kinds = dict.fromkeys((gpu.name, gpu.total_bytes) for gpu in node.gpus)
    texts = []
    for name, size in kinds:
        count = sum((gpu.name, gpu.total_bytes) == (name, size) for gpu in node.gpus)
        texts.append(f"{count} × {name}, {memory_size(size)} each" if count > 1 else f"{name}, {memory_size(size)}")
    return "; ".join(texts)


def _line(progress: JobProgress | None) -> str:
    """Return "Denoising, 3 of 20 steps, about 40 s left"."""
    if progress is None:
        return ""
    steps = f"{progress.step} of {counted(progress.steps, 'step')}" if progress.steps else ""
    return ", ".join(filter(None, (progress.stage, steps, formatting.time_left(progress.seconds_left))))


def _when(entry: QueuedView) -> str:
    if entry.seconds is None:
        return ""
    return "now" if entry.seconds < 1 else f"in {about(entry.seconds)}"


def _fallback(record: Fallback) -> str:
    component, backend = lowered(WORDS.component(record.component)), BACKEND_TITLES.get(record.backend, record.backend)
    return f"PyTorch runs the {component} instead of {backend}: {page_text(record.reason).what}"
