"""The rows of NeMo RL's sections `distillation` and `teacher`, and of the loss that compares the two models."""

from __future__ import annotations

from typing import Any

from rlcore_cli.importing.nemo_rl import algorithms
from rlcore_cli.importing.nemo_rl.facts import algorithm_of
from rlcore_cli.importing.rows import (
    Decision,
    ForeignConfig,
    Mapped,
    Redundant,
    Row,
    Unsupported,
    converted,
    redundant,
    same,
)

_DIVERGENCES = {"forward": "forward_kl", "reverse": "reverse_kl", "mixed": "mixed_kl"}
_NO_STEP = "the teacher is not trained"


def _is_distilled(foreign: ForeignConfig) -> bool:
    return algorithm_of(foreign) == "distillation"


def _topk(value: Any, foreign: ForeignConfig) -> Decision:
    if not _is_distilled(foreign):
        return Unsupported(
            "a config has one algorithm, and another one was found first: import distillation from a separate file"
        )
    return Mapped({"loss_fn.topk": value})


def _divergence(value: Any, foreign: ForeignConfig) -> Decision:
    if not _is_distilled(foreign):
        return Redundant("only distillation uses a teacher")
    if str(value) not in _DIVERGENCES:
        return Unsupported(f"divergences: {', '.join(_DIVERGENCES.values())}, jsd")
    return Mapped({"loss_fn.divergence": _DIVERGENCES[str(value)]})


def _weight(value: Any, foreign: ForeignConfig) -> Decision:
    if not _is_distilled(foreign) or foreign.get("loss_fn.kl_type", "mixed") != "mixed":
        return Redundant("only kl_type: mixed uses it")
    if value in (0, 1):
        return Unsupported("a weight of 0 or 1 is a single divergence: set loss_fn.divergence to reverse_kl or forward_kl")
    return Mapped({"loss_fn.mixed_kl_weight": value})


def _beyond_topk(value: Any, foreign: ForeignConfig) -> Decision:
    if not _is_distilled(foreign):
        return Redundant("only distillation uses a teacher")
    if value is False:
        return Mapped({"loss_fn.beyond_topk": "renormalize"}, "both models are renormalized over the teacher's top-k tokens")
    return Mapped(
        {"loss_fn.beyond_topk": "bucket"},
        "tokens outside the top-k are treated as one more token; NeMo RL assigns them a teacher log-probability of -100",
    )


DISTILLATION: list[Row] = [
    *same("distillation", "num_prompts_per_step num_generations_per_prompt max_rollout_turns seed max_val_samples"),
    converted("distillation.max_num_steps", algorithms.steps),
    converted("distillation.max_num_epochs", algorithms.epochs),
    *(
        converted(f"distillation.{key}", algorithms.needs_validation(f"distillation.{key}"))
        for key in ("val_period", "val_at_start", "val_at_end")
    ),
    converted("distillation.val_batch_size", algorithms.unless_null("distillation.val_batch_size")),
    converted("distillation.topk_logits_k", _topk),
    converted("loss_fn.kl_type", _divergence),
    converted("loss_fn.mixed_kl_weight", _weight),
    converted("loss_fn.zero_outside_topk", _beyond_topk),
    *redundant("teacher", "generation generation.** generation_batch_size", "the teacher does not sample"),
    *redundant("teacher", "optimizer optimizer.** scheduler scheduler.** max_grad_norm", _NO_STEP),
    *redundant("teacher", "train_global_batch_size train_micro_batch_size offload_optimizer_for_logprob", _NO_STEP),
    *redundant("teacher.megatron_cfg", "optimizer.** scheduler.** distributed_data_parallel_config.**", _NO_STEP),
    *redundant("teacher.dynamic_batching", "train_mb_tokens", _NO_STEP),
    *redundant("teacher.sequence_packing", "train_mb_tokens", _NO_STEP),
    *redundant(
        "teacher", "tokenizer.**", "the teacher must use the policy's tokenizer, which is checked before the run starts"
    ),
]

DEFAULTS: dict[str, Any] = {
    "distillation.num_prompts_per_step": 128,
    "distillation.topk_logits_k": 64,
    "loss_fn.kl_type": "mixed",
    "loss_fn.zero_outside_topk": False,
}
"""NeMo RL's defaults, where rlcore's differ."""
