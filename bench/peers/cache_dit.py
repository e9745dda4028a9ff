"""cache-dit on diffusers' transformer, with compiled blocks; see `bench.peers`.

It computes the steps of its own mask `medium`, so that what random weights predict decides nothing.
"""

from functools import partial
from importlib import import_module
from typing import Any

import torch

from bench.peers.case import Case, loop_seconds, name_of, random_transformer, say

# The first blocks are computed in each step: cache-dit's default.
FIRST_BLOCKS = 8


def main() -> None:
    """Measure a loop of the first size."""
    case, size = Case.given(), Case.given().sizes[0]
    what = {"variant": "cache-dit on diffusers, bfloat16", "size": name_of(size)}
    with case.trying(**what), torch.no_grad():
        library: Any = import_module("cache_dit")
        module = random_transformer(case)
        latents, timestep, text = case.inputs(size)
        mask = library.steps_mask(total_steps=case.steps, mask_policy="medium")
        config = library.DBCacheConfig(
            Fn_compute_blocks=min(FIRST_BLOCKS, len(module.blocks) - 1),
            num_inference_steps=case.steps,
            steps_computation_mask=mask,
            steps_computation_policy="static",
        )
        adapter = library.BlockAdapter(
            transformer=module,
            blocks=module.blocks,
            forward_pattern=library.ForwardPattern.Pattern_2,
            has_separate_cfg=False,
        )
        library.enable_cache(adapter, cache_config=config)
        if case.device != "cpu":
            library.set_compile_configs()
            module.compile_repeated_blocks(fullgraph=True)
        # The first loop compiles.
        refresh = partial(library.refresh_context, module, num_inference_steps=case.steps)

        def step(latents: torch.Tensor, _: int) -> torch.Tensor:
            predicted: torch.Tensor = module(latents, timestep, text, return_dict=False)[0]
            return predicted

        note = f"a step of {case.steps}, {sum(mask[: case.steps])} of them computed"
        say(**what, note=note, **loop_seconds(step, latents, case, refresh))


if __name__ == "__main__":
    main()
