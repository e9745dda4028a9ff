"""Prompts that a server, or a chat model in the worker, enhances; limits; what becomes of requests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.core.errors import EnhancerError, InvalidRequestError, LimitError
from runtime.core.request import GenerationRequest
from runtime.core.settings import Settings
from runtime.core.templates import as_written
from runtime.engines.service import EngineService
from runtime.models.spec import ModelSpec
from runtime.models.wildcards import with_prompt
from runtime.queue.enhancing import Enhancement, Enhancements, EnhancerRequest, Progress, with_enhanced
from runtime.queue.job_planning import continuation
from runtime.queue.job_queue import JobQueue, combined
from tests.chat_models import ANSWER, ChatServer, chat_server, save_chat_model
from tests.queue.samples import add_job
from tests.thread_queue import RunningQueue
from tests.waiting import until


@pytest.fixture(scope="module")
def asked(tiny: Callable[[str], ModelSpec]) -> EnhancerRequest:
    return EnhancerRequest.of(" a red boat ", tiny("wan2.1"))


@pytest.fixture
def queue(engines: EngineService, tmp_path: Path) -> Iterator[JobQueue]:
    made = RunningQueue(tmp_path / "weights", tmp_path / "outputs", engines, start=False)
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


def ended(enhancement: Enhancement) -> Progress:
    """Wait until one has ended; return how."""
    until(lambda: enhancement.progress().state != "running")
    return enhancement.progress()


def test_a_request_has_the_rules_of_its_model(tiny: Callable[[str], ModelSpec], asked: EnhancerRequest) -> None:
    spec = tiny("wan2.1")
    assert asked.prompt == "a red boat" and asked.messages[-1] == {"role": "user", "content": "a red boat"}
    of_image = EnhancerRequest.of("a red boat", spec, from_image=True)
    assert of_image.instructions != asked.instructions
    for prompt, code in (
        ("a {red|blue} boat", "enhancer.template"),
        ("", "request.prompt_empty"),
        (7, "request.not_text"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            EnhancerRequest.of(prompt, spec)
        assert caught.value.code == code
    assert EnhancerRequest.of("a {red|blue} boat", spec, expanded=True).prompt == "a {red|blue} boat"


def test_an_enhanced_prompt_stays_as_it_is() -> None:
    request = GenerationRequest(prompt="a {red|red} boat", seed=3)
    for of, template in ((request, None), (with_prompt(request, None), "a {red|red} boat")):
        plain = with_enhanced(of, "A red boat sails.")
        assert (plain.prompt, plain.template, plain.original_prompt) == ("A red boat sails.", template, of.prompt)
        odd = with_prompt(with_enhanced(of, "{a|b} __c__"), None)
        assert (odd.prompt, odd.original_prompt) == ("{a|b} __c__", of.prompt)
    varied = combined(with_enhanced(request, "A red boat."), [], [1, 2])
    assert [(one.seed, one.prompt, one.original_prompt) for one in varied] == [
        (seed, "A red boat.", "a {red|red} boat") for seed in (1, 2)
    ]
    assert {one.original_prompt for one in combined(varied[0], ["a kite"], [1])} == {None}
    longer = continuation(varied[0], Path("made.mp4"), {})
    assert (longer.prompt, longer.original_prompt) == ("A red boat.", "a {red|red} boat")
    assert continuation(varied[0], Path("made.mp4"), {"prompt": "a kite"}).original_prompt is None
    assert with_prompt(GenerationRequest(prompt=as_written("{a|b} __c__")), None).prompt == "{a|b} __c__"


def test_a_chat_model_runs_in_the_worker_before_the_videos_that_wait(
    asked: EnhancerRequest, queue: JobQueue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    enhancements = Enhancements(queue, Settings(cache_dir=tmp_path, enhancer=str(save_chat_model(tmp_path / "chat"))))
    assert enhancements.problem() is None
    held = add_job(queue.store, prompt="waits")
    made = enhancements.start(asked)
    (task,) = queue.tasks()
    assert next(iter(queue.store.order.ids(kinds=["video", "task"]))) == task.id
    assert "boat" not in task.title and enhancements.find(made.id) is made and enhancements.find("x") is None
    assert made.progress().line is not None
    stopped = enhancements.start(asked)
    stopped.cancel()
    assert ended(stopped).state == "cancelled"
    queue.store.request_cancel([held.id])
    assert isinstance(queue, RunningQueue)
    queue.start()
    assert ended(made) == Progress("done", prompt=ANSWER)
    assert ANSWER not in caplog.text
    # A folder that is damaged meanwhile.
    (tmp_path / "chat" / "tokenizer.json").write_text("{}")
    failed = ended(enhancements.start(asked))
    assert failed.state == "failed" and failed.problem is not None and failed.problem.code == "enhancer.unloadable"


def test_a_server_is_asked_within_limits(
    asked: EnhancerRequest, queue: JobQueue, server: ChatServer, tmp_path: Path
) -> None:
    settings = Settings(cache_dir=tmp_path, enhancer=server.address, enhancer_model="small")
    enhancements = Enhancements(queue, settings)
    assert ended(enhancements.start(asked, "key", 3)).prompt == server.text
    server.text = "a\0boat"
    problem = ended(enhancements.start(asked, "key", 3)).problem
    assert problem is not None and problem.code == "enhancer.answer_unusable"
    server.text, server.seconds = "{a|b}", 60.0
    running = [enhancements.start(asked, owner) for owner in ("one", "one", "two")]
    with pytest.raises(LimitError) as caught:
        enhancements.start(asked, "one")
    assert caught.value.code == "enhancer.busy" and enhancements.find(running[0].id, "two") is None
    for enhancement in running:
        enhancement.cancel()
    assert {ended(enhancement).state for enhancement in running} == {"cancelled"}
    server.seconds = 0.0
    assert ended(enhancements.start(asked, "key", 3)).prompt == "{a|b}"
    with pytest.raises(LimitError) as caught:
        enhancements.start(asked, "key", 3)
    assert caught.value.code == "enhancer.rate" and caught.value.data["minutes"] == 60
    assert not queue.tasks()


def test_without_an_enhancer_nothing_starts(asked: EnhancerRequest, tmp_path: Path) -> None:
    enhancements = Enhancements(None, Settings(cache_dir=tmp_path))  # type: ignore[arg-type]  # it is not used
    problem = enhancements.problem()
    assert problem is not None and problem.code == "enhancer.none"
    with pytest.raises(EnhancerError):
        enhancements.start(asked)
