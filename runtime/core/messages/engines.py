"""Messages of `runtime.engines` and of engine keys in `runtime.planner`."""

from collections.abc import Mapping

from runtime.core.messages.message import Message

_REBUILD = "Rebuild the engine; the component runs in PyTorch meanwhile."
_OTHER_BACKEND = "Choose another backend; the component runs in PyTorch meanwhile."
_IN_PYTORCH = "The component runs in PyTorch instead."
_IN_PYTORCH_SEE_LOG = "The component runs in PyTorch instead; the last lines of the log have details."
_FREE_DISK = "Free some space, or set TENSORRT_CACHE_DIR to a folder on a larger disk."
_FREE_MEMORY = "Close other programs, or choose a smaller model or size."
_LIST = "`{tandem} engines list` shows all engines."
_ENGINE_FILE = "Give a TensorRT plan (.trt, .plan or .engine) or an ONNX file (.onnx)."
_COPY_AGAIN = "Copy the file from its source again, or build it again."
_BUILD_HERE = "Build an engine with `{tandem} build`, or import one that was exported for this model."
_BUILD_AGAIN_ELSEWHERE = "Build it again for this machine, or build an engine here with `{tandem} build`."

MESSAGES: Mapping[str, Message] = {
    # Titles of engines.
    "engine.title": Message("{program:lower_component} of {model} ({builder:backend}, {precision})"),
    "engine.imported_file": Message("imported file {file}"),
    # Progress.
    "engine.waiting": Message("Waiting for another build of the {engine}."),
    "engine.building": Message("Building the {engine}."),
    "engine.built": Message("Built the {engine} in {seconds:duration}."),
    "engine.loading_weights": Message("Loading the weights of the {component:lower_component}."),
    "engine.exporting": Message("Exporting the program."),
    "engine.exporting_onnx": Message("Exporting to ONNX."),
    "engine.compiling": Message("Compiling."),
    "engine.building_with": Message("Building with {compiler}."),
    "engine.builder_output": Message("{line}"),
    "engine.comparing": Message("Comparing with PyTorch."),
    "engine.comparing_with": Message("Comparing with the {component:lower_component} of {model}."),
    "engine.measuring_pytorch": Message("Measuring PyTorch."),
    "engine.copying": Message("Copying {file} ({size:bytes})."),
    "engine.opening_file": Message("Opening the engine file."),
    # Results of verification.
    "engine.compared": Message("Relative error {error:.1e} ({where}), {tolerance:.0e} allowed."),
    "engine.compared_largest": Message(
        "{compared} The largest error of one value is {largest:.1e} ({where}), {tolerance:.0e} allowed."
    ),
    "engine.compared_change": Message(
        "{compared} What it adds to its input is {error:.0%} off ({where}), {tolerance:.0%} allowed."
    ),
    "engine.compared_equal": Message("Equal to PyTorch."),
    "engine.compared_not_finite": Message("The output {where} contains NaN or Inf, or has another shape."),
    "engine.compared_partly": Message("{compared} Sizes not compared for lack of memory: {skipped:list}."),
    "engine.compared_random_text": Message("{compared} The text was random, because the text encoder was not run."),
    "engine.compared_restored": Message("{compared} {edge} reconstructed, {error:.0%} off."),
    "engine.not_compared_yet": Message("Not compared with PyTorch yet."),
    "engine.export_compared": Message("Relative error {error:.0e} in ONNX Runtime, {tolerance:.0e} allowed."),
    # Reasons why there is no engine for a plan.
    "engine.none_yet": Message("There is none yet."),
    "engine.existing_unusable": Message("The existing engine cannot be used: {cause}"),
    "engine.nearest_differs": Message("The most similar engine differs: {differences:sentences}"),
    "engine.missing_but_imported": Message("{missing} The imported one serves {sizes}."),
    "engine.import_not_rebuilt": Message(
        "It was imported, so it cannot be built here.", "Import it again if it was deleted."
    ),
    # How the most similar engine differs, as a label in a plan.
    "engine.misfit_device": Message("engine for another GPU or processor"),
    "engine.misfit_system": Message("engine for another operating system"),
    "engine.misfit_versions": Message("outdated engine (other libraries)"),
    "engine.misfit_architecture": Message("engine for another model"),
    "engine.misfit_weights": Message("engine for other weights"),
    "engine.misfit_export": Message("outdated engine (other Tandem version)"),
    "engine.misfit_precision": Message("engine in another precision"),
    "engine.misfit_options": Message("engine with other options"),
    "engine.misfit_sizes": Message("engine for other sizes"),
    # How an engine differs from the wanted one.
    "engine.differs_program": Message("It is for the program {found}, not {wanted}."),
    "engine.differs_family": Message("It is for the model family {found}, not {wanted}."),
    "engine.differs_architecture": Message("It was built from another architecture."),
    "engine.differs_weights": Message("It was built from other weights."),
    "engine.differs_loras": Message("It was built with the LoRA {loras:list}."),
    "engine.differs_no_lora": Message("It was built without this LoRA."),
    "engine.differs_export": Message("It was exported by another version of Tandem."),
    "engine.differs_sizes": Message("It was built for {found:list}, not {wanted:list}."),
    "engine.differs_precision": Message("It was built in {found}, not {wanted}."),
    "engine.differs_builder": Message("It was built by {found} for {backend}, not by {wanted}."),
    "engine.differs_option": Message("It was built with {option} {found}, not {wanted}."),
    "engine.differs_version": Message("It was built with {package} {found}; {here} is installed."),
    "engine.differs_new_package": Message("It was built without {package}; {here} is installed."),
    "engine.differs_missing_package": Message("It was built with {package} {found}, which is not installed."),
    "engine.differs_device": Message("It was built on {found}; this is {here}."),
    "engine.differs_more_instructions": Message("It was built on a processor with {more}, unlike this one."),
    "engine.differs_fewer_instructions": Message("It was built on a processor without {fewer}, unlike this one."),
    "engine.differs_instructions": Message("It was built on a processor with {more} and without {fewer}."),
    "engine.option_unset": Message("unset"),
    "engine.names": Message("{names:list}"),
    "engine.names_and_more": Message("{names:list} and {more} more"),
    "engine.size": Message("{frames:n latent frame} of {width}x{height}"),
    "engine.sound_size": Message("{latents:n latent} of sound"),
    "engine.range": Message("{low} to {high}"),
    "engine.no_size": Message("no size"),
    "engine.stale_without_model": Message("Its model {model} is not installed."),
    "engine.stale_without_builder": Message("The builder {builder} does not exist any more."),
    # Files of engines.
    "engine.file_missing": Message("{file} is missing.", _REBUILD),
    "engine.file_not_regular": Message("{file} is not a regular file.", _REBUILD),
    "engine.file_other_size": Message("{file} has {size:,} instead of {expected:,} bytes.", _REBUILD),
    "engine.file_changed": Message("{file} has changed since it was built.", _REBUILD),
    "engine.file_unreadable": Message("{file} cannot be read: {error}.", _REBUILD),
    "engine.file_damaged": Message("{file} is damaged.", _REBUILD),
    "engine.folder_is_link": Message("Its folder is a link to another folder."),
    "engine.manifest_too_large": Message("engine.json is too large."),
    "engine.manifest_damaged": Message("engine.json is truncated or not JSON."),
    "engine.manifest_foreign": Message("engine.json does not describe an engine."),
    "engine.manifest_format": Message("engine.json has format {format}; this version reads {expected}."),
    "engine.manifest_invalid": Message("engine.json is invalid at {field}: {error}."),
    "engine.manifest_changed": Message("engine.json was changed, or belongs to another engine."),
    # The engine folder.
    "engine.not_found": Message("There is no engine {engine!r}.", _LIST),
    "engine.id_ambiguous": Message("{engine} matches several engines: {matches:list}.", "Give more digits of the ID."),
    "engine.in_use": Message("The engine {engine} is in use.", "Wait for the job that uses it, or cancel that job."),
    "engine.damaged": Message("The engine {engine} is damaged: {cause}", "Delete it, or build it again."),
    "engine.not_finished": Message("The engine {engine} was not finished: {cause}", "Build it again."),
    "engine.store_locked": Message(
        "Another program has locked the engine folder {folder} for {seconds:duration}.", "Wait for it, or stop it."
    ),
    "engine.store_disk_full": Message("The disk is full: {folder} cannot be written.", _FREE_DISK),
    "engine.store_read_only": Message(
        "The engine folder {folder} cannot be written: {error}.",
        "Set TENSORRT_CACHE_DIR to a folder that you can write to.",
    ),
    "engine.weights_unreadable": Message(
        "The weights in {folder} cannot be read: {error}.", "Check the folder and its permissions."
    ),
    "engine.no_such_gpu": Message("There is no GPU {device}.", "Choose a device that `{tandem} doctor` lists."),
    # Building and verifying.
    "engine.limit_below_set": Message(
        "The engines of {model} that are kept together take about {needed:bytes}; the limit is {limit:bytes}.",
        "Set TANDEM_ENGINE_CACHE_GB to more than {needed:bytes}.",
    ),
    "engine.limit_deletes_all": Message(
        "The most recently used engines of {model} are kept together and take {needed:bytes}, more than {limit:bytes}.",
        "Give at least {needed:bytes}; 0 deletes all engines that are not pinned.",
    ),
    "engine.needs_memory": Message(
        "Building the {engine} needs about {needed:bytes} of memory; {free:bytes} are free.", _FREE_MEMORY
    ),
    "engine.needs_video_memory": Message(
        "Building the {engine} needs about {needed:bytes} of video memory; {free:bytes} are free.",
        "Close other programs that use the GPU, or choose a smaller model or size.",
    ),
    "engine.needs_disk": Message(
        "Building the {engine} needs about {needed:bytes} of disk space; {free:bytes} are free in {folder}.",
        _FREE_DISK,
    ),
    "engine.not_built": Message("The {engine} could not be built"),
    "engine.not_verified": Message("The {engine} could not be verified"),
    "engine.not_compared": Message("The {engine} could not be compared with PyTorch"),
    "engine.not_opened": Message("The {engine} could not be opened"),
    "engine.child_exception": Message("{error}.", _IN_PYTORCH_SEE_LOG),
    "engine.child_not_started": Message(
        "The process for the {engine} could not be started: {error}.", "Close other programs and try again."
    ),
    "engine.child_disk_full": Message("{action}: the disk is full.", _FREE_DISK),
    "engine.child_out_of_memory": Message("{action}: memory ran out.", _FREE_MEMORY),
    "engine.child_refused": Message("{action}: {cause}", "{cause:remedy}"),
    "engine.child_failed": Message("{action}: {cause}", _IN_PYTORCH_SEE_LOG),
    "engine.child_killed": Message(
        "{action}: its process was killed.",
        "The system usually does that when memory runs out: close other programs, or choose a smaller size.",
    ),
    "engine.child_crashed": Message("{action}: its process crashed (signal {signal}).", _IN_PYTORCH_SEE_LOG),
    "engine.child_ended": Message("{action}: its process ended with exit code {exit_code}.", _IN_PYTORCH_SEE_LOG),
    "engine.built_wrong": Message(
        "The {engine} was built, but differs from PyTorch: {cause}",
        "The component runs in PyTorch instead. To build it again, delete the engine {id} first.",
    ),
    "engine.verified_wrong": Message("The engine is wrong: {cause}", "It is not used. Build it again."),
    "engine.lora_unreadable": Message("The engine {engine} contains a LoRA: {cause}", "{cause:remedy}"),
    "engine.lora_changed": Message(
        "The engine {engine} contains the LoRA {lora}, whose file has changed.",
        "Restore the file, or delete the engine.",
    ),
    "engine.no_model_with_weights": Message(
        "No installed model has the weights of the engine {engine}, which was built from {model}.",
        "Restore the model, or delete the engine.",
    ),
    "engine.other_device": Message(
        "The engine {engine} is for another machine. {cause}", "Build it on this machine, and delete the other one."
    ),
    "engine.compiler_failed": Message("The C++ compiler failed: {error}.", _IN_PYTORCH_SEE_LOG),
    "engine.imported_not_built": Message(
        "The engine {engine} was imported and cannot be built here.", "Import it again."
    ),
    "engine.planned_for_others": Message(
        "The engine {engine} was planned for other weights or library versions than those installed now.",
        "Start the job again with a new plan.",
    ),
    "engine.export_not_written": Message("{file} cannot be written: {error}.", "Choose another folder."),
    "engine.export_wrong": Message("{file} differs from PyTorch: {cause}", "Install another release of torch."),
    # Running.
    "engine.gone": Message("The engine {engine} was deleted.", "Build it again."),
    "engine.unusable": Message("The engine {engine} cannot be used: {cause}", _REBUILD),
    "engine.unknown_backend": Message("Engines for {backend} are not supported.", _REBUILD),
    "engine.other_inputs": Message("The engine has the inputs {expected:list}, not {given:list}.", _REBUILD),
    "engine.other_outputs": Message(
        "The engine writes {expected:list}, in other sizes or dtypes than those given for {given:list}.", _REBUILD
    ),
    "engine.other_frames": Message("The engine returned {given} values instead of {expected}.", _REBUILD),
    "engine.other_shape": Message(
        "The engine expects {tensor} of shape {expected}, not {given}.",
        "Build an engine for this size; the component runs in PyTorch meanwhile.",
    ),
    "engine.no_profile_fits": Message(
        "The engine was built for {profiles}, not for {given}.",
        "Build an engine for this size; the component runs in PyTorch meanwhile.",
    ),
    "engine.failed": Message("The engine failed: {error}.", _IN_PYTORCH),
    "engine.package_not_loaded": Message("The engine's package cannot be loaded: {error}.", _REBUILD),
    "engine.weight_missing": Message("The engine needs {weight} of shape {shape}, which the model lacks.", _REBUILD),
    "engine.onnx_not_loaded": Message("The ONNX file cannot be loaded: {error}.", _REBUILD),
    "engine.provider_missing": Message(
        "ONNX Runtime has no provider {provider}.", "Install the package that contains it, or rebuild the engine."
    ),
    "engine.provider_not_started": Message("The provider {provider} does not start on this machine.", _OTHER_BACKEND),
    # TensorRT.
    "engine.tensorrt_without_gpu": Message(
        "TensorRT needs an NVIDIA GPU, and PyTorch does not find one.", "Choose another backend."
    ),
    "engine.tensorrt_needs_gpu": Message("TensorRT needs an NVIDIA GPU; {device} is not one.", _OTHER_BACKEND),
    "engine.tensorrt_not_loadable": Message(
        "TensorRT cannot be loaded: {error}.",
        "Run `{installer} doctor`: it installs requirements-gpu.txt on machines with a GPU.",
    ),
    "engine.tensorrt_silent": Message("TensorRT gave no reason"),
    "engine.tensorrt_unknown_dtype": Message(
        "The engine has tensors of type {dtype}, which PyTorch does not support.", _REBUILD
    ),
    "engine.tensorrt_host_tensor": Message("The engine needs {tensor} in host memory.", _REBUILD),
    "engine.tensorrt_plan_refused": Message("TensorRT cannot load the engine file: {detail}.", _REBUILD),
    "engine.tensorrt_no_context": Message("TensorRT cannot run the engine: {detail}.", _REBUILD),
    "engine.tensorrt_profile_not_set": Message("TensorRT cannot change the shape profile: {detail}.", _REBUILD),
    "engine.tensorrt_shape_refused": Message(
        "The engine does not accept {tensor} of shape {shape}: {detail}.", _REBUILD
    ),
    "engine.tensorrt_unknown_output": Message("The size of the output {tensor} is unknown: {detail}.", _REBUILD),
    "engine.tensorrt_address_refused": Message("TensorRT refuses the memory of {tensor}: {detail}.", _REBUILD),
    "engine.tensorrt_tensor_refused": Message(
        "The engine cannot use {tensor} in place: it has another dtype or device, or is not contiguous or aligned.",
        _REBUILD,
    ),
    "engine.tensorrt_not_run": Message("The engine did not run: {detail}.", _REBUILD),
    "engine.tensorrt_parse_failed": Message(
        "TensorRT {version} cannot read the exported model: {detail}.", _OTHER_BACKEND
    ),
    "engine.tensorrt_build_failed": Message("TensorRT could not build the engine: {detail}.", _OTHER_BACKEND),
    "engine.tensorrt_profile_refused": Message("TensorRT refuses the shape profile: {detail}.", _OTHER_BACKEND),
    "engine.tensorrt_without_bfloat16": Message(
        "TensorRT {version} does not support bfloat16.", "Choose float16 or float32, or install TensorRT 10."
    ),
    "engine.rtx_capability_refused": Message(
        "TensorRT for RTX cannot build for compute capability {capability}.", _OTHER_BACKEND
    ),
    "engine.torch_tensorrt_failed": Message("torch-tensorrt could not build the engine: {error}.", _OTHER_BACKEND),
    # Importing: the file.
    "engine.import_executes_code": Message(
        "An engine file contains executable code, which runs with your rights when the file is opened. "
        "Import only files that you made, or that come from someone you trust."
    ),
    "engine.import_link": Message("{file} is a link.", "Give the file that it points to: {target}."),
    "engine.import_folder": Message("{file} is a folder.", _ENGINE_FILE),
    "engine.import_not_a_file": Message("{file} is not a regular file.", _ENGINE_FILE),
    "engine.import_unknown_suffix": Message("{file} does not have the suffix of an engine file.", _ENGINE_FILE),
    "engine.import_unreadable": Message("{file} cannot be read: {error}.", "Check the path and its permissions."),
    "engine.import_empty": Message("{file} is empty.", _COPY_AGAIN),
    "engine.import_text": Message("{file} is a text file, not an engine.", _ENGINE_FILE),
    "engine.import_not_a_plan": Message("{file} is not a plan of TensorRT 8.6 or later.", _ENGINE_FILE),
    "engine.import_truncated": Message("{file} is truncated: {size:,} bytes.", _COPY_AGAIN),
    "engine.import_incomplete": Message("{file} is truncated: {size:,} of {whole:,} bytes.", _COPY_AGAIN),
    "engine.import_no_library": Message(
        "{file} cannot run on this machine: {cause:clause}.",
        "Install what is missing, or import it on a machine that can run it.",
    ),
    "engine.import_other_tensorrt": Message(
        "{file} was made by TensorRT {version}; {installed} is installed.", _BUILD_AGAIN_ELSEWHERE
    ),
    "engine.import_disk_full": Message("{file} has {size:bytes}; {free:bytes} are free in {folder}.", _FREE_DISK),
    "engine.import_weights_disk_full": Message(
        "The external weights of {file} have {size:bytes}; {free:bytes} are free in {folder}.", _FREE_DISK
    ),
    "engine.import_not_copied": Message(
        "{file} cannot be copied: {error}.",
        "Check its permissions, and the free space in the engine folder (TENSORRT_CACHE_DIR).",
    ),
    "engine.import_weights_missing": Message(
        "The weights {file} are not in the folder of the ONNX file.", "Copy both files into one folder."
    ),
    "engine.plan_of_another_gpu": Message("The plan was built for another GPU. {cause}", _BUILD_AGAIN_ELSEWHERE),
    "engine.plan_of_another_system": Message("The plan was built on another system. {cause}", _BUILD_AGAIN_ELSEWHERE),
    "engine.plan_of_another_tensorrt": Message(
        "The plan was built by another TensorRT. {cause}", _BUILD_AGAIN_ELSEWHERE
    ),
    "engine.plan_damaged": Message("The file is damaged, or not a plan of this TensorRT. {cause}", _COPY_AGAIN),
    "engine.onnx_damaged": Message("The file is not a valid ONNX file: {error}.", _COPY_AGAIN),
    "engine.onnx_without_outputs": Message("The file is not a valid ONNX file: it has no outputs.", _COPY_AGAIN),
    "engine.onnx_weights_outside": Message(
        "The ONNX file reads weights from outside of its folder: {file}.",
        "Save it with its weights inside, or in files in the same folder.",
    ),
    "engine.onnx_weights_name": Message(
        "The ONNX file reads weights from a file of the name {file!r}, which is not allowed.",
        "Save it with its weights inside, or in a file with another name.",
    ),
    "engine.onnx_many_weight_files": Message(
        "The ONNX file reads weights from more than {most} files.", "Save it with its weights in one file."
    ),
    "engine.adapters_damaged": Message("{file} is damaged: {error}.", "Import it again."),
    # Importing: contract, match and result.
    "engine.unknown_maker": Message("an unknown program"),
    "engine.contract": Message("For {backend}, made by {made_by}."),
    "engine.contract_with_memory": Message("For {backend}, made by {made_by}; uses {memory:bytes} while it runs."),
    "engine.contract_input": Message("Input {tensor}"),
    "engine.contract_output": Message("Output {tensor}"),
    "engine.import_serves": Message("Replaces the {component:lower_component} of {model} for {sizes}."),
    "engine.import_could_serve": Message("Could replace the {components:lower_components} of {model} for {sizes}."),
    "engine.import_compared_later": Message("The comparison with the model during import shows which of these it is."),
    "engine.import_lossy": Message("The adapters are lossy, so it is used only if its backend is requested."),
    "engine.any_clip": Message("clips of any size"),
    "engine.served_sizes": Message("{sizes:list}"),
    "engine.clip": Message("{width}x{height}, {frames:n frame}"),
    "engine.clip_lengths": Message("{width}x{height}, {fewest} to {frames:n frame}"),
    "engine.import_other_weights": Message(
        "The engine's output differs from the {component:lower_component} of {model}: {cause} "
        "It has other weights, or was exported differently.",
        "Give its model with --model, or build an engine here with `{tandem} build`.",
    ),
    "engine.import_dtype_unsupported": Message("The engine's tensor {tensor} has an unsupported type.", _BUILD_HERE),
    "engine.import_kind_unknown": Message(
        "The engine is of an unknown kind; its inputs are: {inputs:list}.", _BUILD_HERE
    ),
    "engine.import_mismatch": Message(
        "The engine cannot replace the {component:lower_component} of {model}: {cause}", _BUILD_HERE
    ),
    "engine.mismatch_kind": Message("Its inputs and outputs are those of a {kind:lower_component}."),
    "engine.mismatch_sizes": Message("It supports no size that the model can generate."),
    "engine.mismatch_colors": Message("No axis of its output {output} has three colors."),
    "engine.mismatch_ids_and_mask": Message(
        "Its inputs are {inputs:list} instead of ids and a mask; without a mask it attends to padding."
    ),
    "engine.mismatch_short_text": Message(
        "It takes {tokens} tokens, and the model attends to {wanted}, including padding."
    ),
    "engine.mismatch_long_text": Message(
        "It takes {tokens} tokens, which is not a multiple of the model's {wanted}, and has no mask; the model was not "
        "trained to attend to more padding."
    ),
    "engine.mismatch_mask": Message("Its mask {mask} may be multiplied or added; the file does not state which."),
    "engine.mismatch_extra_input": Message("It also takes {input}, which a text-to-video model does not have."),
    "engine.mismatch_missing_input": Message("None of its inputs can be {input}."),
    "engine.mismatch_image_embeddings": Message(
        "The model attends to embeddings of images, which an imported engine cannot be given."
    ),
    "engine.mismatch_one_timestep": Message(
        "It takes one timestep; the model needs another for the first frame of a video from an image."
    ),
    "engine.import_one_timestep": Message(
        "The imported engine takes one timestep; a video that starts from an image needs another for its first frame.",
        _BUILD_HERE,
    ),
    "engine.mismatch_output": Message("Its output {output} does not match its input {input}."),
    "engine.mismatch_outputs": Message("Its outputs are {outputs:list} instead of one tensor of {axes} axes."),
    "engine.mismatch_size": Message("{tensor} has {size} on axis {axis}; the model has {own}."),
    # Adapters.
    "engine.adapter_names": Message("Names: {pairs:list}. No cost."),
    "engine.adapter_types": Message("Types: {pairs:list}. Values are rounded; the measured error includes that."),
    "engine.adapter_two_calls": Message("Guidance: two calls per step, with and without the prompt, as in PyTorch."),
    "engine.adapter_batch": Message("Batch: every call computes {size} clips; one clip costs as much as {size}."),
    "engine.adapter_timestep_scalar": Message("Timestep: a scalar. No cost."),
    "engine.adapter_timestep_value": Message("Timestep: one value. No cost."),
    "engine.adapter_timestep_per_token": Message("Timestep: one value per token. No cost."),
    "engine.adapter_timestep_integer": Message("{shape} Integers only, as this scheduler's timesteps are."),
    "engine.adapter_repeated_text": Message(
        "Text: repeated {times} times, which does not change the attention. "
        "Cross-attention processes {times} times as many tokens."
    ),
    "engine.adapter_full_mask": Message("Text: a mask that keeps everything. No cost."),
    "engine.adapter_masked_text": Message(
        "Text: padded to {length} tokens and masked. The padding is computed but not attended to."
    ),
    "engine.adapter_unread_rows": Message("Latents: {edge} added that the engine takes but does not read. No cost."),
    "engine.adapter_restored_rows": Message(
        "Velocity: {edge} missing in the output, reconstructed from the clean neighbors. "
        "The clean latents of that edge are about 15 % off; the rest is not affected."
    ),
    "engine.adapter_denormalized": Message("Latents: the model's mean and standard deviation are applied. No cost."),
    "engine.adapter_clip": Message("Frames: cut to {per_latent}(n-1)+1 for n latent frames. No cost."),
    "engine.adapter_clip_padded": Message(
        "Frames: cut to {per_latent}(n-1)+1 for n latent frames; shorter clips are padded to {least} latent frames. "
        "The padding is decoded and discarded."
    ),
    "engine.adapter_zero_padding": Message("Embeddings: zero in the padding. No cost."),
    "engine.adapter_padded_ids": Message(
        "Ids: padded to {length} and masked. The padding is computed but not attended to."
    ),
    "engine.edge_rows": Message("{rows:n row}"),
    "engine.edge_columns": Message("{columns:n column}"),
    "engine.edge_rows_and_columns": Message("{rows:n row} and {columns:n column}"),
}
