"""Each adapter as a function of tensors."""

import pytest
import torch
import torch.nn.functional as F

from runtime.core.messages import MESSAGES
from runtime.engines.imported.adapters import (
    TEXT_MASK,
    Adapter,
    Batch,
    ClipFrames,
    Denormalised,
    MaskedText,
    Names,
    PaddedIds,
    RepeatedText,
    RestoredRows,
    Timestep,
    Types,
    UnreadRows,
    adapters_from_json,
    adapters_to_json,
)

ALL: tuple[Adapter, ...] = (
    Timestep(2, True, (1, 2, 2), 2),
    RepeatedText(8),
    MaskedText(700),
    UnreadRows(1, 2),
    RestoredRows(1, 0),
    Denormalised((0.5, -1.0), (2.0, 3.0)),
    ClipFrames("bcfhw", 3, 4),
    PaddedIds(600),
    Types((("latents", "float16"),), (("velocity", "float16"),)),
    Names((("latents", "sample"),), (("velocity", "out"),)),
)


def noise(*shape: int) -> torch.Tensor:
    """Return the same noise every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_adapters_survive_json() -> None:
    assert adapters_from_json(adapters_to_json(ALL)) == ALL


@pytest.mark.parametrize("adapter", ALL, ids=lambda adapter: type(adapter).__name__)
def test_every_adapter_describes_itself(adapter: Adapter) -> None:
    assert adapter.describe().code in MESSAGES
    assert str(adapter.describe()).endswith(".")
    assert adapter.exact is not isinstance(adapter, RestoredRows)


def test_names_are_mapped_both_ways() -> None:
    names = Names((("latents", "sample"), ("timestep", "t")), (("velocity", "out"),))
    x, t = noise(2), noise(1)
    assert names.preprocess({"latents": x, "timestep": t}) == {"sample": x, "t": t}
    assert names.postprocess({"out": x}, {}) == {"velocity": x}


def test_dtypes_are_converted_both_ways() -> None:
    types = Types((("latents", "float16"), ("timestep", "int64")), (("velocity", "float16"),))
    given = types.preprocess({"latents": noise(3), "timestep": torch.tensor([700.0])})
    assert (given["latents"].dtype, given["timestep"].dtype) == (torch.float16, torch.int64)
    assert types.postprocess({"velocity": noise(3).half()}, given)["velocity"].dtype == torch.float32


@pytest.mark.parametrize(
    ("axes", "count", "shape"), [(0, 1, ()), (1, 1, (1,)), (1, 2, (2,)), (2, 1, (1, 12)), (2, 2, (2, 12))]
)
def test_shape_of_the_timestep(axes: int, count: int, shape: tuple[int, ...]) -> None:
    inputs = {"timestep": torch.tensor([699.9]), "latents": noise(1, 16, 3, 4, 4)}
    given = Timestep(axes, True, (1, 2, 2), count).preprocess(inputs)["timestep"]
    assert tuple(given.shape) == shape
    assert given.eq(700.0).all()
    assert Timestep(axes, False, (1, 2, 2), count).preprocess(inputs)["timestep"].ne(700.0).all()


def attention(query: torch.Tensor, text: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Attend to text without positions, as Wan's cross-attention does."""
    seen = None if mask is None else mask.bool()[:, None, :]
    return F.scaled_dot_product_attention(query, text, text, attn_mask=seen)


def test_repeated_text_does_not_change_attention_and_zeros_do() -> None:
    query, text = noise(1, 7, 16), noise(1, 12, 16)
    text[:, 5:] = 0.0
    once = attention(query, text)
    torch.testing.assert_close(attention(query, RepeatedText(8).preprocess({"text_embeds": text})["text_embeds"]), once)
    zeros = attention(query, F.pad(text, (0, 0, 0, 7 * 12)))
    assert (zeros - once).norm() / once.norm() > 0.1


def test_masked_text_does_not_change_attention() -> None:
    query, text = noise(1, 7, 16), noise(1, 12, 16)
    given = MaskedText(20).preprocess({"text_embeds": text})
    assert tuple(given["text_embeds"].shape) == (1, 20, 16)
    torch.testing.assert_close(attention(query, given["text_embeds"], given[TEXT_MASK]), attention(query, text))
    assert MaskedText(0).preprocess({"text_embeds": text})[TEXT_MASK].all()


def test_unread_rows_are_added_and_removed() -> None:
    inputs = {"latents": noise(1, 2, 3, 4, 6)}
    given = UnreadRows(1, 2).preprocess(inputs)["latents"]
    assert tuple(given.shape) == (1, 2, 3, 5, 8)
    assert given[..., :4, :6].equal(inputs["latents"])
    for height, width in ((4, 6), (5, 8)):
        velocity = noise(1, 2, 3, height, width)
        left = UnreadRows(1, 2).postprocess({"velocity": velocity}, inputs)["velocity"]
        assert left.equal(velocity[..., :4, :6])


@pytest.mark.parametrize(("rows", "columns"), [(1, 0), (0, 1), (1, 2)])
def test_restored_rows_repeat_the_clean_latents_and_not_the_noise(rows: int, columns: int) -> None:
    sigma, clean = 0.7, noise(1, 2, 3, 6, 8)
    # A picture with a flat edge is restored exactly.
    clean[..., -1 - rows :, :] = clean[..., -1 - rows, None, :]
    clean[..., -1 - columns :] = clean[..., -1 - columns, None]
    other = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    latents, velocity = (1 - sigma) * clean + sigma * other, other - clean
    inputs = {"latents": latents, "timestep": torch.tensor([1000 * sigma])}
    cut = velocity[..., : 6 - rows, : 8 - columns]
    restored = RestoredRows(rows, columns).postprocess({"velocity": cut}, inputs)["velocity"]
    torch.testing.assert_close(restored, velocity, atol=1e-4, rtol=1e-4)
    assert restored[..., : 6 - rows, : 8 - columns].equal(cut)


@pytest.mark.parametrize(("size", "count", "calls"), [(1, 1, 1), (1, 2, 2), (2, 1, 1), (2, 2, 1), (2, 3, 2)])
def test_batches_are_split_and_joined(size: int, count: int, calls: int) -> None:
    inputs = {"latents": noise(count, 4), "timestep": torch.tensor([700.0])}
    parts = Batch(size).split(inputs)
    assert [len(part["latents"]) for part in parts] == [size] * calls
    joined = Batch(size).join([{"velocity": part["latents"] * 2} for part in parts], count)
    assert joined["velocity"].equal(inputs["latents"] * 2)


def test_latents_are_denormalized() -> None:
    z = noise(1, 2, 1, 2, 2)
    given = Denormalised((0.5, -1.0), (2.0, 3.0)).preprocess({"z": z})["z"]
    torch.testing.assert_close(given[:, 1], z[:, 1] * 3.0 - 1.0)


@pytest.mark.parametrize("order", ["bcfhw", "bfchw", "bfhwc"])
@pytest.mark.parametrize(("latent_frames", "decoded", "frames"), [(2, 9, 5), (3, 12, 9), (3, 9, 9), (1, 9, 1)])
def test_frames_are_cut_to_the_clip(order: str, latent_frames: int, decoded: int, frames: int) -> None:
    adapter = ClipFrames(order, 3, 4)
    inputs = {"z": noise(1, 2, latent_frames, 2, 2)}
    assert adapter.preprocess(inputs)["z"].shape[2] == 3
    whole = noise(1, decoded, 4, 6, 3)
    given = whole.permute(["bfhwc".index(axis) for axis in order])
    left = adapter.postprocess({"frames": given}, inputs)["frames"]
    assert left.equal(whole[0, :frames].clamp(-1, 1))


def test_ids_are_padded_and_embeddings_zero_in_the_padding() -> None:
    mask = torch.tensor([[1, 1, 0, 0]])
    inputs = {"input_ids": torch.tensor([[5, 6, 0, 0]]), "attention_mask": mask}
    given = PaddedIds(6).preprocess(inputs)
    assert given["attention_mask"].tolist() == [[1, 1, 0, 0, 0, 0]]
    left = PaddedIds(6).postprocess({"embeds": noise(1, 6, 3)}, inputs)["embeds"]
    assert tuple(left.shape) == (1, 4, 3)
    assert not left[:, 2:].any()
    assert left[:, :2].all()
