"""The linear layers that adapters are added to, by their names in the Hugging Face model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rl_backends_base.adapter_folder import ALL_LINEAR
from rl_backends_base.lora_section import AdapterConfig, matching_names, nothing_left_error
from rl_backends_megatron.families import family_of
from rl_core.errors import NotSupportedError

LORA: Final = "policy.megatron_cfg.lora"
_LINEAR: Final = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")


def adapted_layers(hf: Any, config: AdapterConfig, *, model_name: str) -> set[str]:
    """Names of the Hugging Face model's linear layers to adapt.

    Args:
        hf: the Hugging Face config.
        config: `policy.megatron_cfg.lora`.
        model_name: `policy.model_name`.

    Raises:
        UserError: a name matches nothing, or nothing is left to adapt.
        NotSupportedError: a name matches a layer that cannot be adapted, or the model has no table.
    """
    linear_layers, others = set[str](), set[str]()
    for weight in family_of(hf, model_name=model_name).weights:
        names = {hf.removesuffix(".weight").replace("{expert}", "0") for hf in weight.hf if hf.endswith(".weight")}
        adaptable = not weight.is_expert and weight.megatron[0].endswith(_LINEAR)
        each = {name.format(layer=layer) for name in names for layer in range(hf.num_hidden_layers)}
        (linear_layers if adaptable else others).update(each)

    def matching(wanted: str | Sequence[str], key: str) -> set[str]:
        return matching_names(wanted, linear_layers | others, linear_layers, section=LORA, key=key)

    wanted = config.target_modules
    targets = set(linear_layers) if wanted == ALL_LINEAR else matching(wanted, "target_modules")
    targets -= matching(config.exclude_modules or [], "exclude_modules")
    if unsupported := sorted(targets - linear_layers):
        what = "belongs to an expert of a mixture" if ".experts." in unsupported[0] else "is not a linear layer of a block"
        ends = ", ".join(sorted({name.rpartition(".")[2] for name in linear_layers}))
        raise NotSupportedError(
            f"`{LORA}.target_modules`: {unsupported[0]} {what}, which the Megatron backend does not adapt. Name only {ends}; "
            f"{ALL_LINEAR!r} means all of them.",
            key=f"{LORA}.target_modules",
        )
    if not targets:
        raise nothing_left_error(LORA)
    return targets
