"""Finds modules by the names in the config: the linear layers and experts that LoRA adapts, and frozen modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Final

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rl_backends_base.adapter_folder import ALL_LINEAR, matching
from rl_backends_base.adapters import fused_experts
from rl_backends_base.lora_section import matching_names, nothing_left_error
from rl_backends_hf.model_options import LoRAConfig
from rl_backends_hf.pictures import language_model
from rl_backends_hf.scoring.scoring_model import HEAD_NAME, scalar_head
from rl_backends_hf.transformers_internals import read_directly
from rl_core.backend import Head
from rl_core.errors import UserError
from rl_core.plugins.component import did_you_mean

_SECTION: Final = "policy.hf_cfg.lora"


def check_targets(model: PreTrainedModel, config: LoRAConfig, *, head: Head) -> None:
    """Reject names that match nothing and modules that cannot be adapted.

    Args:
        model: a plain model, possibly without weights (device `meta`).
        config: `policy.hf_cfg.lora`.
        head: the model's head type.

    Raises:
        UserError: as `LoraAdapters`.
    """
    lora_targets(model, config, head=scalar_head(model) if head == "scalar" else model.get_output_embeddings())
    expert_targets(model, config)


def lora_targets(model: PreTrainedModel, config: LoRAConfig, *, head: nn.Module | None) -> set[str]:
    """Names of the linear layers to adapt; rejects names that match nothing, and modules that cannot be adapted.

    `all-linear` and names in a list mean layers of the language model; a vision tower's are adapted if a name or an expression
    matches only those. `all-linear` leaves out layers whose weight the code around them reads.
    """
    text = {*language_model(model).modules()}
    modules = {name: module for name, module in model.named_modules() if name}
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D) and module is not head}
    hint, direct = experts_hint(model), read_directly(model)
    match = partial(matching_names, names=modules, linear=linear, section=_SECTION, hint=hint)
    excluded = match(config.exclude_modules or [], key="exclude_modules")
    wanted = config.target_modules
    if wanted == ALL_LINEAR:
        targets = {name for name in linear - direct.keys() if modules[name] in text}
    elif isinstance(wanted, str):
        targets = match(wanted, key="target_modules")
    else:
        targets = set()
        for each in wanted:
            matching = match([each], key="target_modules")
            targets |= {name for name in matching if modules[name] in text} or matching
    for name in sorted((targets - excluded) & direct.keys()):
        raise UserError(
            f"`{_SECTION}.target_modules`: {name} cannot be adapted: {direct[name]} multiplies with its weight itself, so an "
            f"adapter would have no effect. Leave it out; {ALL_LINEAR!r} does so.",
            key=f"{_SECTION}.target_modules",
        )
    for name in sorted(targets - excluded - linear):
        _reject_module(name, modules[name], is_head=modules[name] is head, hint=hint)
    if not targets - excluded and not config.target_parameters:
        raise nothing_left_error(_SECTION)
    return targets - excluded


def expert_targets(model: PreTrainedModel, config: LoRAConfig) -> set[str]:
    """Names of the tensors of experts to adapt, which peft would match too; rejects names that match something else."""
    key, fused = f"{_SECTION}.target_parameters", fused_experts(model)
    names = [name for name, _ in model.named_parameters()]
    if config.target_parameters and not fused:
        raise UserError(
            f"`{key}`: {type(model).__name__} has no tensor that stacks the experts of a layer. Remove it; linear layers "
            "belong in target_modules.",
            key=key,
        )
    known, targets = ", ".join(_ends(fused, 2)), set[str]()
    for wanted in config.target_parameters:
        found = matching([wanted], names)
        if not found:
            meant = did_you_mean(wanted, _ends(fused, 1) + _ends(fused, 2))
            raise UserError(
                f"`{key}`: {wanted!r} matches no tensor of the model.{meant} Tensors of its experts are {known}.",
                key=key,
            )
        for name in sorted(found - fused.keys()):
            raise UserError(
                f"`{key}`: {wanted!r} matches {name}, which does not stack the experts of a layer. Linear layers belong in "
                f"target_modules; tensors of experts are {known}.",
                key=key,
            )
        targets |= found
    return targets


def experts_hint(model: PreTrainedModel) -> str:
    """A sentence that says how the experts of a model are adapted; empty if it has no fused ones."""
    ends = _ends(fused_experts(model), 2)
    return f" Its experts are fused, and adapted with target_parameters: [{', '.join(ends)}]." if ends else ""


def _ends(names: Iterable[str], components: int) -> list[str]:
    return sorted({".".join(name.split(".")[-components:]) for name in names})


def freeze_modules(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Exclude the weights of modules from training.

    Args:
        model: a plain model, possibly without weights (device `meta`).
        patterns: `policy.hf_cfg.freeze`.

    Raises:
        UserError: a pattern matches no module, or nothing is left to train.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]
        if not matching:
            ends = list(dict.fromkeys(name.rpartition(".")[2] for name in sorted(names, key=lambda each: each.count("."))))
            known = [name for name in ends if not name.isdigit()]
            raise UserError(
                f"`policy.hf_cfg.freeze`: {pattern!r} matches no module of the model.{did_you_mean(pattern, known)} Some of "
                f"its modules are {', '.join(known[:12])}.",
                key="policy.hf_cfg.freeze",
            )
        for name in matching:
            model.get_submodule(name).requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            "`policy.hf_cfg.freeze` matches all weights, so nothing would be trained. Leave some out, or set `frozen: true` "
            "for a model that only scores.",
            key="policy.hf_cfg.freeze",
        )


def _reject_module(name: str, module: nn.Module, *, is_head: bool, hint: str) -> None:
    if is_head and name == HEAD_NAME:
        raise UserError(
            f"`policy.hf_cfg.lora.target_modules`: {name} is the scalar head, which is trained in full. Leave it out; "
            f"{ALL_LINEAR!r} means all other linear layers.",
            key="policy.hf_cfg.lora.target_modules",
        )
    if is_head:
        raise UserError(
            f"`policy.hf_cfg.lora.target_modules`: {name} is the LM head, which cannot be adapted: log-probabilities are "
            f"computed in chunks from its plain matrix. Leave it out; {ALL_LINEAR!r} means all other linear layers.",
            key="policy.hf_cfg.lora.target_modules",
        )
    inside = sorted({key.rpartition(".")[2] for key, child in module.named_modules() if key and isinstance(child, nn.Linear)})
    hint = f" Name the linear layers in it: {', '.join(inside)}.{hint}" if inside else hint
    raise UserError(
        f"`policy.hf_cfg.lora.target_modules`: {name} is a {type(module).__name__}, but only linear layers can be adapted."
        f"{hint}",
        key="policy.hf_cfg.lora.target_modules",
    )
