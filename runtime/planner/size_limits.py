"""Which sizes and lengths a model makes, and those that it was made for. Pure."""

from collections.abc import Mapping

from runtime.core.errors import InvalidRequestError
from runtime.core.request import MAX_FRAMES, MAX_SIDE, label
from runtime.models.spec import ModelSpec


def check(spec: ModelSpec, width: int, height: int, frames: int) -> None:
    """Check that a model can make clips of a size and length.

    Raises:
        InvalidRequestError: if it cannot, with the nearest that it can.
    """
    _check_positions(spec, {"frames": frames, "height": height, "width": width})
    for field, value, stride in (("width", width, spec.strides[0]), ("height", height, spec.strides[1])):
        _check_stride(spec, field, value, stride)
    _check_frames(spec, frames)


def warnings(spec: ModelSpec, width: int, height: int, frames: int) -> list[str]:
    """Return what there is to say of a size and length that the model can make."""
    said = [] if spec.here else [f"The weights of {spec.title} are not here: this is what would run."]
    if (width, height) not in spec.sizes:
        sizes = ", ".join(f"{w}x{h}" for w, h in spec.sizes)
        said.append(f"{spec.title} was not made for {width}x{height}: expect less quality. Its sizes: {sizes}.")
    if frames > max(spec.frame_counts):
        said.append(
            f"{spec.title} was made for at most {max(spec.frame_counts)} frames: expect less quality with {frames}."
        )
    return said


def nearest(value: int, stride: int, offset: int, low: int, high: int) -> list[int]:
    """Return the one or two numbers of the form stride·k + offset, within low..high, that are nearest to `value`."""
    below = (min(max(value, low), high) - offset) // stride * stride + offset
    return [n for n in (below, below + stride) if low <= n <= high and n > 0]


def _check_stride(spec: ModelSpec, field: str, value: int, stride: int) -> None:
    if value % stride:
        fitting = " or ".join(str(n) for n in nearest(value, stride, 0, stride, MAX_SIDE))
        raise InvalidRequestError(
            field, f"{label(field)} is {value}; {spec.title} makes multiples of {stride}.", f"Take {fitting}."
        )


def _check_frames(spec: ModelSpec, frames: int) -> None:
    stride = spec.vae.scale_factor_temporal
    if frames % stride != 1:
        fitting = " or ".join(str(n) for n in nearest(frames, stride, 1, 1, MAX_FRAMES))
        raise InvalidRequestError(
            "frames", f"frames is {frames}; {spec.title} makes {stride}n+1 of them.", f"Take {fitting}."
        )


def _check_positions(spec: ModelSpec, asked: Mapping[str, int]) -> None:
    """Check that the transformer has positions for a clip of these frames, height and width."""
    positions = [spec.transformer.rope_max_seq_len * patch for patch in spec.transformer.patch_size]
    scale = spec.vae.scale_factor_spatial
    most = {
        "frames": (positions[0] - 1) * spec.vae.scale_factor_temporal + 1,
        "height": positions[1] * scale,
        "width": positions[2] * scale,
    }
    for field, value in asked.items():
        if value > most[field]:
            raise InvalidRequestError(
                field, f"{label(field)} is {value}; {spec.title} makes at most {most[field]}.", f"Take {most[field]}."
            )
