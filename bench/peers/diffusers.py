"""diffusers' transformer as its pipelines run it; see `bench.peers`."""

import torch

from bench.peers.case import Case, few_blocks, name_of, random_transformer, say, timed


def main() -> None:
    """Measure a pass of each size."""
    case = Case.given()
    module = random_transformer(case)
    for size in case.sizes:
        what = {"variant": "diffusers, bfloat16", "size": name_of(size)}
        with case.trying(**what), torch.no_grad():
            latents, timestep, text = case.inputs(size)

            def run() -> torch.Tensor:
                predicted: torch.Tensor = module(latents, timestep, text, return_dict=False)[0]  # noqa: B023
                return predicted

            with few_blocks(module):
                run()
            say(**what, **timed(run, case.device))


if __name__ == "__main__":
    main()
