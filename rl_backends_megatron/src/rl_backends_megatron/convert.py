"""Converts a Transformers folder to weights of this backend with the model's table.

Weights saved by this backend are a Transformers folder for any parallelism, so the reverse conversion is a copy and needs no
function. The conversion verifies that the table covers the whole model: all tensors that the model needs exist, and all
existing ones are used.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import torch

from rl_backends_megatron.config import MegatronConfig, MegatronPolicyConfig
from rl_backends_megatron.hf_folder import SafetensorsFolder, write_folder
from rl_backends_megatron.loading import LoadedModel, load_model
from rl_backends_megatron.model import DTYPES
from rl_backends_megatron.parallel import join, leave
from rl_core.config.paths import model_files
from rl_core.errors import NotSupportedError, UserError
from rl_core.interfaces.conversion import Conversion
from rl_core.interfaces.worker_context import WorkerContext

_SINGLE_RANK = WorkerContext(
    rank=0, world_size=1, local_rank=0, node_rank=0, master_address="127.0.0.1", master_port=0, run_in_process=True
)
_EXACT_IN_FLOAT32 = ("F32", "BF16", "F16")
# A tied matrix, which some tools store twice.
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def to_megatron(conversion: Conversion) -> None:
    """Fill the output with weights that `MegatronPolicy.load_checkpoint` accepts, and the tokenizer's files.

    One rank holds the model once, without gradients or optimizer, and writes it shard by shard. No value is rounded: weights
    that are all bfloat16 stay bfloat16, any other mixture of float dtypes becomes float32.

    Raises:
        UserError: an option for adapters is set.
        NotSupportedError: there is no table for the model, or the folder has tensors that are missing in the table.
        CheckpointError: the folder is incomplete or corrupt.
    """
    _reject_adapter_options(conversion)
    with SafetensorsFolder(conversion.source) as source:
        precision = _precision(source, conversion.source)
    config = MegatronPolicyConfig(
        model_name=str(conversion.source),
        precision=precision,
        megatron_cfg=MegatronConfig(transformer_impl="local"),
    )
    ranks = join(_SINGLE_RANK, config.megatron_cfg)
    try:
        model = load_model(config, ranks)
        _check_all_used(model)
        hf = copy.deepcopy(model.hf)
        hf.dtype = DTYPES[precision]
        write_folder(conversion.output, model.bridge.export(), hf)
    finally:
        leave()
    for name in model_files(conversion.source):
        if name != "config.json" and not name.endswith((".safetensors", ".index.json")):
            (conversion.output / name).parent.mkdir(exist_ok=True)
            shutil.copy(conversion.source / name, conversion.output / name)


def _reject_adapter_options(conversion: Conversion) -> None:
    option = "--merge" if conversion.merge else "--model" if conversion.model is not None else None
    if option is not None:
        raise UserError(
            f"`{option}` applies only to adapters, but {conversion.source} contains full weights: leave it out. To convert "
            "adapters, merge them first with `rlcore convert --to hf --merge`, then convert the result with `--to megatron`."
        )


def _precision(source: SafetensorsFolder, folder: Path) -> str:
    """The dtype that represents all values of the folder exactly."""
    types = {name: source.dtype(name) for name in source.names}
    for name, dtype in types.items():
        if dtype not in _EXACT_IN_FLOAT32:
            raise NotSupportedError(
                f"{folder} stores {name} as {dtype}, so it is quantized, but the Megatron backend trains float32 or bfloat16. "
                "Convert the original model instead."
            )
    return "bfloat16" if set(types.values()) == {"BF16"} else "float32"


def _check_all_used(model: LoadedModel) -> None:
    """Reject folders with tensors that would be lost."""
    used = model.bridge.manifest
    with SafetensorsFolder(model.folder) as source:
        # Old checkpoints keep the rotary buffer, which the config determines.
        left = sorted(name for name in source.names if name not in used and not name.endswith(".rotary_emb.inv_freq"))
        if left == [_HEAD] and model.hf.tie_word_embeddings and torch.equal(source.whole(_HEAD), source.whole(_EMBEDDING)):
            return
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise NotSupportedError(
            f"{model.folder} has tensors that the Megatron backend's {model.hf.model_type} does not have: "
            f"{', '.join(left[:3])}{more}. They would be lost. Convert the folder of the plain model, or add them to the "
            "model's table (docs/adding_a_model.md)."
        )
