"""The rows of NeMo RL's sections `distillation` and `teacher`, and of the loss that compares the two models."""

from __future__ import annotations

from typing import Any

from rlcore_cli.importing.nemo_rl import algorithms
from rlcore_cli.importing.nemo_rl.facts import algorithm_of
from rlcore_cli.importing.rows import (
    ForeignConfig,
    Mapped,
    Redundant,
    Row,
    Unsupported,
    cases,
    converted,
    kept,
    one_of,
    redundant,
    same,
)

_DIVERGENCES = {"forward": "forward_kl", "reverse": "reverse_kl", "mixed": "mixed_kl"}
_NO_STEP = "the teacher is not trained"


def _is_not_distilled(value: Any, foreign: ForeignConfig) -> bool:
    return algorithm_of(foreign) != "distillation"


_NO_TEACHER = (_is_not_distilled, Redundant("only distillation uses a teacher"))

DISTILLATION: list[Row] = [
    *same("distillation", "num_prompts_per_step num_generations_per_prompt max_rollout_turns seed max_val_samples"),
    converted("distillation.max_num_steps", algorithms.steps),
    converted("distillation.max_num_epochs", algorithms.epochs),
    *algorithms.validation_rows("distillation"),
    algorithms.unless_null("distillation.val_batch_size"),
    kept(
        "distillation.topk_logits_k",
        (
            _is_not_distilled,
            Unsupported(
                "a config has one algorithm, and another one was found first: import distillation from a separate file"
            ),
        ),
        to="loss_fn.topk",
    ),
    cases(
        "loss_fn.kl_type",
        _NO_TEACHER,
        *((one_of(name), Mapped({"loss_fn.divergence": native})) for name, native in _DIVERGENCES.items()),
        otherwise=Unsupported(f"divergences: {', '.join(_DIVERGENCES.values())}, jsd"),
    ),
    kept(
        "loss_fn.mixed_kl_weight",
        (
            lambda _, foreign: algorithm_of(foreign) != "distillation" or foreign.get("loss_fn.kl_type", "mixed") != "mixed",
            Redundant("only kl_type: mixed uses it"),
        ),
        (
            one_of(0, 1),
            Unsupported("a weight of 0 or 1 is a single divergence: set loss_fn.divergence to reverse_kl or forward_kl"),
        ),
    ),
    cases(
        "loss_fn.zero_outside_topk",
        _NO_TEACHER,
        (
            lambda value, _: value is False,
            Mapped({"loss_fn.beyond_topk": "renormalize"}, "both models are renormalized over the teacher's top-k tokens"),
        ),
        otherwise=Mapped(
            {"loss_fn.beyond_topk": "bucket"},
            "tokens outside the top-k are treated as one more token; NeMo RL assigns them a teacher log-probability of -100",
        ),
    ),
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
