"""Decides whether a model can compute rows with a shared prefix: by its config, and by a test input."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from rl_backends_base import padded_input
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.cpu_attention import CPU_SDPA
from rl_backends_hf.scoring.model_inputs import shared_input
from rl_backends_hf.scoring.probe import random_head, tolerance
from rl_backends_hf.scoring.scoring_model import ScoringModel
from rl_backends_hf.transformers_internals import attention_of, layers_of
from rl_backends_hf.varlen_attention import VARLEN, use_varlen
from rl_core.errors import RLCoreError

_log = logging.getLogger(__name__)

SUPPORTED = "full causal attention, checked on a test input"


def why_not_shared(
    scoring: ScoringModel, config: HFPolicyConfig, *, device: torch.device, computed_in: torch.dtype
) -> str | None:
    """Why rows with the same prompt cannot share its computation; None if they can.

    Args:
        scoring: the model.
        config: the section of the model.
        device: device of the model.
        computed_in: dtype to which products are rounded.
    """
    return why_disabled(config) or why_not_plain(scoring, device=device, computed_in=computed_in)


def why_disabled(config: HFPolicyConfig) -> str | None:
    """Why the config of a model excludes that rows share a computation; None if it does not."""
    lora = config.hf_cfg.lora
    if config.shared_prefix == "off":
        return "`shared_prefix` is off"
    if lora is not None and lora.dropout > 0:
        return "with `lora.dropout`, rows would share the dropped elements of their prefix"
    return None


def use_varlen_if_plain(scoring: ScoringModel, *, packing: bool, computed_in: torch.dtype) -> bool:
    """Use the variable-length kernel on a GPU; returns whether it is used. Otherwise, the model keeps SDPA with a mask.

    Args:
        scoring: the model.
        packing: whether rows will be packed; then, a warning says why the kernel is not used.
        computed_in: dtype to which products are rounded.
    """
    model = scoring.model
    if not use_varlen(model, computed_in=computed_in):
        return False
    why = why_not_plain(scoring, device=model.device, computed_in=computed_in)
    if why is None:
        return True
    model.set_attn_implementation("sdpa")
    if packing:
        _log.warning("Packed rows are computed with a dense attention mask, quadratic in their tokens: %s.", why)
    return False


def why_not_plain(scoring: ScoringModel, *, device: torch.device, computed_in: torch.dtype) -> str | None:
    """Why the attention of a model cannot be computed by our own functions for rows in one sequence; None if it can.

    Args:
        scoring: the model.
        device: device of the model.
        computed_in: dtype to which products are rounded.
    """
    used = attention_of(scoring.model)
    if used not in (CPU_SDPA, VARLEN):
        on_gpus = "; on GPUs, the kernel requires bfloat16" if device.type == "cuda" else ""
        return f"the attention implementation is {used!r}{on_gpus}"
    return why_not_full_attention(scoring.model) or _failed_probe(scoring, device, computed_in)


def why_not_full_attention(model: PreTrainedModel) -> str | None:
    """Why a model does not have full attention in all layers; None if it has."""
    try:
        kinds, _ = layers_of(model.config.get_text_config(decoder=True))
    except (AttributeError, KeyError, TypeError) as error:
        return f"the layer types of {type(model).__name__} are unknown ({error})"
    if other := sorted(set(kinds) - {"full_attention"}):
        return f"{type(model).__name__} has layers of type {', '.join(other)}"
    return None


def _failed_probe(scoring: ScoringModel, device: torch.device, computed_in: torch.dtype) -> str | None:
    """How the scores of a test input with a shared prefix differ from those of its rows; None if they agree."""
    ids = torch.randint(0, scoring.vocab_size, (4, 9), generator=torch.Generator().manual_seed(0))
    ids[1:3, :4] = ids[0, :4]
    lengths, prompts = torch.tensor([9, 6, 8, 7]), torch.tensor([0, 0, 0, 1])
    with torch.no_grad(), random_head(scoring):
        alone = scoring.score(padded_input(ids, lengths, device=device, shift=scoring.shift))
        try:
            shared = scoring.score(shared_input(ids, lengths, prompts, device=device, shift=scoring.shift))
        except (TypeError, ValueError, RuntimeError, RLCoreError) as error:
            return f"{type(scoring.model).__name__} does not support it: {error}"
    # The mean, because single tokens of a bfloat16 model with many layers differ by more than the tolerance. Attention between
    # rows changes it by nearly 1 nat.
    column = torch.arange(ids.shape[1])
    scored = (column >= scoring.shift) & (column < lengths.unsqueeze(1))
    difference = float((alone - shared).abs()[scored.to(alone.device)].mean())
    if difference <= tolerance(computed_in):
        return None
    return f"the {scoring.column} of {type(scoring.model).__name__} for a test input change by {difference:.3g} with it"
