"""Build tiny models of each architecture with random weights, in diffusers' format, in about a second."""

from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import (
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    UniPCMultistepScheduler,
    WanAnimatePipeline,
    WanAnimateTransformer3DModel,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder, LTX2VocoderWithBWE
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
    UMT5Config,
    UMT5EncoderModel,
)

# Tests read what commands print.
transformers.utils.logging.disable_progress_bar()

WORDS = [
    "a",
    "red",
    "blue",
    "boat",
    "ball",
    "on",
    "the",
    "sea",
    "sails",
    "left",
    "rolls",
    "right",
    "calm",
    "at",
    "night",
]
ARCHITECTURES = ("wan2.1", "wan2.2-a14b", "wan2.2-ti2v-5b")
# Those whose VAEs differ: Wan2.2-A14B has the VAE of Wan2.1.
VAES = ("wan2.1", "wan2.2-ti2v-5b")
# Those that a job treats differently: in a job, Wan2.1 is Wan2.2-A14B with one expert.
IN_JOBS = ("wan2.2-a14b", "wan2.2-ti2v-5b")
# With one block in each transformer and half of the VAE's levels: engines are built in half the time.
SHALLOW = "wan2.2-a14b-shallow"
SHALLOW_FLF2V = "wan2.1-flf2v-shallow"
SHALLOW_TI2V = "wan2.2-ti2v-5b-shallow"
# That are steered by a control video.
VACE_ARCHITECTURES = ("wan2.1-vace", "wan2.2-vace")
# That animates a character.
ANIMATE = "wan2.2-animate"
# That make no video without an image.
IMAGE_ARCHITECTURES = ("wan2.2-i2v-a14b", "wan2.1-i2v", "wan2.1-flf2v")

# The second has no guidance embedding, so that guidance takes a second pass.
HUNYUAN_ARCHITECTURES = ("hunyuan-video", "hunyuan-video-cfg")


LTX2_ARCHITECTURES = ("ltx-2", "ltx-2.3")
# That make videos in two stages.
LTX2_DISTILLED = ("ltx-2-distilled", "ltx-2.3-distilled")
_LTX2_STRIDES = ("spatial", "temporal", "spatiotemporal", "spatiotemporal")


def build(architecture: str, directory: Path, seed: int = 0) -> Path:
    """Save a tiny random model of one of the architectures in this module into `directory` and return it."""
    torch.manual_seed(seed)
    if architecture in (*LTX2_ARCHITECTURES, *LTX2_DISTILLED):
        pipeline = ltx2_pipeline("2.3" if architecture.startswith("ltx-2.3") else "2.0")
        if architecture in LTX2_DISTILLED:
            pipeline.scheduler = FlowMatchEulerDiscreteScheduler()
            # The first version enlarges by a rational factor.
            later = architecture == LTX2_DISTILLED[1]
            upsampler = LTX2LatentUpsamplerModel(
                in_channels=16, mid_channels=32, num_blocks_per_stage=1, use_rational_resampler=not later
            )
            upsampler.save_pretrained(directory / "latent_upsampler")
        pipeline.save_pretrained(directory)
        return directory
    if architecture in HUNYUAN_ARCHITECTURES:
        hunyuan_pipeline(guidance_embeds=architecture == "hunyuan-video").save_pretrained(directory)
        return directory
    if architecture in VACE_ARCHITECTURES:
        _vace_pipeline(two_experts=architecture == "wan2.2-vace").save_pretrained(directory)
        return directory
    if architecture == ANIMATE:
        _animate_pipeline().save_pretrained(directory)
        return directory
    shallow = architecture in {SHALLOW, SHALLOW_FLF2V, SHALLOW_TI2V}
    architecture = architecture.removesuffix("-shallow")
    if architecture in IMAGE_ARCHITECTURES:
        _image_pipeline(architecture, shallow=shallow).save_pretrained(directory)
        return directory
    large_vae = architecture == "wan2.2-ti2v-5b"
    two_experts = architecture == "wan2.2-a14b"
    layers = 1 if shallow else 2
    pipeline = WanPipeline(
        tokenizer=tokenizer(),
        text_encoder=_text_encoder(),
        vae=_vae_ti2v(shallow=shallow) if large_vae else _shallow_vae() if shallow else _vae(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
        transformer=_transformer(48 if large_vae else 16, num_layers=layers),
        transformer_2=_transformer(16, num_layers=layers) if two_experts else None,
        boundary_ratio=0.875 if two_experts else None,
        expand_timesteps=large_vae,
    )
    pipeline.save_pretrained(directory)
    return directory


def _image_pipeline(architecture: str, *, shallow: bool) -> WanImageToVideoPipeline:
    two_experts, clip = architecture == "wan2.2-i2v-a14b", architecture != "wan2.2-i2v-a14b"
    vae = _shallow_vae() if shallow else _vae()
    # Those of the noise, of the image, and of the mask: one for each frame that a latent frame holds.
    channels = 2 * 16 + vae.config.scale_factor_temporal
    more = {"num_layers": 1} if shallow else {}
    more |= {"image_dim": 24, "added_kv_proj_dim": 24} if clip else {}
    more |= {"pos_embed_seq_len": 2 * 5} if architecture == "wan2.1-flf2v" else {}
    return WanImageToVideoPipeline(
        tokenizer=tokenizer(),
        text_encoder=_text_encoder(),
        image_encoder=_image_encoder() if clip else None,
        image_processor=CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
        if clip
        else None,
        vae=vae,
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
        transformer=_transformer(channels, out_channels=16, **more),
        transformer_2=_transformer(channels, out_channels=16, **more) if two_experts else None,
        boundary_ratio=0.9 if two_experts else None,
    )


def _vace_pipeline(*, two_experts: bool) -> WanVACEPipeline:
    return WanVACEPipeline(
        tokenizer=tokenizer(),
        text_encoder=_text_encoder(),
        vae=_vae(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        ),
        transformer=_vace_transformer(),
        transformer_2=_vace_transformer() if two_experts else None,
        boundary_ratio=0.875 if two_experts else None,
    )


def _vace_transformer() -> WanVACETransformer3DModel:
    return WanVACETransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=48,
        num_layers=4,
        rope_max_seq_len=64,
        vace_layers=[0, 2],
        vace_in_channels=2 * 16 + 8**2,
    ).eval()


def _animate_pipeline() -> WanAnimatePipeline:
    transformer = WanAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=36,
        latent_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=48,
        num_layers=4,
        rope_max_seq_len=64,
        image_dim=24,
        added_kv_proj_dim=24,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
        motion_encoder_batch_size=4,
    )
    torch.nn.init.normal_(transformer.face_encoder.padding_tokens)
    return WanAnimatePipeline(
        tokenizer=tokenizer(),
        text_encoder=_text_encoder(),
        image_encoder=_image_encoder(),
        image_processor=CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
        vae=_vae(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=5.0
        ),
        transformer=transformer.eval(),
    )


def _image_encoder() -> CLIPVisionModel:
    config = CLIPVisionConfig(
        hidden_size=24, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=4
    )
    return CLIPVisionModel(config).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def _text_encoder() -> UMT5EncoderModel:
    config = UMT5Config(vocab_size=32, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return UMT5EncoderModel(config).eval()


def _transformer(channels: int, **more: int) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=more.pop("out_channels", channels),
        text_dim=32,
        freq_dim=32,
        ffn_dim=48,
        num_layers=more.pop("num_layers", 2),
        rope_max_seq_len=64,
        **more,
    ).eval()


def _vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1).eval()


def _shallow_vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=4,
        z_dim=16,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[True],
        scale_factor_spatial=2,
        scale_factor_temporal=2,
    ).eval()


def _vae_ti2v(*, shallow: bool) -> AutoencoderKLWan:
    levels: dict[str, Any] = {"dim_mult": [1, 2, 2, 2], "scale_factor_spatial": 16}
    if shallow:
        levels = {
            "dim_mult": [2, 1],  # the last level's shortcut cannot add channels
            "temperal_downsample": [True],
            "scale_factor_spatial": 4,
            "scale_factor_temporal": 2,
        }
    return AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=8,
        z_dim=48,
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        latents_mean=[0.1] * 48,
        latents_std=[1.5] * 48,
        **levels,
    ).eval()


def ltx2_pipeline(version: str) -> LTX2Pipeline:
    """Return a tiny random `LTX2Pipeline`.

    Args:
        version: "2.0" or "2.3", whose connectors, transformer, VAE and vocoder have other parts.
    """
    later = version == "2.3"
    text = Gemma3TextConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    gemma = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=31)
    widths = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "num_learnable_registers": 128}
    of_sound = {**widths, "attention_head_dim": 8} if later else widths
    gates = {"gated_attn": later}
    connectors = LTX2TextConnectors(
        caption_channels=32,
        text_proj_in_factor=4,
        **{f"video_connector_{name}": value for name, value in widths.items()},
        **{f"audio_connector_{name}": value for name, value in of_sound.items()},
        **{f"{stream}_{name}": value for stream in ("video", "audio") for name, value in gates.items()},
        rope_type="split",
        per_modality_projections=later,
        video_hidden_dim=32,
        audio_hidden_dim=16,
        proj_bias=later,
    )
    transformer = LTX2VideoTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        audio_in_channels=16,
        audio_out_channels=16,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        num_layers=2,
        caption_channels=32,
        rope_type="split",
        gated_attn=later,
        cross_attn_mod=later,
        audio_gated_attn=later,
        audio_cross_attn_mod=later,
        perturbed_attn=later,
        use_prompt_embeddings=not later,
        # The VAE's below: diffusers places keyframes by the VAE's, and all else by these.
        vae_scale_factors=(8, 16, 16) if later else (8, 32, 32),
    )
    levels: dict[str, Any] = {"spatio_temporal_scaling": (True,) * 4, "downsample_type": tuple(_LTX2_STRIDES)}
    if later:
        levels |= {
            "decoder_block_out_channels": (8, 8, 8, 16),
            "decoder_layers_per_block": (1,) * 5,
            "decoder_spatio_temporal_scaling": (True,) * 4,
            "decoder_inject_noise": (False,) * 5,
            "upsample_type": tuple(reversed(_LTX2_STRIDES)),
            "upsample_residual": (False,) * 4,
            "upsample_factor": (1, 2, 1, 2),
            "patch_size": 2,
            "spatial_compression_ratio": 16,
        }
    else:
        levels |= {
            "decoder_block_out_channels": (8, 16, 32),
            "decoder_layers_per_block": (1,) * 4,
            "patch_size": 4,
            "spatial_compression_ratio": 32,
        }
    vae = AutoencoderKLLTX2Video(
        latent_channels=16,
        block_out_channels=(8, 16, 16, 16),
        layers_per_block=(1,) * 5,
        decoder_causal=False,
        temporal_compression_ratio=8,
        **levels,
    )
    audio_vae = AutoencoderKLLTX2Audio(base_channels=16, num_res_blocks=1, latent_channels=4, mel_bins=16)
    for statistics, spread in ((vae, 0.5), (audio_vae, 0.3)):
        torch.nn.init.normal_(statistics.latents_mean, std=0.1)
        torch.nn.init.uniform_(statistics.latents_std, 1 - spread, 1 + spread)
    return LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
            shift_terminal=0.1,
        ),
        vae=vae.eval(),
        audio_vae=audio_vae.eval(),
        text_encoder=Gemma3ForConditionalGeneration(gemma).eval(),
        tokenizer=tokenizer(),
        connectors=connectors.eval(),
        transformer=transformer.eval(),
        vocoder=(_vocoder_with_extension() if later else _vocoder()).eval(),
    )


def _vocoder() -> LTX2Vocoder:
    return LTX2Vocoder(
        in_channels=32,
        hidden_channels=16,
        upsample_kernel_sizes=[20, 12, 8],
        upsample_factors=[10, 6, 4],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3]],
    )


def _vocoder_with_extension() -> LTX2VocoderWithBWE:
    small = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3]]}
    vocoder = LTX2VocoderWithBWE(
        in_channels=32,
        hidden_channels=32,
        upsample_kernel_sizes=[20, 8, 8],
        upsample_factors=[10, 4, 4],
        bwe_in_channels=32,
        bwe_hidden_channels=32,
        bwe_upsample_kernel_sizes=[12, 11, 4],
        bwe_upsample_factors=[6, 5, 2],
        num_mel_channels=16,
        filter_length=64,
        window_length=64,
        hop_length=20,
        **small,
        **{f"bwe_{name}": value for name, value in small.items()},
    )
    torch.nn.init.normal_(vocoder.mel_stft.stft_fn.forward_basis, std=0.2)
    # Positive, as filters of a spectrum are: the logarithm of their sums is taken.
    torch.nn.init.uniform_(vocoder.mel_stft.mel_basis)
    return vocoder


def hunyuan_pipeline(*, guidance_embeds: bool) -> HunyuanVideoPipeline:
    """Return a tiny random `HunyuanVideoPipeline`."""
    llama = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    clip = CLIPTextConfig(
        vocab_size=32,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    transformer = HunyuanVideoTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=32,
        pooled_projection_dim=24,
        rope_axes_dim=(4, 6, 6),
        guidance_embeds=guidance_embeds,
    )
    vae = AutoencoderKLHunyuanVideo(block_out_channels=(2, 4, 4, 4), layers_per_block=1, norm_num_groups=2)
    return HunyuanVideoPipeline(
        tokenizer=tokenizer(),
        text_encoder=LlamaModel(llama).eval(),
        tokenizer_2=tokenizer(),
        text_encoder_2=CLIPTextModel(clip).eval(),
        transformer=transformer.eval(),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )
