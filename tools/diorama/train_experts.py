"""Train the two denoising experts by flow matching on latents of rendered clips, the VAE and text encoder frozen.

    torchrun --nproc-per-node 4 -m tools.diorama.train_experts --weights weights --out weights --minutes 6 \
        --roles high high low low

Every rank renders and encodes its share of the clips, all ranks get all of them, then each trains its role's expert
with the other ranks of that role.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor
from transformers import UMT5EncoderModel

from tools.diorama import captions, motion, nets, training, world
from tools.diorama.checkpoint import has_weights, load_weights, save_weights
from tools.diorama.render import Renderer
from tools.diorama.train_text import embed, tokens

LOG = logging.getLogger(__name__)
# Size, frames, and share of the training steps.
BUCKETS: tuple[tuple[tuple[int, int], int, float], ...] = (
    ((192, 112), 33, 0.64), ((112, 192), 33, 0.10), ((128, 128), 33, 0.08), ((160, 96), 33, 0.06),
    ((192, 112), 17, 0.06), ((192, 112), 49, 0.06),
)  # fmt: skip
RANGES = {"high": (0.855, 1.0), "low": (0.0, 0.895)}  # of sigma; the experts change over at 0.875
SHIFT = 5.0  # as the shipped sampler's: training visits noise levels as often as sampling does
CAPTIONS = 4  # per clip
IMAGE_CAPTIONS = 3  # further ones per clip, short, for clips that start from an image
HARD = ("bird", "train", "ball", "butterfly", "car", "cat")
HARD_MOTIONS = ("bouncing", "circling")
MIDWAY = 0.6  # of clips that start from an image: entered at any time, not only where a clip from text begins
SAVE_EVERY = 120  # seconds


class PaddedTextAttention:
    """Cross-attention over a short text as if it were zero-padded to 512 tokens.

    The last token given is always padding; it represents all missing ones, by a bias of log(how many).
    """

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Tensor | None = None,
    ) -> Tensor:
        assert encoder_hidden_states is not None
        length = encoder_hidden_states.shape[1]
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        key = attn.norm_k(attn.to_k(encoder_hidden_states)).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        value = attn.to_v(encoder_hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        bias = torch.zeros(length, device=query.device, dtype=value.dtype)
        bias[-1] = math.log(nets.TEXT_LENGTH - length + 1)
        mask = bias.expand(query.shape[0], 1, query.shape[2], length)
        seen = F.scaled_dot_product_attention(query.to(value.dtype), key.to(value.dtype), value, attn_mask=mask)
        return attn.to_out[0](seen.transpose(1, 2).flatten(2))


def shorten_text(model: WanTransformer3DModel) -> None:
    """Let ``model`` take texts of TRAIN_TEXT_LENGTH instead of 512 with the same result."""
    for block in model.blocks:
        block.attn2.set_processor(PaddedTextAttention())


def sharpen_text(model: WanTransformer3DModel, gain: float) -> None:
    """Raise the mean gain of cross-attention's norms, of queries and of keys, to ``gain`` where it is lower.

    With gains of 1 no logit exceeds sqrt(head size) = 5.7, while the padding, about 490 equal tokens, has a head start
    of log(490) = 6.2: 85 % of the attention rested on it, and words could hardly be distinguished.
    """
    with torch.no_grad():
        for block in model.blocks:
            for norm in (block.attn2.norm_q, block.attn2.norm_k):
                norm.weight.mul_((gain / norm.weight.mean()).clamp(min=1))


@dataclass
class Cache:
    """Normalised latents (N, 16, t, h, w) in bfloat16, the encoder's states of their captions (N, captions, L, D),
    where subjects are (N, t, h, w), 0 or 1, which clips were entered midway, (N,) 0 or 1, and the states of an empty
    caption, (L, D)."""

    latents: Tensor
    states: Tensor
    inside: Tensor
    midway: Tensor
    empty: Tensor

    def __post_init__(self) -> None:
        self.midway_share = float(self.midway.float().mean())


@dataclass(frozen=True)
class Aim:
    """What the loss asks of the expert of ``role``.

    Errors count ``weight`` times where subjects are, and ``first`` times in the first latent frame. A share of
    ``images`` clips starts from an image, in the way of Wan2.2-TI2V: the first latent frame is clean, the timestep of
    its tokens is 0, and its error does not count. All clips entered midway are among them.

    With ``guidance`` or ``image_guidance`` above 1 the expert learns what guidance would predict, by itself (model
    guidance, arXiv 2502.12154): its target moves away from its own prediction without the caption, and in clips from an
    image from that without the image, where the first latent frame is as noisy as the others. A value of w acts like
    guidance of 1 / (2 - w) at sampling. Clips from an image take ``image_guidance`` if above 1, else ``guidance``.
    """

    role: str
    weight: float = 1.0
    images: float = 0.0
    first: float = 1.0
    guidance: float = 1.0
    image_guidance: float = 1.0


def _gather(share: Tensor) -> Tensor:
    # Encoded latents come channels-last; a collective sends memory as it lies, so put it in order first.
    share = share.contiguous()
    if not dist.is_initialized():
        return share
    whole = share.new_empty(dist.get_world_size() * share.shape[0], *share.shape[1:])
    raw = share.dtype == torch.int16  # which NCCL does not know
    dist.all_gather_into_tensor(whole.view(torch.uint8) if raw else whole, share.view(torch.uint8) if raw else share)
    return whole


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


@torch.no_grad()
def states_of(encoder: UMT5EncoderModel, ids: Tensor) -> Tensor:
    """The encoder's states of all captions (N, captions, L), in bfloat16."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        parts = [embed(encoder, part.long()).to(torch.bfloat16) for part in ids.flatten(0, 1).split(4096)]
    return torch.cat(parts).unflatten(0, ids.shape[:2])


@dataclass(frozen=True)
class Lessons:
    """What the clips of a cache show: shares with two subjects, entered midway, drawn to show a subject of HARD or a
    motion of HARD_MOTIONS by turns, and ``usual`` (see ``world.make_usual``)."""

    two_subjects: float = 0.5
    midway: float = 0.0
    hard: float = 0.0
    usual: float = 0.0


def lessons(count: int, seed: int, wanted: Lessons) -> world.Scenes:
    """Scenes to train on, those entered midway first."""
    two_subjects, usual = wanted.two_subjects, wanted.usual
    extra = round(wanted.hard * count)
    subjects = torch.tensor([world.SUBJECTS.index(name) for name in HARD])
    motions = torch.tensor([world.MOTIONS.index(name) for name in HARD_MOTIONS])
    more = world.sample(6 * extra, seed + 50_000_000, two_subjects=two_subjects, usual=usual)
    hard = torch.isin(more.subject, subjects).any(1)
    hard[1::2] = torch.isin(more.motion, motions)[1::2]
    more = more[hard][slice(0, extra)]
    scenes = world.sample(count - len(more), seed, two_subjects=two_subjects, usual=usual)
    scenes = world.join([scenes, more])
    scenes = scenes[torch.randperm(count, generator=torch.Generator().manual_seed(seed))]
    entered = round(wanted.midway * count)
    return world.join([world.midway(scenes[slice(0, entered)], seed), scenes[slice(entered, count)]])


def wordings(known: captions.Facts, rng: random.Random) -> list[str]:
    """All captions of one clip, those for starting from an image last."""
    full = [captions.training_caption(known, rng)[0] for _ in range(CAPTIONS)]
    return full + [captions.image_caption(known, rng) for _ in range(IMAGE_CAPTIONS)]


def save_caches(caches: list[Cache], path: Path) -> None:
    """Write ``caches`` for other processes on this machine."""
    torch.save([{f.name: getattr(c, f.name).cpu() for f in fields(c)} for c in caches], path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def load_caches(path: Path, device: torch.device) -> list[Cache]:
    """Read what ``save_caches`` wrote."""
    return [Cache(**{k: v.to(device) for k, v in c.items()}) for c in torch.load(path, mmap=True)]


@torch.no_grad()
def build_cache(
    weights: Path,
    sizes: nets.Sizes,
    clips: int,
    seed: int,
    device: torch.device,
    chunk: int,
    seconds: float,
    wanted: Lessons,
    *,
    compiled: bool,
) -> list[Cache]:
    """Render, encode and caption up to ``clips`` per rank, spread over the buckets, in about ``seconds``."""
    encoder = nets.load_text(weights, sizes).to(device).eval()
    model = nets.vae(sizes).to(device)
    load_weights(model, weights, "vae")
    model.eval()
    measured = nets.read_latents(weights)
    mean, std = (torch.tensor(measured[k], device=device).view(1, -1, 1, 1, 1) for k in ("mean", "std"))
    tok = nets.tokenizer()
    encode = torch.compile(nets.encode_clip, dynamic=False) if compiled else nets.encode_clip
    rng = random.Random(seed)
    caches = []

    def make(renderer: Renderer, scenes: world.Scenes, run: Callable) -> Tensor:
        clip = renderer(scenes).transpose(1, 2)
        with torch.autocast(device.type, torch.bfloat16):
            latents = run(model, clip.to(torch.bfloat16))[0]
        return ((latents.float() - mean) / std).to(torch.bfloat16)

    renderer = Renderer(*BUCKETS[0][:2], device)
    for trial in range(5):
        if trial == 2:
            began = _now(device)
        make(renderer, world.sample(chunk, trial), encode)
    each = torch.tensor([(_now(device) - began) / (3 * chunk)], device=device)
    if dist.is_initialized():
        dist.all_reduce(each, op=dist.ReduceOp.MAX)
    LOG.info("%.2f ms to render and encode a clip", 1000 * float(each))
    clips = min(clips, int(seconds / float(each)))
    for number, (size, frames, share) in enumerate(BUCKETS):
        count = max(round(clips * share / chunk), 1) * chunk
        scenes = lessons(count, seed * 101 + number, wanted)
        renderer = Renderer(size, frames, device)
        parts = []
        # Odd sizes are few: compiling for them would take longer than it saves.
        run = encode if number < 2 else nets.encode_clip
        for start in range(0, count, chunk):
            parts.append(make(renderer, scenes[slice(start, start + chunk)], run))
        texts = [text for i in range(count) for text in wordings(captions.facts(scenes, i), rng)]
        ids = tokens(texts, tok).view(count, CAPTIONS + IMAGE_CAPTIONS, -1).to(device)
        parts_inside = [
            motion.footprint(scenes[slice(i, i + chunk)], size, frames).to(torch.uint8) for i in range(0, count, chunk)
        ]
        latents, ids, inside, late = (
            _gather(x)
            for x in (
                torch.cat(parts), ids, torch.cat(parts_inside).to(device),
                (torch.arange(count, device=device) < round(wanted.midway * count)).to(torch.uint8),
            )
        )  # fmt: skip
        empty = states_of(encoder, tokens([""], tok).to(device)[None])[0, 0]
        caches.append(Cache(latents, states_of(encoder, ids), inside, late, empty))
        first = count * (dist.get_rank() if dist.is_initialized() else 0)
        again = make(renderer, scenes[slice(0, 2)], nets.encode_clip).float()
        off = (caches[-1].latents[first : first + 2].float() - again).abs().mean().item()
        if off > 0.1:
            raise RuntimeError(f"cached latents of {size} differ from encoding again by {off:.3f}")
    return caches


def draw_sigma(count: int, role: str, device: torch.device) -> Tensor:
    """(count,) noise levels in the role's range, as dense as a schedule with SHIFT visits them."""
    low, high = RANGES[role]
    # The schedule is sigma = SHIFT u / (1 + (SHIFT - 1) u); its inverse gives the range of u.
    first, last = (s / (SHIFT - (SHIFT - 1) * s) for s in (low, high))
    u = first + (last - first) * ((torch.rand(count, device=device) + torch.arange(count, device=device)) / count)
    return SHIFT * u / (1 + (SHIFT - 1) * u)


def guided_target(
    model: WanTransformer3DModel, cache: Cache, aim: Aim, clips: tuple[Tensor, ...], guess: Tensor
) -> Tensor:
    """How far guidance moves the target of each clip, like ``guess``; ``clips`` has clean latents, noise, levels, which
    start from an image, and the states of their captions."""
    clean, noise, level, from_image, text = clips
    sigma = level[:, :, -1:, :1, :1]
    image_scale = aim.image_guidance if aim.image_guidance > 1 else aim.guidance
    shown = sigma.expand_as(level) if aim.image_guidance > 1 else level
    if aim.guidance > 1:
        text = cache.empty.expand_as(text)
    times = 1000 * shown[:, 0, :, ::2, ::2].flatten(1) if aim.images else 1000 * sigma.flatten()
    with torch.no_grad(), torch.autocast(clean.device.type, torch.bfloat16):
        blind = model((1 - shown) * clean + shown * noise, times, text, return_dict=False)[0]
    scale = torch.where(from_image, image_scale, aim.guidance).view(-1, 1, 1, 1, 1)
    return (scale - 1) * (guess.detach() - blind).float()


def loss_of(model: WanTransformer3DModel, cache: Cache, count: int, aim: Aim) -> tuple[Tensor, Tensor]:
    """The flow matching loss on ``count`` random clips of ``cache``, and the plain errors where subjects are and
    elsewhere, (2,)."""
    device = cache.latents.device
    pick = torch.randint(len(cache.latents), (count,), device=device)
    clean = cache.latents[pick].float()
    midway = cache.midway[pick] > 0
    rest = (aim.images - cache.midway_share) / max(1 - cache.midway_share, 1e-6)
    from_image = midway | (torch.rand(count, device=device) < rest)
    wording = torch.rand(count, device=device) * torch.where(from_image, CAPTIONS + IMAGE_CAPTIONS, CAPTIONS)
    text = cache.states[pick, wording.long()]
    inside = cache.inside[pick].float()
    sigma = draw_sigma(count, aim.role, device)
    noise = torch.randn_like(clean)
    level = sigma.view(-1, 1, 1, 1, 1).expand(-1, 1, *clean.shape[2:]).clone()
    level[from_image, :, 0] = 0
    timestep = 1000 * level[:, 0, :, ::2, ::2].flatten(1) if aim.images else 1000 * sigma
    with torch.autocast(device.type, torch.bfloat16):
        guess = model((1 - level) * clean + level * noise, timestep, text, return_dict=False)[0]
    target = noise - clean
    if aim.guidance > 1 or (aim.image_guidance > 1 and aim.images):
        target = target + guided_target(model, cache, aim, (clean, noise, level, from_image, text), guess)
    error = (guess.float() - target).square().mean(1)
    counted = (level[:, 0] > 0).float()
    counted[:, 0] *= aim.first
    error, inside, total = error * counted, inside * counted, counted.sum()
    share, here, there = inside.sum() / total, (error * inside).sum() / total, (error * (1 - inside)).sum() / total
    # Divided by the usual weight, so that the loss keeps its size.
    loss = (aim.weight * here + there) / (1 + (aim.weight - 1) * share)
    return loss, torch.stack([here / share.clamp(min=1e-6), there / (1 - share).clamp(min=1e-6)]).detach()


def join_role(roles: list[str], rank: int, world_size: int) -> tuple[str, dist.ProcessGroup | None, int]:
    """This rank's role, the group of ranks that share it, and the first of them."""
    role = roles[rank]
    logging.getLogger().setLevel(logging.INFO if rank == roles.index(role) else logging.WARNING)
    ranks = {r: [i for i in range(world_size) if roles[i] == r] for r in RANGES}
    groups = {r: dist.new_group(members) for r, members in ranks.items() if members} if world_size > 1 else {}
    return role, groups.get(role), ranks[role][0]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True, help="holds vae and text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=6.0, help="in all, the cache and compiling included")
    parser.add_argument("--clips", type=int, default=20_000, help="per rank")
    parser.add_argument("--cache-seconds", type=float, default=70.0)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--roles", nargs="+", default=["high", "high", "low", "low"], help="one per rank")
    parser.add_argument("--rates", type=float, nargs=2, default=(1.0, 0.0), help="share of --lr at start and at end")
    parser.add_argument("--average", type=float, default=0.999, help="decay of the weights' moving average")
    parser.add_argument("--subject-weight", type=float, default=4.0, help="of the loss where subjects are")
    parser.add_argument("--two-subjects", type=float, default=0.5, help="share of clips")
    parser.add_argument("--images", type=float, default=0.0, help="share of clips that start from an image")
    parser.add_argument("--hard", type=float, default=0.0, help="share of clips with hard subjects or motions")
    parser.add_argument("--first", type=float, default=1.0, help="weight of the first latent frame of other clips")
    parser.add_argument("--guidance", type=float, default=1.0, help="towards the caption, to be learnt; see Aim")
    parser.add_argument("--image-guidance", type=float, default=1.0, help="towards the image, to be learnt")
    parser.add_argument("--usual", type=float, default=0.0, help="share of scenes as a person would draw them")
    parser.add_argument("--layers", type=int, default=None, help="number of blocks; deepens a resumed expert")
    parser.add_argument("--cache", type=Path, default=None, help="file with the encoded clips, made if missing")
    parser.add_argument("--cache-only", action="store_true", help="end after writing the cache")
    parser.add_argument("--sharpen", type=float, default=0.0, help="least gain of cross-attention at the start")
    parser.add_argument("--adamw", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--rehearsal", action="store_true")
    parser.add_argument("--seed", type=int, default=5)
    return parser.parse_args()


def encoded_clips(args: argparse.Namespace, sizes: nets.Sizes, rank: int, device: torch.device) -> list[Cache]:
    """The cache of ``args.cache`` if it exists, else a new one, written there."""
    if args.cache and args.cache.exists():
        return load_caches(args.cache, device)
    caches = build_cache(
        args.weights, sizes, args.clips, args.seed * 64 + rank, device, args.chunk, args.cache_seconds,
        Lessons(args.two_subjects, MIDWAY * args.images, args.hard, args.usual), compiled=not args.eager,
    )  # fmt: skip
    if args.cache and rank == 0:
        save_caches(caches, args.cache)
    return caches


def open_expert(args: argparse.Namespace, role: str, sizes: nets.Sizes) -> WanTransformer3DModel:
    """The expert to train: that of ``args.resume`` if it has one, else a new one."""
    resume = has_weights(args.resume, role)
    new = replace(sizes, layers=args.layers or sizes.layers)
    model = nets.load_expert(args.resume, role, sizes, args.layers) if resume else nets.expert(new)
    sharpen_text(model, args.sharpen)
    shorten_text(model)
    if not args.eager:
        model.compile_repeated_blocks(fullgraph=True)
    return model


def main() -> None:
    """Build the cache, train within the budget, save this role's averaged weights."""
    args = arguments()
    began = time.monotonic()
    rank, world_size, device = training.start()
    role, group, lead = join_role(args.roles, rank, world_size)
    sizes = nets.REHEARSAL if args.rehearsal else nets.TRUE

    caches = encoded_clips(args, sizes, rank, device)
    LOG.info("%s: %d clips in %.0f s", role, sum(len(c.latents) for c in caches), time.monotonic() - began)

    if args.cache_only:
        return
    torch.manual_seed(args.seed)
    model = open_expert(args, role, sizes).to(device)
    aim = Aim(role, args.subject_weight, args.images, args.first, args.guidance, args.image_guidance)
    parameters = list(model.parameters())
    optimiser = training.Muon(
        model.named_parameters(), args.lr, 0.01, plain=args.adamw,
        skip=("patch_embedding", "condition_embedder", "proj_out", "scale_shift"),
    )  # fmt: skip
    average = training.Average(model, args.average)
    torch.manual_seed(args.seed * 1000 + rank)
    shares = torch.tensor([b[2] for b in BUCKETS])
    order = torch.Generator().manual_seed(args.seed)  # the same bucket on every rank in each step
    clock = training.Clock(args.minutes - (time.monotonic() - began) / 60, device, group, lead)
    report, losses = time.monotonic(), []
    saved = report
    while clock.tick():
        # Every size once at the start, so that compiling is over early.
        first = clock.steps <= len(BUCKETS)
        bucket = len(BUCKETS) - clock.steps if first else int(shares.multinomial(1, generator=order))
        loss, errors = loss_of(model, caches[bucket], args.batch, aim)
        loss.backward()
        training.average_gradients(parameters, group)
        optimiser.step(clock.rate(100, *args.rates))
        optimiser.zero_grad()
        average.update()
        losses.append(errors)
        if time.monotonic() - report > 15:
            report = time.monotonic()
            reported = torch.stack(losses)
            here, there = reported.nanmean(0).tolist()
            LOG.info(
                "%s: step %d, %.0f%%, error %.4f on subjects, %.4f elsewhere, %d steps skipped",
                role, clock.steps, 100 * clock.progress, here, there, int(reported.isnan().any(1).sum()),
            )  # fmt: skip
            losses = []
        if rank == lead and time.monotonic() - saved > SAVE_EVERY:
            saved = time.monotonic()
            save_weights(average.state(model), args.out, role)
    LOG.info(
        "%s: %d steps, waited for the GPU %.0f s, %.0f s in all",
        role, clock.steps, clock.waited, time.monotonic() - began,
    )  # fmt: skip
    if rank == lead:
        save_weights(average.state(model), args.out, role)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
