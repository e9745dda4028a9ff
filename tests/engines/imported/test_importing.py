"""Files that another program exported: import, verification, use in a job, and refusal."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from runtime.core.cancel import Cancel, CancelledError
from runtime.core.errors import EngineError
from runtime.core.events import Event, FellBack, VideoSaved
from runtime.core.facts import Fact
from runtime.core.loras import Lora
from runtime.core.plan import ExecutionPlan
from runtime.core.request import GenerationRequest
from runtime.engines.imported import importing
from runtime.engines.imported.importing import Imported, import_engine, inspect_engine
from runtime.engines.programs import load_program
from runtime.engines.service import EngineService
from runtime.engines.sessions import open_session
from runtime.engines.store import EngineStore
from runtime.execution.residency import Residency
from runtime.machine.probe import probe
from runtime.models.loras import with_loras
from runtime.models.spec import ModelSpec
from runtime.models.weights import load_module
from runtime.pipeline.run import run_job
from runtime.planner.resolve import PlanningContext, resolve
from tests.conftest import build_once
from tests.engines import child_entries, exported_files
from tests.engines.conftest import relative
from tests.engines.engine_files import visible
from tests.facts import states
from tests.lora_files import factors, peft, save
from tests.plans import machine
from tests.tiny_models import SHALLOW

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]
CLIP = {"prompt": "a red boat", "width": 16, "height": 8, "frames": 5, "steps": 4, "seed": 3, "fps": 8}


def ignore(fact: Fact, share: float | None) -> None:
    """JobHooks no progress."""


def sizes(*clips: Fact) -> Fact:
    """Return the fact for the sizes that an engine serves."""
    return Fact("engine.served_sizes", {"sizes": clips})


@dataclass(frozen=True)
class Library:
    """A model with two experts and an engine library."""

    spec: ModelSpec
    service: EngineService
    folder: Path

    def import_file(self, path: Path, component: str | None = None) -> Imported:
        """Import a file."""
        return import_engine(path, self.spec, component, self.service, ignore, Cancel())

    def plan(self, **values: object) -> ExecutionPlan:
        """Plan a tiny clip that builds nothing."""
        request = GenerationRequest.from_mapping(CLIP | {"build": "never"} | values)
        return resolve(
            request, self.spec, PlanningContext(machine(), self.folder / "x.mp4", self.service.offers(self.spec))
        )

    def run(self, plan: ExecutionPlan) -> tuple[VideoSaved, list[FellBack]]:
        """Run a job; return the video and what fell back."""
        events: list[Event] = []
        with Residency(self.service) as residency:
            run_job(plan, self.spec, events.append, Cancel(), residency)
        assert isinstance(events[-1], VideoSaved), events[-1]
        return events[-1], [event for event in events if isinstance(event, FellBack)]


@pytest.fixture
def library(tiny: Callable[[str], ModelSpec], tmp_path: Path) -> Library:
    """Return an empty library."""
    service = EngineService(EngineStore(tmp_path / "engines", 10**10), probe(), tmp_path)
    return Library(tiny(SHALLOW), service, tmp_path)


@pytest.fixture(scope="module")
def files(tiny: Callable[[str], ModelSpec], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return exported files: half precision, one row more than is read, twice the text, integer timesteps."""
    spec = tiny(SHALLOW)
    return build_once(tmp_path_factory, "exported", lambda folder: export_files(spec, folder))[1]


def export_files(spec: ModelSpec, folder: Path) -> dict[str, Path]:
    """Export the files."""
    return {
        "adapted": exported_files.transformer(spec, folder / "adapted.onnx"),
        "pair": exported_files.transformer(
            spec,
            folder / "pair.onnx",
            component="transformer_2",
            size=(3, 4, 9),
            text=512,
            batch=2,
            time=(),
            dtype=torch.float32,
            names=("x", "t", "context"),
        ),
        "cut": exported_files.transformer(spec, folder / "cut.onnx", size=(3, 4, 8), cut=1),
        "decoder": exported_files.decoder(spec, folder / "decoder.onnx", (3, 4, 8)),
        "text": exported_files.text_encoder(spec, folder / "text.onnx", 600),
    }


@pytest.fixture(scope="module")
def stock(
    tiny: Callable[[str], ModelSpec], files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Imported]]:
    """Return a library with all files imported, and the result of each import."""

    def fill(folder: Path) -> dict[str, Imported]:
        service = EngineService(EngineStore(folder / "engines", 10**10), probe(), folder)
        library = Library(tiny(SHALLOW), service, folder)
        return {name: library.import_file(path) for name, path in files.items()}

    return build_once(tmp_path_factory, "imported", fill)


@pytest.fixture
def full(library: Library, stock: tuple[Path, dict[str, Imported]]) -> Library:
    """Return a copy of that library."""
    shutil.copytree(stock[0] / "engines", library.folder / "engines")
    return library


@pytest.fixture
def imports(stock: tuple[Path, dict[str, Imported]]) -> dict[str, Imported]:
    """Return the result of each import."""
    return stock[1]


def test_import_with_all_adapters(library: Library, files: dict[str, Path]) -> None:
    done = library.import_file(files["adapted"])
    record = done.engine
    assert done.compared
    assert record.usable
    assert 0 < record.error < record.tolerance == 1e-2
    assert (record.key.builder, record.component) == ("imported", "transformer")
    assert done.serves == sizes(Fact("engine.clip", {"width": 16, "height": 8, "frames": 5}))
    kinds = [type(adapter).__name__ for adapter in done.match.adapters]
    assert kinds == ["Timestep", "RepeatedText", "UnreadRows", "Types", "Names"]
    assert visible(library.service.store) == [record.id]
    assert not (library.service.store.path(record.id) / "engine.onnx").is_symlink()
    # As long as it stays, importing it again changes nothing.
    assert library.import_file(files["adapted"]).engine.built_at == record.built_at
    # What `engines verify` finds is the same.
    [again] = library.service.verify([record], [library.spec], ignore, Cancel())
    assert again.skipped is None
    assert again.engine.error == pytest.approx(record.error)


def test_batched_engine_serves_guidance_and_single_calls(full: Library, imports: dict[str, Imported]) -> None:
    done = imports["pair"]
    # Whose weights these are was found by comparing.
    assert done.engine.component == "transformer_2"
    program = load_program(full.spec, "transformer_2", "transformer", device="cpu", dtype="float32")
    one, other = program.inputs((3, 4, 8), seed=1), program.inputs((3, 4, 8), seed=2)
    expected = torch.cat([program.run(**inputs)["velocity"] for inputs in (one, other)])
    both = {name: torch.cat([one[name], other[name]]) for name in ("latents", "text_embeds")}
    with open_session(full.service.store.path(done.engine.id), done.engine, device="cpu", weights=dict) as session:
        given = session.infer(**both, timestep=one["timestep"])["velocity"]
        alone = session.infer(**one)["velocity"]
    assert relative(given, expected) < 1e-5
    assert relative(alone, expected[:1]) < 1e-5


def test_a_job_on_imported_engines(full: Library, imports: dict[str, Imported]) -> None:
    ids = {imports[name].engine.id for name in ("adapted", "pair", "decoder", "text")}
    plan = full.plan(backends={"all": "onnxruntime"})
    assert {part.engines[0].id for part in plan.components.values()} == ids
    on_engines, fallen = full.run(plan)
    assert fallen == []
    assert {part["backend"] for part in on_engines.plan["components"].values()} == {"onnxruntime"}

    # Unasked, it is imports where it was measured to be faster, like any other.
    offers = full.service.offers(full.spec)("transformer", (3, 4, 8), "cpu")
    fastest = max(offer.speedup for offer in offers)
    part = full.plan().components["transformer"]
    assert part.backend == ("onnxruntime" if fastest >= 1.03 else "pytorch")

    # A size that it does not serve is named with the one that it does.
    part = full.plan(width=24, backends={"transformer": "onnxruntime"}).components["transformer"]
    assert part.backend == "pytorch"
    assert states(part, "engine.missing_but_imported")
    assert any("16x8" in str(reason) for reason in part.reasons)

    # Damaged, it is not built here: PyTorch takes its place.
    engine = full.service.store.path(plan.components["vae"].engines[0].id) / "engine.onnx"
    engine.write_bytes(engine.read_bytes()[:-1] + b"\0")
    _, fallen = full.run(full.plan(backends={"all": "onnxruntime"}, build="missing"))
    assert [event.component for event in fallen] == ["vae"]
    assert fallen[0].reason.code == "engine.imported_not_built"


def test_clip_decoder_serves_shorter_clips(full: Library, imports: dict[str, Imported]) -> None:
    done = imports["decoder"]
    lengths = {"width": 16, "height": 8, "frames": 5, "fewest": 1}
    assert done.serves == sizes(Fact("engine.clip_lengths", lengths))
    assert done.engine.error < 1e-5
    latents = torch.randn(1, 16, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    program = load_program(full.spec, "vae", "vae_clip", device="cpu", dtype="float32")
    with open_session(full.service.store.path(done.engine.id), done.engine, device="cpu", weights=dict) as session:
        frames = session.infer(z=latents)["frames"]
    assert tuple(frames.shape) == (3, 8, 16, 3)
    torch.testing.assert_close(frames, program.run(z=latents)["frames"], atol=1e-4, rtol=1e-4)


def test_text_encoder_with_a_longer_sequence(full: Library, imports: dict[str, Imported]) -> None:
    done = imports["text"]
    assert (done.engine.component, done.serves) == ("text_encoder", Fact("engine.any_clip"))
    assert done.engine.error < 1e-4


def test_lossy_engine_runs_only_if_its_backend_is_requested(full: Library, imports: dict[str, Imported]) -> None:
    done = imports["cut"]
    assert not done.match.exact
    # The computed part is verified; the error of the reconstructed part is reported.
    assert done.engine.error < 1e-2
    assert done.engine.detail.code == "engine.compared_restored"
    assert done.engine.detail.data["edge"] == Fact("engine.edge_rows", {"rows": 1})
    # With random weights, reconstructing the missing row is far off. The number is reported.
    assert done.engine.detail.data["error"] > 0.5
    full.service.store.delete(imports["adapted"].engine.id)
    [offer] = [offer for offer in full.service.offers(full.spec)("transformer", (3, 4, 8), "cpu") if offer.ready]
    assert offer.speedup == 0
    assert full.plan().components["transformer"].backend == "pytorch"
    plan = full.plan(backends={"transformer": "onnxruntime"})
    assert plan.components["transformer"].engines[0].id == done.engine.id
    _, fallen = full.run(plan)
    assert fallen == []


def with_other_weights(path: Path, target: Path) -> Path:
    """Copy a model with the rows of its matrices in reverse."""
    model = onnx.load(str(path))
    for tensor in model.graph.initializer:
        if len(tensor.dims) > 1:
            values = np.ascontiguousarray(numpy_helper.to_array(tensor)[::-1])
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, str(target))
    return target


def test_engine_with_other_weights_is_refused_and_removed(library: Library, files: dict[str, Path]) -> None:
    with pytest.raises(EngineError) as refused:
        library.import_file(files["adapted"], "transformer_2")
    assert (refused.value.code, refused.value.data["component"]) == ("engine.import_other_weights", "transformer_2")
    path = with_other_weights(files["adapted"], library.folder / "other.onnx")
    with pytest.raises(EngineError) as refused:
        library.import_file(path)
    assert refused.value.code == "engine.import_other_weights"
    assert visible(library.service.store) == []


def test_engine_is_not_offered_after_the_weights_changed(
    library: Library, files: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(library.spec.directory, folder)
    changed = Library(replace(library.spec, directory=folder), library.service, tmp_path)
    changed.import_file(files["adapted"])
    assert changed.plan(backends={"all": "onnxruntime"}).components["transformer"].engines
    shutil.rmtree(folder / "transformer")
    shutil.copytree(folder / "transformer_2", folder / "transformer")
    assert not changed.plan(backends={"all": "onnxruntime"}).components["transformer"].engines


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda data: data[: len(data) // 2], "engine.onnx_damaged"),
        (lambda _: bytes(range(256)) * 20, "engine.onnx_damaged"),
        (lambda _: b"\x08\x08", "engine.onnx_without_outputs"),
        (lambda data: data.replace(b"Softmax", b"Softmix").replace(b"MatMul", b"MatMil"), "engine.child_refused"),
    ],
    ids=["cut", "random", "an empty model", "unknown operators"],
)
def test_damaged_files(
    damage: Callable[[bytes], bytes], code: str, library: Library, files: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "damaged.onnx"
    path.write_bytes(damage(files["adapted"].read_bytes()))
    with pytest.raises(EngineError) as refused:
        library.import_file(path)
    assert refused.value.code == code
    assert "\n" not in refused.value.what
    assert visible(library.service.store) == []


def outside(path: Path, target: Path, location: str) -> Path:
    """Move a model's weights into another file, and say that they lie at `location`."""
    model = onnx.load(str(path))
    onnx.save(model, str(target), save_as_external_data=True, location="weights.data", size_threshold=1024)
    model = onnx.load(str(target), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    target.write_bytes(model.SerializeToString())
    return target


def test_external_weights_are_copied(library: Library, files: dict[str, Path], tmp_path: Path) -> None:
    path = outside(files["adapted"], tmp_path / "beside.onnx", "weights.data")
    record = library.import_file(path).engine
    assert [file.name for file in record.files] == ["engine.onnx", "adapters.json", "weights.data"]
    assert record.usable


def test_external_weights_that_do_not_fit_on_the_disk_are_refused_before_they_are_copied(
    library: Library, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = outside(files["adapted"], tmp_path / "beside.onnx", "weights.data")
    weights = tmp_path / "weights.data"
    with weights.open("ab") as file:
        file.truncate(path.stat().st_size + 10_000)
    size = weights.stat().st_size
    monkeypatch.setattr(importing, "free_disk_bytes", lambda _: size - 1)
    with pytest.raises(EngineError) as refused:
        library.import_file(path)
    assert refused.value.code == "engine.import_weights_disk_full"
    assert (refused.value.data["size"], refused.value.data["free"]) == (size, size - 1)
    assert visible(library.service.store) == []
    monkeypatch.setattr(importing, "free_disk_bytes", lambda _: size)
    assert library.import_file(path).engine.usable


@pytest.mark.parametrize("location", ["../weights.data", "/etc/passwd", "sub/weights.data", "gone.data"])
def test_external_weights_in_other_folders_are_refused(
    location: str, library: Library, files: dict[str, Path], tmp_path: Path
) -> None:
    path = outside(files["adapted"], tmp_path / "outside.onnx", location)
    with pytest.raises(EngineError) as refused:
        library.import_file(path)
    assert refused.value.code in {"engine.onnx_weights_outside", "engine.import_weights_missing"}
    assert visible(library.service.store) == []


@pytest.mark.parametrize("location", ["engine.onnx", "Engine.onnx", "adapters.json", "engine.json", "build.log"])
def test_external_weights_do_not_replace_files_of_the_engine(
    location: str, library: Library, files: dict[str, Path], tmp_path: Path
) -> None:
    path = outside(files["adapted"], tmp_path / "named.onnx", location)
    (tmp_path / "weights.data").rename(tmp_path / location)
    with pytest.raises(EngineError) as refused:
        library.import_file(path)
    assert (refused.value.code, refused.value.data["file"]) == ("engine.onnx_weights_name", location)
    assert visible(library.service.store) == []


def test_crash_while_opening_is_an_error(library: Library, files: dict[str, Path]) -> None:
    with pytest.raises(EngineError) as failed:
        import_engine(files["adapted"], library.spec, None, library.service, ignore, Cancel(), child_entries.abort)
    assert (failed.value.code, failed.value.data["signal"]) == ("engine.child_crashed", 6)
    assert failed.value.data["action"].code == "engine.not_opened"
    assert visible(library.service.store) == []


def test_cancelled_import_leaves_no_files(library: Library, files: dict[str, Path]) -> None:
    cancel = Cancel()

    def stop(fact: Fact, share: float | None) -> None:
        if fact.code == "engine.comparing_with":
            cancel.request()

    with pytest.raises(CancelledError):
        import_engine(files["adapted"], library.spec, None, library.service, stop, cancel)
    assert visible(library.service.store) == []


def test_inspection_stores_nothing(library: Library, files: dict[str, Path]) -> None:
    contract = inspect_engine(files["adapted"], "cpu", ignore, Cancel())
    assert [port.name for port in contract.inputs] == ["sample", "timestep", "encoder_hidden_states"]
    assert contract.precision == "float16"
    assert contract.made_by.startswith("pytorch")
    assert not library.service.store.folder.exists()


def test_engine_with_changed_adapters_is_not_used(full: Library, imports: dict[str, Imported]) -> None:
    record = imports["adapted"].engine
    path = full.service.store.path(record.id) / "adapters.json"
    path.write_text(path.read_text().replace('"batch": 1', '"batch": 2'))
    with pytest.raises(EngineError) as refused:
        open_session(path.parent, record, device="cpu", weights=dict)
    assert refused.value.data["cause"] == Fact("engine.file_changed", {"file": "adapters.json"})


def test_an_imported_engine_belongs_to_the_loras_in_its_weights(full: Library, imports: dict[str, Imported]) -> None:
    def ready(spec: ModelSpec) -> dict[str, int]:
        offers = full.service.offers(spec)("transformer", (3, 4, 8), "cpu")
        return {offer.engines[0].id: offer.file_bytes for offer in offers if offer.ready}

    file = save(full.folder / "style.safetensors", peft(factors(full.spec.transformer)))
    spec = with_loras(full.spec, [Lora(str(file), 0.8)], full.folder)
    without = {imports[name].engine.id: imports[name].engine.file_bytes for name in ("adapted", "cut")}
    # An engine without the requested LoRAs would make another video.
    assert ready(full.spec) == without
    assert ready(spec) == {}
    module = load_module(spec, "transformer", full.plan().components["transformer"])
    made = exported_files.transformer(spec, full.folder / "style.onnx", module=module, dtype=torch.float32)
    done = replace(full, spec=spec).import_file(made, "transformer")
    assert done.engine.loras == spec.loras
    assert ready(spec) == {done.engine.id: done.engine.file_bytes}
    assert ready(full.spec) == without
    # It is compared with the model's weights and these LoRAs, when it is imported and later.
    [again] = full.service.verify([done.engine], [full.spec], ignore, Cancel())
    assert (again.skipped, again.engine.usable) == (None, True)
    assert full.service.why_stale(again.engine, [full.spec]) == []
