"""Builds a Hugging Face model on these ranks and loads its weights; also to convert a folder.

Weights saved by this backend are a Transformers folder for any parallelism, so only the conversion from Transformers has a
function (`to_megatron`). It verifies that the model's table covers the whole model: all tensors that the model needs exist, and
all existing ones are used.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_backends_base.adapter_folder import ADAPTER_CONFIG, copy_files
from rl_backends_megatron.bridge import Bridge, SetWeight
from rl_backends_megatron.config import MegatronConfig, MegatronPolicyConfig
from rl_backends_megatron.cpu_shim import cpu_shim
from rl_backends_megatron.families import family_of
from rl_backends_megatron.hf_folder import SafetensorsFolder, copy_generation_config, find_folder, read_config, write_folder
from rl_backends_megatron.lora import LoraAdapters
from rl_backends_megatron.lora_targets import LORA
from rl_backends_megatron.model import DTYPES, Chunks, build_chunks, is_tied, sizes_of
from rl_backends_megatron.parallel import Ranks, join, leave
from rl_backends_megatron.scalar_head import HEAD, describe_classifier, with_scalar_head
from rl_core.backend import check_files, refuse_other_head
from rl_core.config.section import model_files
from rl_core.data.model_digests import ADAPTER_WEIGHTS
from rl_core.errors import CheckpointError, NotSupportedError, UserError
from rl_core.interfaces.conversion import Conversion
from rl_core.interfaces.worker_context import WorkerContext


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """This rank's share of a model.

    Attributes:
        folder: its folder.
        hf: its Hugging Face config.
        chunks: the layers.
        bridge: maps its weights to Hugging Face names.
        scalar: whether it has a scalar head.
        adapters: its adapters, if it has some.
    """

    folder: Path
    hf: Any
    chunks: Chunks
    bridge: Bridge
    scalar: bool
    adapters: LoraAdapters | None

    def load_initial_weights(self, into: SetWeight = torch.Tensor.copy_) -> None:
        """Load the weights from the model's own folder; a scalar head that it does not have keeps its zeros.

        Args:
            into: sets one weight.

        Raises:
            CheckpointError: the folder is incomplete, or its weights do not match its config.
        """
        with self._tensors(self.folder) as source:
            keeps_zeros = self.scalar and HEAD not in source
            self.bridge.load(source, into, names=self.bridge.manifest.keys() - {HEAD} if keeps_zeros else None)
        if self.adapters is not None:
            self.adapters.init(into)

    def load_weights(self, folder: Path, into: SetWeight = torch.Tensor.copy_) -> None:
        """Load the weights from another folder.

        Args:
            folder: contains safetensors.
            into: sets one weight.

        Raises:
            CheckpointError: the folder is incomplete or has another model.
        """
        with self._tensors(folder) as source:
            self.bridge.load(source, into)

    def _tensors(self, folder: Path) -> SafetensorsFolder:
        tensors = SafetensorsFolder(folder)
        check_files(str(folder), head="scalar" if self.scalar else "tokens", error=CheckpointError)
        return tensors

    def config_to_save(self, config: MegatronPolicyConfig) -> Any:
        """The Hugging Face config to write next to exported weights; `config` is the section `policy`."""
        hf = copy.deepcopy(self.hf)
        hf.dtype = DTYPES[config.dtype_name]
        if self.scalar:
            describe_classifier(hf)
        return hf

    @property
    def vocab_size(self) -> int:
        """V, without padding."""
        size: int = self.hf.vocab_size
        return size


def load_model(config: MegatronPolicyConfig, ranks: Ranks) -> LoadedModel:
    """The configured model with its weights on the rank's device; collective.

    Raises:
        UserError: the model does not exist, its family is not supported, or it has another head.
        CheckpointError: its weights are incomplete or corrupt.
    """
    model = build_model(config, ranks)
    model.load_initial_weights()
    return model


def build_model(config: MegatronPolicyConfig, ranks: Ranks) -> LoadedModel:
    """The configured model on the rank's device, without initialized weights; collective.

    Raises:
        UserError: the model does not exist, its family is not supported, or it has another head.
    """
    folder = find_folder(config.model_name)
    hf = read_config(folder)
    family = family_of(hf, model_name=config.model_name)
    refuse_other_head(hf, config.head, name=config.model_name)
    scalar = config.head == "scalar"
    if scalar:
        family = with_scalar_head(family)
    with cpu_shim():
        chunks = build_chunks(hf, family, config, device=ranks.device.type)
        bridge = Bridge(
            chunks.modules,
            family,
            sizes_of(hf),
            ranks,
            tied=is_tied(hf, config),
            num_experts=chunks.config.num_moe_experts,
        )
        # After the bridge, which maps the base's weights only.
        adapters = None if config.megatron_cfg.lora is None else LoraAdapters(chunks.modules, family, hf, config, ranks)
    for module in chunks.modules:
        module.to(ranks.device)
    return LoadedModel(folder=folder, hf=hf, chunks=chunks, bridge=bridge, scalar=scalar, adapters=adapters)


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
    names = [name for name in model_files(conversion.source) if not name.endswith((".safetensors", ".index.json"))]
    copy_files(conversion.source, conversion.output, [name for name in names if name != "config.json"])


def to_folder(conversion: Conversion) -> None:
    """Fill the output with a folder for Transformers or, for unmerged adapters, for peft.

    Merged weights equal those of a refit from one rank, bit for bit.

    Raises:
        UserError: the base model is not at the path in the checkpoint.
        CheckpointError: the adapter is incomplete, or does not belong to the base model.
    """
    source, output = conversion.source, conversion.output
    if not conversion.merge or not (source / ADAPTER_CONFIG).is_file():
        copy_files(source, output, model_files(source))
        return
    given: dict[str, Any] = {**conversion.policy, "generation": None}
    if conversion.model is not None:
        given["model_name"] = conversion.model
    lora = given.get("megatron_cfg", {}).get("lora")
    if lora is None:
        raise CheckpointError(f"{source} contains an adapter, but the config saved with it has no `{LORA}`.")
    config = MegatronPolicyConfig.model_validate({**given, "megatron_cfg": {"lora": {**lora, "adapter_path": None}}})
    ranks = join(_SINGLE_RANK, config.megatron_cfg)
    try:
        model = load_model(config, ranks)
        assert model.adapters is not None
        model.adapters.load(source, torch.Tensor.copy_)
        copy_generation_config(model.folder, output)
        write_folder(output, model.bridge.export(value=model.adapters.merged), model.config_to_save(config))
    finally:
        leave()
    copy_files(source, output, [name for name in model_files(source) if name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)])


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
