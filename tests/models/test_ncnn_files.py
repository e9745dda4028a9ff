"""ncnn's files: read with bounds; truncated, foreign and hostile ones are refused in one line."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtime.core.errors import ModelError
from runtime.models.ncnn_files import read_ncnn
from tests.families.esrgan.networks import COMPACT_CONFIG, save_ncnn, weights


@pytest.mark.parametrize("half", [True, False])
def test_weights_are_where_the_file_has_them(half: bool, tmp_path: Path) -> None:
    save_ncnn(tmp_path / "x.param", COMPACT_CONFIG, half=half)
    tensors = [tensor for layer in read_ncnn(tmp_path / "x.param") for tensor in layer.weights.values()]
    data = (tmp_path / "x.bin").read_bytes()
    for tensor, expected in zip(tensors, weights(COMPACT_CONFIG).values(), strict=True):
        dtype = {"F16": np.float16, "F32": np.float32}[tensor.dtype]
        values = np.frombuffer(data[tensor.offset : tensor.offset + tensor.nbytes], dtype)
        assert np.array_equal(values.reshape(tensor.shape), expected)


def _replaced(old: str, new: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


def _weights_changed(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        file = path.with_suffix(".bin")
        file.write_bytes(change(file.read_bytes()))

    return apply


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no magic": (_replaced("7767517", "7767518"), "ncnn.no_magic"),
    "empty": (_replaced("7767517\n12 ", ""), "ncnn.no_magic"),
    "layers": (_replaced("\n12 ", "\n13 "), "ncnn.layers"),
    "no count": (_replaced("\n12 ", "\nx "), "ncnn.layers"),
    "names missing": (_replaced("PReLU p0 1 1 c0 p0 0=8", "PReLU p0 1 1 c0"), "ncnn.layer_malformed"),
    "many inputs": (_replaced("PReLU p0 1 1", "PReLU p0 99999999999 1"), "ncnn.layer_malformed"),
    "no number": (_replaced("6=216", "6=nan"), "ncnn.layer_malformed"),
    "list": (_replaced("6=216", "-23310=9,1.0"), "ncnn.layer_malformed"),
    "kind": (_replaced("PReLU", "LSTM"), "ncnn.layer_unknown"),
    "channels": (_replaced("0=8", "0=999999"), "ncnn.shape"),
    "values": (_replaced("6=216", "6=217"), "ncnn.shape"),
    "padding": (_replaced("4=1", "4=0"), "ncnn.shape"),
    "stride": (_replaced("6=216", "6=216 3=2"), "ncnn.shape"),
    "int8": (_replaced("6=216", "6=216 8=1"), "ncnn.shape"),
    "flag": (_weights_changed(lambda data: b"\1\2\3\4" + data[4:]), "ncnn.flag"),
    "more": (_weights_changed(lambda data: data + bytes(4)), "ncnn.more_weights"),
    "truncated": (_weights_changed(lambda data: data[:-4]), "model.file_damaged"),
    "no data": (_weights_changed(lambda _: b""), "model.file_damaged"),
}


def test_damaged_files_are_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for name, (change, code) in DAMAGE.items():
        with subtests.test(name):
            path = tmp_path / f"{name}.param"
            save_ncnn(path, COMPACT_CONFIG)
            change(path)
            with pytest.raises(ModelError) as caught:
                read_ncnn(path)
            cause = caught.value.data.get("cause")
            assert (cause.code if cause is not None else caught.value.code) == code


def test_missing_files_are_refused(tmp_path: Path) -> None:
    save_ncnn(tmp_path / "x.param", COMPACT_CONFIG)
    (tmp_path / "x.bin").unlink()
    for path in (tmp_path / "x.param", tmp_path / "y.param", tmp_path):
        with pytest.raises(ModelError) as caught:
            read_ncnn(path)
        assert caught.value.code == "model.file_unreadable"
