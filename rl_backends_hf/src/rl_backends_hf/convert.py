"""A checkpoint of this backend as a folder that others load: a copy, an adapter, or its merge with the base; knows no run."""

from __future__ import annotations

import shutil
from typing import Any

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraAdapters
from rl_backends_hf.model import DTYPES, load_model
from rl_backends_hf.weights_folder import save_weights
from rl_core.errors import CheckpointError
from rl_core.interfaces.conversion import Conversion


def to_folder(conversion: Conversion) -> None:
    """Fill the output with what Transformers loads, or, where adapters are not to be merged, peft.

    Merged weights are those that a refit hands on, bit for bit.

    Raises:
        UserError: the base is not where the checkpoint says.
        CheckpointError: the adapter is torn, or of another model than the base.
    """
    source, output = conversion.source, conversion.output
    if not conversion.merge or not (source / ADAPTER_CONFIG).is_file():
        shutil.copytree(source, output, dirs_exist_ok=True)
        return
    policy = _policy(conversion)
    lora = policy.hf_cfg.lora
    if lora is None:
        raise CheckpointError(f"{source} holds an adapter, and the config that is kept beside it has no `policy.hf_cfg.lora`.")
    model = load_model(policy.model_name, options=policy.hf_cfg, dtype=DTYPES[policy.precision], head=policy.head)
    adapters = LoraAdapters(model, lora, base=policy.model_name, head=policy.head)
    adapters.load(source)
    adapters.merge_and_unload()
    save_weights(model, output, dtype=DTYPES[policy.precision], rank=0)
    for file in source.iterdir():
        if file.name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            shutil.copy(file, output / file.name)


def _policy(conversion: Conversion) -> HFPolicyConfig:
    """The section, without what only a run needs: its engine may be of a plugin, and its kernel of a GPU, that are not here."""
    given: dict[str, Any] = {**conversion.policy, "generation": None}
    if conversion.model is not None:
        given["model_name"] = conversion.model
    own = {**given.get("hf_cfg", {}), "device_map": None, "attn_implementation": None}
    return HFPolicyConfig.model_validate({**given, "hf_cfg": own})
