"""Diorama's networks, at full and at test size, and passes of complete clips through the VAE.

These passes compute what ``AutoencoderKLWan.encode`` and ``decode`` compute chunk by chunk, without caches,
so that they train and compile well; tests hold them equal.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from tools.diorama import captions, lexicon
from tools.diorama.checkpoint import read_weights

TEXT_LENGTH = 512  # what WanPipeline pads prompt embeddings to
TRAIN_TEXT_LENGTH = 40  # no training caption is longer
PAD, END, UNK = 0, 1, 2


@dataclass(frozen=True)
class Sizes:
    """Widths and depths of all networks."""

    text_dim: int = 128
    text_layers: int = 4
    text_ff: int = 256
    vae_encoder: int = 16
    vae_decoder: int = 32
    vae_mult: tuple[int, ...] = (1, 2, 3, 3)
    vae_blocks: int = 1
    heads: int = 6
    head_dim: int = 32
    layers: int = 6
    ff: int = 544


TRUE = Sizes()
REHEARSAL = Sizes(32, 2, 64, 4, 4, (1, 2, 2, 2), 1, 2, 12, 2, 48)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer: lower case, punctuation dropped, words outside the vocabulary become ``<unk>``."""
    words = ["<pad>", "</s>", "<unk>", *captions.vocabulary()]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(),
         normalizers.Replace(Regex(r"[^\p{L}\p{N}]+"), " ")]
    )  # fmt: skip
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=TEXT_LENGTH
    )


def text_encoder(sizes: Sizes = TRUE) -> UMT5EncoderModel:
    """A small UMT5 encoder over the tokenizer's vocabulary."""
    vocab = len(captions.vocabulary()) + 3
    config = UMT5Config(
        vocab_size=vocab + (-vocab) % 8, d_model=sizes.text_dim, d_kv=32, d_ff=sizes.text_ff,
        num_layers=sizes.text_layers, num_heads=max(sizes.text_dim // 32, 1), dropout_rate=0.0, classifier_dropout=0.0,
        relative_attention_num_buckets=32, relative_attention_max_distance=64, feed_forward_proj="gated-gelu",
        pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=PAD, is_encoder_decoder=False, use_cache=False,
    )  # fmt: skip
    return UMT5EncoderModel(config)


def vae(sizes: Sizes = TRUE) -> AutoencoderKLWan:
    """The video autoencoder: 16 latent channels, 8x8 in space, 4x in time."""
    return AutoencoderKLWan(
        base_dim=sizes.vae_encoder, decoder_base_dim=sizes.vae_decoder, z_dim=16, dim_mult=list(sizes.vae_mult),
        num_res_blocks=sizes.vae_blocks, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 16, latents_std=[1.0] * 16,
    )  # fmt: skip


def expert(sizes: Sizes = TRUE) -> WanTransformer3DModel:
    """One denoising expert."""
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=sizes.heads, attention_head_dim=sizes.head_dim, in_channels=16,
        out_channels=16, text_dim=sizes.text_dim, freq_dim=128, ffn_dim=sizes.ff, num_layers=sizes.layers,
        cross_attn_norm=True, qk_norm="rms_norm_across_heads", eps=1e-6, rope_max_seq_len=64,
    )  # fmt: skip


def depth(state: dict[str, Tensor]) -> int:
    """The number of blocks in an expert's weights."""
    return 1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks."))


def deepen(state: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """An expert's weights with ``layers`` blocks that compute the same.

    The new blocks are spread evenly. Each is a copy of the block before it, with zeros where its attentions and its
    feed-forward network end.
    """
    old = depth(state)
    if layers < old:
        raise ValueError(f"the weights have {old} blocks; {layers} are too few")
    result = {k: v for k, v in state.items() if not k.startswith("blocks.")}
    sources = [place * old // layers for place in range(layers)]
    for place, source in enumerate(sources):
        copied = place > 0 and sources[place - 1] == source
        prefix = f"blocks.{source}."
        for key, value in state.items():
            if key.startswith(prefix):
                rest = key.removeprefix(prefix)
                ends = copied and rest.startswith(("attn1.to_out.0.", "attn2.to_out.0.", "ffn.net.2."))
                result[f"blocks.{place}.{rest}"] = torch.zeros_like(value) if ends else value.clone()
    return result


def load_expert(folder: Path, role: str, sizes: Sizes = TRUE, layers: int | None = None) -> WanTransformer3DModel:
    """The expert in ``folder``, a checkpoint or a model directory, deepened to ``layers`` if given."""
    state = read_weights(folder, role)
    if layers:
        state = deepen(state, layers)
    model = expert(replace(sizes, layers=depth(state)))
    model.load_state_dict(state)
    return model


def load_text(folder: Path, sizes: Sizes = TRUE) -> UMT5EncoderModel:
    """The text encoder in ``folder``; words added since get the embeddings of those that they are like."""
    state, model = read_weights(folder, "text"), text_encoder(sizes)
    rows = model.shared.num_embeddings
    have = len(state["shared.weight"])
    words = ["<pad>", "</s>", "<unk>", *captions.vocabulary()]
    if have < rows:
        wide = torch.zeros(rows, state["shared.weight"].shape[1])
        wide[:have] = state["shared.weight"]
        for word, like in lexicon.LIKE.items():
            wide[words.index(word)] = wide[words.index(like)]
        state |= {"shared.weight": wide, "encoder.embed_tokens.weight": wide}
    model.load_state_dict(state)
    return model


def _resample(layer: WanResample, x: Tensor) -> Tensor:
    if layer.mode == "upsample3d" and x.shape[2] > 1:
        first, rest = x[:, :, :1], x[:, :, 1:]
        batch, channels, frames, height, width = rest.shape
        rest = layer.time_conv(rest).reshape(batch, 2, channels, frames, height, width)
        rest = torch.stack((rest[:, 0], rest[:, 1]), 3).reshape(batch, channels, frames * 2, height, width)
        x = torch.cat([first, rest], 2)
    batch, channels, frames, height, width = x.shape
    flat = layer.resample(x.transpose(1, 2).reshape(batch * frames, channels, height, width))
    x = flat.reshape(batch, frames, *flat.shape[1:]).transpose(1, 2)
    if layer.mode == "downsample3d" and x.shape[2] > 1:
        x = torch.cat([x[:, :, :1], layer.time_conv(x)], 2)
    return x


def encode_clip(model: AutoencoderKLWan, clip: Tensor) -> tuple[Tensor, Tensor]:
    """(B, 3, 4n+1, H, W) in -1..1 to mean and log-variance, each (B, 16, n+1, H/8, W/8)."""
    net = model.encoder
    x = net.conv_in(clip)
    for layer in net.down_blocks:
        x = _resample(layer, x) if isinstance(layer, WanResample) else layer(x)
    x = net.conv_out(net.nonlinearity(net.norm_out(net.mid_block(x))))
    mean, logvar = model.quant_conv(x).chunk(2, 1)
    return mean, logvar.clamp(-30.0, 20.0)


def decode_clip(model: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """(B, 16, n+1, h, w) latents, not normalised, to (B, 3, 4n+1, 8h, 8w), not clamped."""
    net = model.decoder
    x = net.mid_block(net.conv_in(model.post_quant_conv(latents)))
    for block in net.up_blocks:
        for resnet in block.resnets:
            x = resnet(x)
        if block.upsamplers is not None:
            x = _resample(block.upsamplers[0], x)
    return net.conv_out(net.nonlinearity(net.norm_out(x)))


def statistics(model: AutoencoderKLWan) -> tuple[Tensor, Tensor]:
    """The latents' mean and standard deviation per channel, each (1, 16, 1, 1, 1), from the model's config."""
    device = next(model.parameters()).device
    mean = torch.tensor(model.config.latents_mean, device=device).view(1, -1, 1, 1, 1)
    return mean, torch.tensor(model.config.latents_std, device=device).view(1, -1, 1, 1, 1)


def write_json(path: Path, value: object) -> None:
    """``value`` as indented JSON with a last newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict:
    """The JSON object in ``path``."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_latents(folder: Path) -> dict:
    """Latents' "mean" and "std", and "factors" and "bias" of their fit to RGB, of a checkpoint or a shipped model."""
    if (folder / "latents.json").exists():
        return read_json(folder / "latents.json")
    config, sidecar = read_json(folder / "vae/config.json"), read_json(folder / "tandem.json")
    return {
        "mean": config["latents_mean"], "std": config["latents_std"], "factors": sidecar["latent_rgb_factors"],
        "bias": sidecar["latent_rgb_bias"],
    }  # fmt: skip
