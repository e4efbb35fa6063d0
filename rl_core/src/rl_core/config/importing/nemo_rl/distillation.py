"""The rows of NeMo RL's sections `distillation` and `teacher`, and of the loss that compares the two models."""

from __future__ import annotations

from typing import Any

from rl_core.config.importing.nemo_rl import algorithms
from rl_core.config.importing.nemo_rl.facts import algorithm_of
from rl_core.config.importing.rows import Becomes, Decision, Refused, Row, Theirs, Unneeded, by, nothing, same

_DIVERGENCES = {"forward": "forward_kl", "reverse": "reverse_kl", "mixed": "mixed_kl"}
_NO_STEP = "the teacher takes no optimizer step"


def _is_distilled(theirs: Theirs) -> bool:
    return algorithm_of(theirs) == "distillation"


def _topk(value: Any, theirs: Theirs) -> Decision:
    if not _is_distilled(theirs):
        return Refused("a file has one algorithm, and another section comes first: import distillation from a file of its own")
    return Becomes({"loss_fn.topk": value})


def _divergence(value: Any, theirs: Theirs) -> Decision:
    if not _is_distilled(theirs):
        return Unneeded("only distillation compares with a teacher")
    if str(value) not in _DIVERGENCES:
        return Refused(f"divergences here: {', '.join(_DIVERGENCES.values())}, jsd")
    return Becomes({"loss_fn.divergence": _DIVERGENCES[str(value)]})


def _weight(value: Any, theirs: Theirs) -> Decision:
    if not _is_distilled(theirs) or theirs.get("loss_fn.kl_type", "mixed") != "mixed":
        return Unneeded("only kl_type: mixed uses it")
    if value in (0, 1):
        return Refused("a weight of 0 or 1 is a single divergence: set loss_fn.divergence to reverse_kl or forward_kl")
    return Becomes({"loss_fn.mixed_kl_weight": value})


def _beyond_topk(value: Any, theirs: Theirs) -> Decision:
    if not _is_distilled(theirs):
        return Unneeded("only distillation compares with a teacher")
    if value is False:
        return Becomes({"loss_fn.beyond_topk": "renormalize"}, "both models are renormalized over the teacher's top-k tokens")
    return Becomes(
        {"loss_fn.beyond_topk": "bucket"},
        "tokens outside the top-k are compared as one more token; NeMo RL assigns them a teacher log-probability of -100",
    )


DISTILLATION: list[Row] = [
    *same("distillation", "num_prompts_per_step num_generations_per_prompt max_rollout_turns seed max_val_samples"),
    by("distillation.max_num_steps", algorithms.steps),
    by("distillation.max_num_epochs", algorithms.epochs),
    *(
        by(f"distillation.{key}", algorithms.needs_validation(f"distillation.{key}"))
        for key in ("val_period", "val_at_start", "val_at_end")
    ),
    by("distillation.val_batch_size", algorithms.unless_null("distillation.val_batch_size")),
    by("distillation.topk_logits_k", _topk),
    by("loss_fn.kl_type", _divergence),
    by("loss_fn.mixed_kl_weight", _weight),
    by("loss_fn.zero_outside_topk", _beyond_topk),
    *nothing("teacher", "generation generation.** generation_batch_size", "the teacher does not sample"),
    *nothing("teacher", "optimizer optimizer.** scheduler scheduler.** max_grad_norm", _NO_STEP),
    *nothing("teacher", "train_global_batch_size train_micro_batch_size offload_optimizer_for_logprob", _NO_STEP),
    *nothing("teacher.megatron_cfg", "optimizer.** scheduler.** distributed_data_parallel_config.**", _NO_STEP),
    *nothing("teacher.dynamic_batching", "train_mb_tokens", _NO_STEP),
    *nothing("teacher.sequence_packing", "train_mb_tokens", _NO_STEP),
    *nothing("teacher", "tokenizer.**", "the teacher must have the policy's tokenizer, which is checked before the run starts"),
]

DEFAULTS: dict[str, Any] = {
    "distillation.num_prompts_per_step": 128,
    "distillation.topk_logits_k": 64,
    "loss_fn.kl_type": "mixed",
    "loss_fn.zero_outside_topk": False,
}
"""What NeMo RL uses for a key that its file does not set, if our default differs."""
