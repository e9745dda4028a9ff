"""Render a picture of 24 prompts with three frames of each clip by the shipped model.

    python -m tools.diorama.contact_sheet

Nothing is picked: the seed of each clip is its number in the list.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from tools.diorama import grade
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
SHOWN = (2, 16, 30)  # frames of 33
SCALE, COLUMNS, CAPTION = 0.7, 3, 15


def main() -> None:
    """Generate every clip with the model's defaults and lay out the sheet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("runtime/models/embedded/diorama"))
    parser.add_argument("--out", type=Path, default=Path("tools/diorama/contact_sheet.png"))
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipe, settings = grade.load(args.model, device)
    width, height = (round(settings[k] * SCALE) for k in ("width", "height"))
    rows = -(-len(PROMPTS) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (len(SHOWN) * width + 6), rows * (height + CAPTION + 3)), (250, 247, 240))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for number, prompt in enumerate(PROMPTS):
        clip = to_uint8(grade.generate(pipe, [prompt], number, settings, 1)[0].transpose(0, 1)).numpy()
        left, top = number % COLUMNS * (len(SHOWN) * width + 6), number // COLUMNS * (height + CAPTION + 3)
        draw.text((left + 2, top + 1), prompt, fill=(60, 56, 50), font=font)
        for place, frame in enumerate(SHOWN):
            picture = Image.fromarray(clip[frame]).resize((width, height), Image.Resampling.LANCZOS)
            sheet.paste(picture, (left + place * width, top + CAPTION))
        sheet.quantize(255, dither=Image.Dither.NONE).save(args.out, optimize=True)
        LOG.info("%d of %d: %s", number + 1, len(PROMPTS), prompt)


if __name__ == "__main__":
    main()
