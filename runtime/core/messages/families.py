"""Messages of `runtime.families` and of `runtime.models.folder` and `registry`, which read model folders."""

from collections.abc import Mapping

from runtime.core.messages.message import Message

_COPY = "Copy or download the model again."
_OF_WAN = "Choose a model of Wan for videos from text or from images."

MESSAGES: Mapping[str, Message] = {
    "model.folder_missing": Message(
        "The model folder {folder} does not exist.",
        "Give a name from `{tandem} models list`, or a folder in diffusers' format.",
    ),
    "model.file_missing": Message(
        "The model has no readable {file}.",
        "Give a folder in diffusers' format, with model_index.json and a folder per component.",
    ),
    "model.file_not_json": Message("{file} is damaged: it is not a JSON object.", _COPY),
    "model.config_invalid": Message("A configuration file in {model} is incomplete or wrong ({detail}).", _COPY),
    "model.name_unreadable": Message(
        "The name of the model folder {folder} cannot be displayed.", "Rename the folder."
    ),
    "model.number_too_large": Message("{file} is wrong: a number in {name!r} is not finite or above {most:,}.", _COPY),
    "model.file_too_large": Message("{file} is larger than {most:bytes}.", _COPY),
    "model.too_many_files": Message(
        "The folder of {model} has more than {most:,} files.", "Give a folder that contains only the model."
    ),
    "model.tokenizer_runs_code": Message(
        "The tokenizer of the model runs code of its own (auto_map), which Tandem does not allow.",
        "Remove auto_map from tokenizer/tokenizer_config.json, or choose another model.",
    ),
    "model.index_invalid": Message("{file} is wrong: its weight_map does not name files.", _COPY),
    "model.pickled": Message(
        "The model contains pickled weights ({file}), which can run code when loaded.",
        "Remove that file, or convert it to safetensors.",
    ),
    "model.weights_missing": Message(
        "The model has no weights for its {component}.",
        "Put a .safetensors file into {component}/, or download the model again.",
    ),
    "model.weights_outside": Message(
        "The index of {component} names a weight file outside of its folder.", "Download the model again."
    ),
    "model.no_such_component": Message("{model} has no component {component}.", "Select one of {choices:list}."),
    "model.family_unstated": Message(
        "The model_index.json of {model} does not name a pipeline.",
        "Choose a folder whose model_index.json names {supported:list}.",
    ),
    "model.family_unknown": Message(
        "{model} is a {pipeline}, which Tandem does not support.",
        "Choose a folder whose model_index.json names {supported:list}.",
    ),
    "model.text_encoder_unknown": Message(
        "{model} reads prompts with {kind}, which Tandem does not support; models of its family have {known!r}.",
        "Choose another model.",
    ),
    "model.no_frame_decoder": Message(
        "{model} makes videos; it is not a decoder of single frames.",
        "Choose a folder with the config.json and the weights of an AutoencoderDC or an OWL decoder, or {names:list}.",
    ),
    "model.only_decodes": Message(
        "{model} only decodes latents; it does not make videos.",
        "Choose another model, or run `{tandem} decode LATENTS --model {name}`.",
    ),
    "model.dynamic_shifting": Message(
        "The scheduler of {model} shifts by the clip's size (use_dynamic_shifting), which is not supported.",
        "Set use_dynamic_shifting to false in scheduler/scheduler_config.json, or copy the model again.",
    ),
    "model.experts_differ": Message(
        "The two transformers of {model} differ in architecture.", "Use two transformers of the same model."
    ),
    "model.channels_differ": Message(
        "The transformer of {model} has {transformer} input channels and its VAE {vae} latent channels: it takes "
        "neither text alone nor images.",
        _OF_WAN,
    ),
    "family.option_unsupported": Message(
        "{model} does not support {option:setting}.", "Omit {option:setting}, or choose another model."
    ),
    "upscaler.none": Message(
        "No upscaler is installed.",
        "Install the package {package}, or put a .safetensors file of an upscaler into {folder}.",
    ),
    "upscaler.unknown": Message("There is no upscaler {name}.", "Choose one of {names:list}."),
    "upscaler.other_network": Message(
        "{file} is not an upscaler that Tandem runs.",
        "Choose a .safetensors file of an SRVGGNetCompact or an RRDBNet (ESRGAN, Real-ESRGAN).",
    ),
    "upscaler.scale": Message(
        "{upscaler} does not enlarge by {value}.", "Give a number from 1 to {most}, or choose another upscaler."
    ),
    "decode.latents_shape": Message(
        "The latents are {shape} values of {dtype} on {device}.",
        "Give values in float16, bfloat16, float32 or float64 as [batch, frames, channels, height, width], "
        "each at least 1.",
    ),
    "decode.latents_channels": Message(
        "The latents are {shape}, but the decoder takes {channels} channels.",
        "Give latents [batch, frames, {channels}, height, width].",
    ),
    "decode.tensorrt_disabled": Message(
        "TensorRT is disabled.", "Set TENSORRT_ENABLED to true, and leave use_tensorrt as it is."
    ),
    "decode.batch_size": Message("The batch size is {value}.", "Give at least 1."),
    "decode.fell_back": Message("PyTorch decodes instead of {backend:backend}. {reason:advice}"),
    "decode.decoder_unknown": Message(
        "A {module} cannot be exported.",
        "Load the decoder with load_decoder, or pass a diffusers AutoencoderDC or OWL's decoder.",
    ),
    "decode.smaller_batches": Message("Memory ran out ({error}): batches have {frames:n frame} from now on."),
    "decode.clips_in_pytorch": Message("`decode` runs the VAE of a video model in PyTorch."),
}
