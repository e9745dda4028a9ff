"""Choice of the engine or backend that runs each component of a plan. Pure functions: no torch, no disk, no device.

1. `engine_index` describes the engines on disk: each has a key, its identity, and a record of what was measured.
2. `engines.offers` turns the index into offers: for a component and size, the engines of one builder that exist or can
   be built (`engine_offers`). `key_differences` states why an existing engine cannot be used.
3. `plan_choice.choose_engines`, called by `planner.resolve`, removes offers that other settings exclude and has
   `component_choice.choose` choose for each component: the requested backend, or the engines that are measured to be
   faster than what PyTorch would run. Without such a measurement, PyTorch runs it.
4. It compares forecasts of whole plans (`planner.forecast`), so that offload and attention count too. Engines that do
   not fit into memory, or do not make the clip faster, give way to PyTorch.
5. If engines must not delay a video, `idle_builds` plans without them and lists what to build when no video waits.
"""
