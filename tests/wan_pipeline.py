"""Diffusers' pipeline for the clip of a plan: the reference of tests and checks."""

from typing import Any

import torch
from diffusers import WanPipeline

from runtime.core.plan import ExecutionPlan
from runtime.models.spec import ModelSpec


def load_pipeline(spec: ModelSpec, device: str = "cpu") -> WanPipeline:
    """Return a model in float32; transformers keeps diorama's text encoder in the float16 of its file."""
    pipeline = WanPipeline.from_pretrained(spec.directory).to(torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def run_pipeline(pipeline: WanPipeline, plan: ExecutionPlan, output_type: str, **more: Any) -> Any:
    """Return what `WanPipeline` makes of a plan; `more` are arguments of the pipeline."""
    return pipeline(
        prompt=plan.prompt,
        negative_prompt=plan.negative_prompt,
        width=plan.width,
        height=plan.height,
        num_frames=plan.frames,
        num_inference_steps=plan.steps,
        guidance_scale=plan.guidance_scale,
        guidance_scale_2=plan.guidance_scale_2,
        generator=torch.Generator("cpu").manual_seed(plan.seed),
        output_type=output_type,
        **more,
    ).frames
