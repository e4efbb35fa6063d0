"""Loads a Transformers model from a name, a folder or a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    modeling_gguf_pytorch_utils,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from rl_backends_base.adapter_folder import adapter_as_model
from rl_backends_base.shards import copy_from_files
from rl_backends_hf.loading_checks import check_norms, check_not_offloaded, check_options, restore_config
from rl_backends_hf.model_options import HFModelConfig
from rl_backends_hf.pictures import FAMILIES, language_model
from rl_backends_hf.quantized import layers_to_quantize, quantization_of, use_dequantized_products
from rl_backends_hf.scoring.scoring_model import init_head, prepare_head
from rl_backends_hf.transformers_internals import attention_of, checkpoint_layers, names_of_layers
from rl_core.backend import Head, check_loaded, exact_attention, report_as_error
from rl_core.data.hub import pretrained_location, read_model_config, require_model
from rl_core.errors import DataError, NotSupportedError, UserError
from rl_core.plugins.component import did_you_mean

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CAUSAL, _VISION = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
_CLASSIFIERS: Final = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

# Progress bars of several workers would garble the run's log.
transformers.utils.logging.disable_progress_bar()
modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors  # it ignores that setting


def auto_class(config: PretrainedConfig, head: Head) -> tuple[Any, type[PreTrainedModel] | None]:
    """Transformers' class that loads the model of a config, and the model's class, if Transformers has it.

    Raises:
        NotSupportedError: it is a vision-language model of a family that was not tested: some do not attend causally to text.
    """
    kind = type(config)
    if head == "scalar":
        return AutoModelForSequenceClassification, _CLASSIFIERS.get(kind, None)
    # A config of a family with both names the class with the tower; that of the language model alone names another.
    if kind in _VISION and (kind not in _CAUSAL or _VISION[kind].__name__ in (config.architectures or ())):
        if kind not in _CAUSAL and config.model_type not in FAMILIES:
            raise NotSupportedError(
                f"`model_name`: vision-language models of type {config.model_type} are not supported, but those of type "
                f"{', '.join(FAMILIES)} are.",
                key="model_name",
            )
        return AutoModelForImageTextToText, _VISION[kind]
    return AutoModelForCausalLM, _CAUSAL.get(kind, None)


def load_model(
    name: str, *, options: HFModelConfig, dtype: torch.dtype, device: str | torch.device = "cpu", head: Head = "tokens"
) -> PreTrainedModel:
    """Load a plain model in evaluation mode with weights of `dtype` on `device` (or as `device_map` specifies).

    A GGUF file is dequantized, so that the model trains and saves like any other.

    Args:
        name: name on the hub or in its cache (`owner/name@revision`), folder with a `config.json`, or path of a `.gguf` file.
        options: how to load it.
        dtype: float32 or bfloat16.
        device: device of the weights.
        head: head type; a scalar head is loaded from the model if it has one, and is zero otherwise.

    Raises:
        UserError: the model does not exist, has another head, or cannot be loaded with the options; nothing was loaded.
    """
    model = _load_as_stored(name, options=options, dtype=dtype, device=device, head=head)
    return _cast(model, dtype, model.device) if is_gguf(name) else model


def load_model_shards(
    name: str,
    model_class: type[PreTrainedModel],
    *,
    options: HFModelConfig,
    dtype: torch.dtype,
    shard: Callable[[PreTrainedModel], None],
    head: Head = "tokens",
) -> PreTrainedModel:
    """Load only this rank's shards of a model, in evaluation mode on the CPU; the whole model is never in memory.

    `model_class` is the class of the model, see `why_read_whole` for those that do not support it; `shard` is as in
    `sharding_class`, and other arguments are as in `load_model`.

    Raises:
        UserError: as `load_model`, or the files lack weights, which each rank would initialize differently.
    """
    loader = sharding_class(model_class, shard)
    model = _load_as_stored(name, options=options, dtype=dtype, device="cpu", head=head, loader=loader)
    model.__class__ = model_class
    return model


def sharding_class(model_class: type[PreTrainedModel], shard: Callable[[PreTrainedModel], None]) -> type[PreTrainedModel]:
    """A subclass of `model_class` that calls `shard` with each new model, before `from_pretrained` reads its weights.

    For a parameter that is a DTensor, Transformers reads only this rank's shard of the file.

    Args:
        model_class: class of the model.
        shard: replaces parameters of a model on the device `meta` with DTensors.
    """

    def build(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(model, *args, **kwargs)
        shard(model)

    return type(model_class.__name__, (model_class,), {"__init__": build, "__module__": model_class.__module__})


def why_read_whole(model: PreTrainedModel, ranks: int) -> str | None:
    """Why a rank cannot read only its shards of the files of a model; None if it can.

    Transformers shards each tensor of a file before it converts it, which is right if the conversion stacks whole experts, but
    not if it splits or joins tensors along the dimension that is sharded, the first.

    Args:
        model: on any device.
        ranks: number of shards of each tensor.
    """
    converters = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightConverter)]
    for operation in (operation for each in converters for operation in each.operations):
        stacks = isinstance(operation, MergeModulelist) and operation.dim == 0
        if not stacks and not (isinstance(operation, Concatenate) and operation.dim == 1):
            return f"the weights of a {type(model).__name__} are stored in another layout ({type(operation).__name__})"
    if converters and (experts := min((len(each) for each in model.parameters() if each.ndim == 3), default=ranks)) < ranks:
        return f"it has {experts} experts, fewer than ranks"
    return None


def load_model_with_exact_weights(
    name: str, *, options: HFModelConfig, dtype: torch.dtype, device: str | torch.device = "cpu", head: Head = "tokens"
) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """A model as `load_model` returns it, and the float32 weights on the CPU that its parameters were rounded from.

    The weights are keyed by parameter name; there are none if the files already store `dtype`. A GGUF file is read and
    dequantized once for both, because reading it takes seconds. Arguments as in `load_model`.

    Raises:
        UserError: as `load_model`.
    """
    if not is_gguf(name) or options.device_map is not None:
        model = load_model(name, options=options, dtype=dtype, device=device, head=head)
        return model, exact_weights(name, options=options, dtype=dtype, head=head)
    stored = _load_as_stored(name, options=options, dtype=torch.float32, device="cpu", head=head)
    return _cast(stored, dtype, device), dict(stored.named_parameters())


def _load_as_stored(
    name: str,
    *,
    options: HFModelConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    head: Head,
    loader: type[PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """The model as Transformers loads it (with the class `loader`); `save_pretrained` still fails for one read from GGUF."""
    check_options(options, name)
    where = _locate(name)
    config = _load_config(name, options)
    prepare_head(config, head, name=name)
    arguments: dict[str, Any] = {
        **where,
        "config": config,
        "dtype": dtype,
        "attn_implementation": _attention(config, options, head),
        "trust_remote_code": options.trust_remote_code,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # they are an error of `check_loaded`
    }
    if options.device_map is not None:
        arguments["device_map"] = options.device_map
    if options.quantized_by is not None:
        empty = model_without_weights(name, options=options, head=head)
        layers_to_quantize(empty, options)
        arguments["quantization_config"] = quantization_of(empty, options, dtype)
        arguments.setdefault("device_map", {"": device})
    if "gguf_file" in where:
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    from_pretrained = (loader or auto_class(config, head)[0]).from_pretrained
    with report_as_error(name):
        model, report = _with_explained_errors(name, options, lambda: from_pretrained(**arguments), head=head)
    check_loaded(model, report, name=name)
    if report["missing_keys"]:
        init_head(model)
    if options.quantized_by is not None:
        use_dequantized_products(model)
    if "device_map" not in arguments:
        model.to(device)
    if model.device.type == "cpu":
        copy_from_files(model)
    check_not_offloaded(model, name)
    check_norms(model, name)
    return model.eval()


def model_without_weights(name: str, *, options: HFModelConfig, head: Head = "tokens", device: str = "meta") -> PreTrainedModel:
    """The model that `load_model` would return, by default on the device `meta`: weights are neither read nor allocated.

    On other devices, they are initialized. Arguments as in `load_model`.

    Raises:
        UserError: as `load_model`, except for errors in the weights.
    """
    check_options(options, name)
    _locate(name)
    config = _load_config(name, options)
    prepare_head(config, head, name=name)
    with torch.device(device):
        model: PreTrainedModel = _with_explained_errors(
            name,
            options,
            lambda: auto_class(config, head)[0].from_config(
                config, trust_remote_code=options.trust_remote_code, attn_implementation=_attention(config, options, head)
            ),
            head=head,
        )
    check_norms(model, name)
    return model


def _attention(config: PretrainedConfig, options: HFModelConfig, head: Head) -> str:
    """The attention to load a model with.

    Raises:
        UserError: the one that the options name ignores a part of the config.
    """
    exact = exact_attention(config, auto_class(config, head)[1])
    if options.attn_implementation == "sdpa" and exact_attention(config) == "eager":
        raise UserError(
            "`attn_implementation: sdpa` ignores `attn_logit_softcapping` of the model's config, so it would compute another "
            "model. Remove it: the default is the fastest attention that computes what the config describes.",
            key="attn_implementation",
        )
    return options.attn_implementation or exact


def exact_weights(name: str, *, options: HFModelConfig, dtype: torch.dtype, head: Head = "tokens") -> dict[str, torch.Tensor]:
    """The float32 parameters, on the CPU, that those of a model of `dtype` were rounded from; empty if the files store `dtype`.

    Arguments as in `load_model`.
    """
    if not is_gguf(name) and _load_config(name, options).dtype == dtype:
        return {}
    on_cpu = options.model_copy(update={"device_map": None})
    return dict(load_model(name, options=on_cpu, dtype=torch.float32, head=head).named_parameters())


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute each decoder layer's activations in the backward pass.

    Raises:
        NotSupportedError: the model's class does not support it.
    """
    if not model.supports_gradient_checkpointing:
        raise NotSupportedError(
            f"{type(model).__name__} does not support activation checkpointing in Transformers. Set "
            "`policy.activation_checkpointing: false`, and use smaller microbatches if memory is short.",
            key="policy.activation_checkpointing",
        )
    checkpoint_layers(model)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers that Transformers says to keep together on one device; none if the model's class does not name them.

    Those of a vision tower are not among them.
    """
    names = names_of_layers(model)
    # FSDP2 replaces a layer's class by one that inherits from it.
    return [module for module in language_model(model).modules() if names & {base.__name__ for base in type(module).__mro__}]


def _locate(name: str) -> dict[str, str]:
    """Arguments of `from_pretrained` that locate the model."""
    path = Path(name).expanduser()
    try:
        require_model(name)
    except DataError as error:
        raise UserError(f"`model_name`: {error}.", key="model_name") from error
    if path.is_dir():
        if (adapter := adapter_as_model(name)) is not None:
            raise UserError(f"`model_name`: {adapter}", key="model_name")
        if not (path / "config.json").is_file():
            raise UserError(
                f"The folder {name} has no config.json, so it is not a Transformers model. Use a folder written by "
                "`save_pretrained` (or `rlcore convert`)."
            )
    location, options = pretrained_location(name)
    return {"pretrained_model_name_or_path": location, **options}


def _load_config(name: str, options: HFModelConfig) -> PretrainedConfig:
    config: PretrainedConfig = _with_explained_errors(
        name, options, lambda: read_model_config(name, trust_remote_code=options.trust_remote_code)
    )
    if is_gguf(name):
        restore_config(config, Path(name).expanduser())
    fields = sorted(config.to_dict())
    for key, value in options.config_overrides.items():
        if not hasattr(config, key):
            raise UserError(
                f"`config_overrides.{key}`: the {type(config).__name__} of {name} has no such field."
                f"{did_you_mean(key, fields)}",
                key=f"hf_cfg.config_overrides.{key}",
            )
        setattr(config, key, value)
    return config


def _with_explained_errors(name: str, options: HFModelConfig, load: Any, *, head: Head = "tokens") -> Any:
    """Result of `load`; its errors are raised as UserError."""
    try:
        return load()
    except (OSError, ValueError, ImportError, KeyError) as error:
        if "trust_remote_code" in str(error) and not options.trust_remote_code:
            raise UserError(
                f"{name} requires its own Python code, which would run on this machine. Review it, and if you trust it set "
                "`policy.hf_cfg.trust_remote_code: true`; or choose a model that Transformers "
                f"{transformers.__version__} supports natively.",
                key="policy.hf_cfg.trust_remote_code",
            ) from error
        if options.attn_implementation != "eager" and "eager" in str(error):
            used = "`attn_implementation: sdpa`, the default" if options.attn_implementation is None else "this attention"
            raise UserError(
                f"{name} cannot be loaded with {used}: Transformers {transformers.__version__} has no such kernel for this "
                "architecture. Set `hf_cfg.attn_implementation: eager` in the section of this model.",
                key="hf_cfg.attn_implementation",
            ) from error
        kind = "a causal language model" if head == "tokens" else "a model with a scalar head"
        raise UserError(
            f"Transformers {transformers.__version__} cannot load {name} as {kind}: {type(error).__name__}: {error}"
        ) from error


def length_dependent_rope(model: PreTrainedModel, length: int) -> str | None:
    """Why a model cannot score rows of up to `length` tokens, if its rotary frequencies depend on the longest row of a batch.

    Transformers chooses them once per forward pass, so the log-probabilities of a row would depend on its neighbors in a
    microbatch. None if rows of this length all have the same frequencies.
    """
    text = model.config.get_text_config(decoder=True)
    own = getattr(text, "rope_parameters", None) or {}
    for rope in [own, *(layer for layer in own.values() if isinstance(layer, dict))]:
        kind = rope.get("rope_type", "default")
        if kind != "longrope" and "dynamic" not in kind:
            continue
        limit = rope["original_max_position_embeddings"] if kind == "longrope" else text.max_position_embeddings
        if length > limit:
            return (
                f"the rotary embeddings of the model (`rope_type: {kind}`) change for all rows of a microbatch if one has more "
                f"than {limit} tokens, so log-probabilities would depend on which rows are computed together. Lower "
                f"max_total_sequence_length from {length} to {limit}, or use a model with another `rope_type`."
            )
    return None


def is_gguf(name: str) -> bool:
    """Whether a model's name is the path of a GGUF file."""
    return Path(name).suffix == ".gguf"


def _cast(model: PreTrainedModel, dtype: torch.dtype, device: str | torch.device) -> PreTrainedModel:
    """A dequantized model as `dtype`, without a quantization config, so that it can be saved."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain: PreTrainedModel = type(model).from_pretrained(
        None,
        config=config,
        state_dict=model.state_dict(),
        dtype=dtype,
        attn_implementation=attention_of(config),
    )
    if model.can_generate():
        plain.generation_config = model.generation_config
    plain.to(device)
    return plain.eval()
