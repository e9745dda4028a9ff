"""Render a picture of 24 prompts with three frames of each clip by the shipped model.

    python -m tools.diorama.contact_sheet
    python -m tools.diorama.contact_sheet --brief --out brief.png
    python -m tools.diorama.contact_sheet --images --out tools/diorama/contact_sheet_images.png

Nothing is picked: the seed of each clip is its number in the list. With ``--images`` the clips start from the first
frames of 16 scenes held out from training; the image is shown before three frames of the clip.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import WanPipeline
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from tools.diorama import grade, world
from tools.diorama.render import to_uint8

LOG = logging.getLogger(__name__)
PROMPTS = (
    "a red boat sails left on a calm sea at sunset",
    "snowy night in the city, a yellow car drives right",
    "a blue fish going round in circles",
    "two red balloons rise over the hills in the morning",
    "a green train chugs to the right through the desert by day",
    "a purple kite climbs above the sea at dawn",
    "the white cat bounces over the snowy mountains at night",
    "a pink butterfly flutters up among the clouds at sunset",
    "an orange bird flies left over the rooftops in the rain",
    "a yellow star sinks slowly in the night sky",
    "a red rocket takes off in the desert at night",
    "a blue ball hops up and down over the hills on a sunny day",
    "in the rain, a green boat sails right at sea",
    "a little orange cat walks left in the city at sunset",
    "a purple balloon drifts right over the mountains in the morning",
    "a white bird soars up in the clear sky by day",
    "a pink car drives left through the desert, snow is falling",
    "a red train rolls left over the snow at dusk",
    "a yellow fish swims right in the sea on a rainy evening",
    "two blue kites fly left over the dunes at noon",
    "a green butterfly circles over the city at night",
    "a pink star jumps up and down among the clouds at dawn",
    "a white rocket flies right above the ocean at night",
    "a blue train and a red bird go right over the hills by day",
)
# As people write, a subject with much left open and with all said.
BRIEF = (
    "a boat", "a purple boat sails over the hills",
    "a balloon", "a hot-air balloon above the city at sunset",
    "a white bird flies over the city in the snow", "an orange bird flies right over the sea at dawn",
    "a fish swims", "a green fish swims left in the lake on a rainy day",
    "a red car", "a white car drives left through the city at night",
    "a train in the desert", "a blue train chugs right over the hills by day in clear weather",
    "a flying kite", "a pink kite rises over the snowy hills in the morning",
    "a rocket", "a yellow rocket launches from the desert at night",
    "a ball", "a red ball bounces in the park in the afternoon",
    "a smiling star", "a yellow star sinks in the clear sky at night",
    "a butterfly in the garden", "a blue butterfly circles over the meadow by day",
    "a cat", "a purple cat walks on the hills at night",
)  # fmt: skip
SHOWN = (2, 16, 30)  # frames of 33
SCALE, COLUMNS, CAPTION = 0.7, 3, 15
IMAGES, IMAGE_COLUMNS, IMAGE_SEED = 16, 2, 77


def strip(clip: Tensor) -> list[np.ndarray]:
    """The frames shown of (3, T, H, W) in -1..1."""
    frames = to_uint8(clip.transpose(0, 1)).numpy()
    return [frames[min(k, len(frames) - 1)] for k in SHOWN]


def from_prompts(pipe: WanPipeline, settings: dict, prompts: Sequence[str]) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Each prompt with three frames."""
    for number, prompt in enumerate(prompts):
        yield prompt, strip(grade.generate(pipe, [prompt], number, settings, 1)[0])


def from_images(pipe: WanPipeline, settings: dict, device: torch.device) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Each short prompt with its image and three frames."""
    scenes = world.sample(IMAGES, IMAGE_SEED, keep="held_out", two_subjects=0.2)
    pictures = grade.images(scenes, settings, device)
    moving, settings = grade.image_setting(pipe, settings, "default")
    for number in range(IMAGES):
        prompt = grade.short_prompt(scenes, number)
        clip = grade.generate(moving, [prompt], number, settings, 1, pictures[number : number + 1])[0]
        yield prompt, [to_uint8(pictures[number]).numpy(), *strip(clip)]


def main() -> None:
    """Generate every clip with the model's defaults and lay out the sheet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("runtime/models/embedded/diorama"))
    parser.add_argument("--out", type=Path, default=Path("tools/diorama/contact_sheet.png"))
    parser.add_argument("--brief", action="store_true", help="prompts as people write, two of each subject")
    parser.add_argument("--steps", type=int, default=None, help="instead of the model's default")
    parser.add_argument("--guidance", type=float, default=None, help="of both experts, instead of the model's default")
    parser.add_argument("--images", action="store_true", help="16 clips that start from images")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipe, settings = grade.load(args.model, device)
    settings |= {"steps": args.steps or settings["steps"]}
    if args.guidance:
        scales = ("guidance_scale", "guidance_scale_2")
        settings |= {prefix + name: args.guidance for prefix in ("", "image_") for name in scales}
    prompts = BRIEF if args.brief else PROMPTS
    width, height = (round(settings[k] * SCALE) for k in ("width", "height"))
    count, columns, shown = (
        (IMAGES, IMAGE_COLUMNS, 1 + len(SHOWN)) if args.images else (len(prompts), COLUMNS, len(SHOWN))
    )
    rows = -(-count // columns)
    sheet = Image.new("RGB", (columns * (shown * width + 6), rows * (height + CAPTION + 3)), (250, 247, 240))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    made = from_images(pipe, settings, device) if args.images else from_prompts(pipe, settings, prompts)
    for number, (prompt, frames) in enumerate(made):
        left, top = number % columns * (shown * width + 6), number // columns * (height + CAPTION + 3)
        draw.text((left + 2, top + 1), prompt, fill=(60, 56, 50), font=font)
        for place, frame in enumerate(frames):
            picture = Image.fromarray(frame).resize((width, height), Image.Resampling.LANCZOS)
            sheet.paste(picture, (left + place * width, top + CAPTION))
        LOG.info("%d of %d: %s", number + 1, count, prompt)
    sheet.quantize(255, dither=Image.Dither.NONE).save(args.out, optimize=True)


if __name__ == "__main__":
    main()
