"""Train the text encoder on captions only: small heads predict the attributes from its states.

    python -m tools.diorama.train_text --out weights --minutes 1.5

The heads are thrown away; the encoder is then frozen, so that both experts can train apart.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from tools.diorama import captions, nets, training, world
from tools.diorama.checkpoint import has_weights, load_weights, save_weights

LOG = logging.getLogger(__name__)
UNSAID = {"motion": 6, "backdrop": 6, "time": 4, "weather": 3}  # the class after the last
COUNTS = 4  # none, one, two, twins


def tokens(texts: list[str], tok: PreTrainedTokenizerFast, length: int = nets.TRAIN_TEXT_LENGTH) -> Tensor:
    """(B, length) int16 token numbers."""
    ids = tok(texts, padding="max_length", max_length=length, truncation=True, return_tensors="np").input_ids
    return torch.from_numpy(ids).to(torch.int16)


def embed(encoder: UMT5EncoderModel, ids: Tensor) -> Tensor:
    """(B, L, D) states with padding set to zero, as in WanPipeline."""
    mask = ids != nets.PAD
    states = encoder(ids, mask.long()).last_hidden_state
    return states * mask.unsqueeze(-1)


def labels(mentioned: captions.Facts) -> list[int]:
    """Classes of motion, backdrop, time, weather and count, then 12 colours by subject: -1 absent, 8 unsaid."""
    row = [
        names.index(value) if value else len(names)
        for names, value in (
            (world.MOTIONS, mentioned.motion), (world.BACKDROPS, mentioned.backdrop), (world.TIMES, mentioned.time),
            (world.WEATHERS, mentioned.weather),
        )
    ]  # fmt: skip
    seen = mentioned.subjects
    row.append(3 if len(seen) > 1 and seen[0] == seen[1] else len(seen))
    table = [-1] * (len(world.SUBJECTS) + 1)
    for subject, colour in seen:
        place = world.SUBJECTS.index(subject) if subject else len(world.SUBJECTS)
        table[place] = world.COLOURS.index(colour) if colour else len(world.COLOURS)
    return row + table


class Heads(nn.Module):
    """Learned queries that look over the states; each answers one question."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.kinds = [len(world.MOTIONS) + 1, len(world.BACKDROPS) + 1, len(world.TIMES) + 1,
                      len(world.WEATHERS) + 1, COUNTS]  # fmt: skip
        self.queries = nn.Parameter(torch.randn(len(self.kinds) + len(world.SUBJECTS) + 1, dim) * dim**-0.5)
        self.answers = nn.ModuleList(nn.Linear(dim, k) for k in self.kinds)
        self.colour = nn.Linear(dim, len(world.COLOURS) + 2)  # the last says that the subject is absent

    def forward(self, states: Tensor, mask: Tensor) -> tuple[list[Tensor], Tensor]:
        """Logits per plain attribute, and (B, subjects + 1, colours + 2)."""
        score = torch.einsum("qd,bld->bql", self.queries, states).masked_fill(~mask[:, None], -1e4)
        seen = score.softmax(-1) @ states
        plain = [head(seen[:, i]) for i, head in enumerate(self.answers)]
        return plain, self.colour(seen[:, len(self.kinds) :])


def batch(count: int, seed: int, tok: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """(B, L) tokens and (B, 5 + 13) labels of fresh captions of scenes that training may show."""
    rng = random.Random(seed)
    scenes = world.sample(count, seed, two_subjects=0.35)
    drawn = [captions.training_caption(captions.facts(scenes, i), rng) for i in range(count)]
    return tokens([t for t, _ in drawn], tok), torch.tensor([labels(s) for _, s in drawn])


def loss_of(encoder: UMT5EncoderModel, heads: Heads, ids: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the share of captions read without a single fault."""
    plain, colour = heads(embed(encoder, ids), ids != nets.PAD)
    table = torch.where(target[:, 5:] < 0, len(world.COLOURS) + 1, target[:, 5:])
    loss = F.cross_entropy(colour.flatten(0, 1), table.flatten()) * 4
    right = (colour.argmax(-1) == table).all(1)
    for i, logits in enumerate(plain):
        loss = loss + F.cross_entropy(logits, target[:, i])
        right &= logits.argmax(-1) == target[:, i]
    return loss, right.float().mean()


def main() -> None:
    """Train within the budget and save the encoder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--captions", type=int, default=60_000, help="made before training starts")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--rehearsal", action="store_true")
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()
    *_, device = training.start()
    torch.manual_seed(args.seed)
    sizes = nets.REHEARSAL if args.rehearsal else nets.TRUE
    encoder, tok = nets.text_encoder(sizes).to(device), nets.tokenizer()
    if has_weights(args.resume, "text"):
        load_weights(encoder, args.resume, "text")
    heads = Heads(sizes.text_dim).to(device)
    ids, target = (x.to(device) for x in batch(args.captions, args.seed, tok))
    test = tuple(x.to(device) for x in batch(2000, args.seed + 1, tok))
    both = nn.ModuleList([encoder, heads])
    parameters = list(both.parameters())
    optimiser = training.Muon(both.named_parameters(), args.lr, 0.01, skip=("shared", "embed", "relative", "1."))
    average = training.Average(encoder, 0.998)
    clock = training.Clock(args.minutes, device)
    report = time.monotonic()
    while clock.tick():
        pick = torch.randint(len(ids), (args.batch,), device=device)
        loss, right = loss_of(encoder, heads, ids[pick].long(), target[pick])
        loss.backward()
        training.average_gradients(parameters)
        optimiser.step(clock.rate())
        optimiser.zero_grad()
        average.update()
        if time.monotonic() - report > 15:
            report = time.monotonic()
            LOG.info("text: step %d, loss %.4f, %.1f%% whole", clock.steps, loss.detach(), 100 * right)
    average.store()
    with torch.no_grad():
        _, right = loss_of(encoder, heads, test[0].long(), test[1])
    LOG.info("text: %d steps, %.2f%% of fresh captions read without a fault", clock.steps, 100 * right)
    save_weights(encoder.state_dict(), args.out, "text")


if __name__ == "__main__":
    main()
