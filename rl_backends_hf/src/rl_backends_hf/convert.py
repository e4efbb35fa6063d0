"""Converts a checkpoint of this backend to a folder for other tools: a copy, an adapter, or the merged model."""

from __future__ import annotations

from typing import Any

from rl_backends_base.adapter_folder import ADAPTER_CONFIG, copy_files
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.model import DTYPES, load_model
from rl_backends_hf.training.lora import LoraAdapters
from rl_backends_hf.weights_folder import WholeModel
from rl_core.config.section import model_files
from rl_core.data.model_digests import ADAPTER_WEIGHTS
from rl_core.errors import CheckpointError
from rl_core.interfaces.conversion import Conversion


def to_folder(conversion: Conversion) -> None:
    """Fill the output with a folder for Transformers or, for unmerged adapters, for peft.

    Merged weights equal those of a refit, bit for bit.

    Raises:
        UserError: the base model is not at the path in the checkpoint.
        CheckpointError: the adapter is incomplete, or does not belong to the base model.
    """
    source, output = conversion.source, conversion.output
    if not conversion.merge or not (source / ADAPTER_CONFIG).is_file():
        copy_files(source, output, model_files(source))
        return
    policy = _policy_config(conversion)
    lora = policy.hf_cfg.lora
    if lora is None:
        raise CheckpointError(f"{source} contains an adapter, but the config saved with it has no `policy.hf_cfg.lora`.")
    model = load_model(policy.model_name, options=policy.hf_cfg, dtype=DTYPES[policy.dtype_name], head=policy.head)
    adapters = LoraAdapters(model, lora, base=policy.model_name, head=policy.head)
    adapters.load(source)
    adapters.merge_and_unload()
    whole = WholeModel(model, dtype=DTYPES[policy.dtype_name], head=policy.head, name=policy.model_name)
    whole.save(output, rank=0)
    copy_files(source, output, [name for name in model_files(source) if name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)])


def _policy_config(conversion: Conversion) -> HFPolicyConfig:
    """The policy section without settings that only a run needs, since its engine plugin or GPU kernel may be missing here."""
    given: dict[str, Any] = {**conversion.policy, "generation": None}
    if conversion.model is not None:
        given["model_name"] = conversion.model
    own = {**given.get("hf_cfg", {}), "device_map": None, "attn_implementation": None}
    return HFPolicyConfig.model_validate({**given, "hf_cfg": own})
