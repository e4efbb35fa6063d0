"""The tested parallel layouts, and the work of the ranks of one launch in each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from rl_backends_megatron.config import MegatronConfig
from rl_backends_megatron.policy import grid
from rl_core.cluster.sharding import NamedSharding

BUDGET = {"input_key": "input_ids", "input_lengths_key": "input_lengths", "max_tokens_per_microbatch": 40}
FORMS: dict[str, tuple[dict, dict]] = {
    "by_count": ({}, {}),
    "token_budget": (
        {"dynamic_batching": {"enabled": True}},
        {"dynamic_batching_args": {**BUDGET, "sequence_length_round": 4}},
    ),
    "packed": (
        {"sequence_packing": {"enabled": True}},
        {"sequence_packing_args": {**BUDGET, "algorithm": "modified_first_fit_decreasing"}},
    ),
}
ADAM = {"name": "torch.optim.AdamW", "kwargs": {"lr": 2e-3, "weight_decay": 0.1}}
SMALL_STEPS = {
    "name": "torch.optim.AdamW",
    "kwargs": {"lr": 8e4, "eps": 1e8, "betas": [0.0, 0.999], "weight_decay": 0.0},
}
"""Steps of 8e-4 times the gradient, by Adam: far below the distance of two neighbours in bfloat16."""
STEPS = 4
"""The last has the whole learning rate: the warm-up takes three."""
TRAINING = {
    "optimizer": ADAM,
    "scheduler": {"name": "linear", "kwargs": {"num_warmup_steps": 3, "num_training_steps": 40}},
    "max_grad_norm": 1.0,
    "train_micro_batch_size": 3,
}


@dataclass(frozen=True)
class Layout:
    """One parallel layout of one model."""

    kind: str
    world: int
    megatron: dict[str, Any]
    form: str = "by_count"
    fields: dict[str, Any] = field(default_factory=dict)


TP2 = {"tensor_model_parallel_size": 2}
SP = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
INTERLEAVED = {**PP2, "virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAP = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 4000}
RECOMPUTE = {"activation_checkpointing": True}
SCALAR = {"head": "scalar"}


def grid_of(layout: Layout) -> NamedSharding:
    """Its ranks by the named axes."""
    return grid(MegatronConfig(**layout.megatron), layout.world)


LAYOUTS = {
    "tp2": Layout("llama", 2, TP2),
    "tp2-qwen2": Layout("qwen2", 2, {**TP2, "recompute_granularity": "selective"}),
    "tp2-mistral": Layout("mistral", 2, TP2, "packed"),
    "tp2-gemma": Layout("gemma", 2, TP2, "packed"),
    "tp2-sp-gemma": Layout("gemma", 2, SP),
    "tp2-sp": Layout("qwen3", 2, SP),
    "tp2-sp-packed": Layout("qwen3", 2, SP, "packed"),
    "tp2-budget": Layout("llama-tied", 2, TP2, "token_budget", RECOMPUTE),
    "pp2": Layout("llama-tied", 2, PP2),
    "pp2-gemma": Layout("gemma", 2, PP2),
    "pp2-packed": Layout("llama", 2, PP2, "packed"),
    "pp2-uneven": Layout("qwen2", 2, {**PP2, "num_layers_in_first_pipeline_stage": 3}, "token_budget"),
    "interleaved": Layout("llama-tied", 2, INTERLEAVED),
    "interleaved-packed": Layout("qwen3", 2, INTERLEAVED, "packed"),
    "dp2": Layout("qwen3", 2, {}),
    "dp2-packed": Layout("llama", 2, {}, "packed"),
    "dp2-distributed": Layout("qwen3", 2, DISTRIBUTED, "token_budget"),
    "dp2-overlap": Layout("llama", 2, OVERLAP),
    "cp2": Layout("qwen2", 2, CP2),
    "cp2-packed": Layout("llama-tied", 2, CP2, "packed"),
    "ep2": Layout("qwen3-moe", 2, EP2),
    "ep2-mixtral-packed": Layout("mixtral", 2, EP2, "packed"),
    "moe-tp2": Layout("qwen3-moe-raw", 2, SP),
    "one": Layout("llama-tied", 1, {}),
    "one-distributed": Layout("llama-tied", 1, DISTRIBUTED),
    "dp2-tied": Layout("llama-tied", 2, {}),
    "dp2-tied-distributed": Layout("llama-tied", 2, DISTRIBUTED),
    "interleaved-distributed": Layout("llama-tied", 2, {**INTERLEAVED, **DISTRIBUTED}),
    "tp2-dp2-distributed": Layout("llama-tied", 4, {**SP, **OVERLAP}),
    "tp2-pp2-tied": Layout("llama-tied", 4, {**SP, **PP2}),
    "ep2-distributed": Layout("qwen3-moe", 2, {**EP2, **DISTRIBUTED}),
    "moe-dp2": Layout("qwen3-moe", 2, {}),
    "moe-dp2-distributed": Layout("qwen3-moe", 2, DISTRIBUTED),
    "moe-one": Layout("qwen3-moe", 1, {}),
    "tp2-pp2": Layout("llama", 4, {**SP, **PP2}),
    "tp2-pp2-packed": Layout("llama-tied", 4, {**TP2, **PP2}, "packed"),
    "pp2-dp2": Layout("qwen3", 4, {**PP2, **OVERLAP}),
    "tp2-cp2-packed": Layout("qwen3", 4, {**SP, **CP2}, "packed"),
    "tp2-ep2": Layout("qwen3-moe", 4, {**SP, **EP2, **DISTRIBUTED}),
    "value-tp2": Layout("qwen3-value", 2, TP2, "packed", SCALAR),
    "value-tp2-sp": Layout("llama-tied-value", 2, SP, fields=SCALAR),
    "value-pp2": Layout("llama-tied-value", 2, PP2, "token_budget", SCALAR),
    "value-interleaved": Layout("qwen3-value", 2, INTERLEAVED, fields=SCALAR),
    "value-dp2-distributed": Layout("qwen3-value", 2, DISTRIBUTED, fields=SCALAR),
    "value-cp2-packed": Layout("llama-tied-value", 2, CP2, "packed", SCALAR),
    "value-ep2": Layout("qwen3-moe-value", 2, EP2, fields=SCALAR),
}


PARITY = [
    "tp2", "tp2-qwen2", "tp2-mistral", "tp2-gemma", "tp2-sp-gemma", "pp2-gemma", "tp2-sp", "tp2-sp-packed", "tp2-budget",
    "pp2", "pp2-packed", "pp2-uneven", "interleaved", "interleaved-packed", "dp2", "dp2-packed", "dp2-distributed",
    "dp2-overlap", "cp2", "cp2-packed", "ep2", "ep2-mixtral-packed", "moe-tp2", "tp2-pp2", "tp2-pp2-packed", "pp2-dp2",
    "tp2-cp2-packed", "tp2-ep2",
]  # fmt: skip
"""Layouts whose numbers are compared with those of Transformers."""

VALUES = [name for name in LAYOUTS if name.startswith("value-")]
"""Layouts of models with a scalar head."""

CANDIDATES = [
    "tp2", "tp2-budget", "tp2-sp-packed", "pp2", "pp2-packed", "interleaved", "dp2-distributed", "cp2", "cp2-packed", "ep2",
    "tp2-pp2-packed", "tp2-cp2-packed",
]  # fmt: skip
"""Layouts for tests of top-k tokens and candidates."""

MASTERS = [
    "tp2-sp", "pp2", "interleaved-distributed", "dp2-overlap", "ep2-distributed", "moe-dp2", "value-pp2", "tp2-pp2-tied",
    "tp2-dp2-distributed", "tp2-ep2",
]  # fmt: skip
"""Layouts whose float32 weights behind bfloat16 ones are looked at."""

RESUMES = [
    ("tp2-pp2-tied", "one"),
    ("tp2-pp2-tied", "dp2-tied"),
    ("tp2-pp2-tied", "pp2"),
    ("tp2-pp2-tied", "tp2-pp2-tied"),
    ("tp2-dp2-distributed", "one-distributed"),
    ("tp2-dp2-distributed", "dp2-tied-distributed"),
    ("tp2-dp2-distributed", "interleaved-distributed"),
    ("tp2-dp2-distributed", "tp2-dp2-distributed"),
    ("tp2-ep2", "ep2-distributed"),
    ("tp2-ep2", "moe-dp2-distributed"),
    ("moe-dp2-distributed", "ep2-distributed"),
    ("ep2", "moe-one"),
    ("moe-dp2", "ep2"),
]
"""Which layout saves, and which resumes."""


COVER = {
    "check": {
        "tp2-qwen2", "tp2-budget", "tp2-sp-gemma", "pp2-uneven", "interleaved", "interleaved-packed", "dp2-distributed",
        "dp2-overlap", "cp2", "ep2-mixtral-packed", "tp2-pp2", "tp2-pp2-packed", "pp2-dp2", "tp2-cp2-packed", "tp2-ep2",
    },
    "candidates": {"tp2-sp-packed", "interleaved", "cp2"},
    "masters": {"interleaved-distributed", "ep2-distributed", "value-pp2"},
    "resume": {("tp2-pp2-tied", "one"), ("tp2-dp2-distributed", "one-distributed"), ("moe-dp2", "ep2")},
    "values": {"value-tp2", "value-interleaved", "value-dp2-distributed"},
}  # fmt: skip
"""What CI runs. `check` has every pair of settings of its full matrix, `PARITY`; the others have examples."""


def settings_of(layout: Layout) -> dict[str, Any]:
    """What a layout chooses, by name: one way of division, of batching, of recomputation and so on."""
    megatron = layout.megatron
    pipeline = megatron.get("pipeline_model_parallel_size", 1)
    if "num_layers_in_first_pipeline_stage" in megatron:
        pipeline = "uneven"
    elif "virtual_pipeline_model_parallel_size" in megatron:
        pipeline = "interleaved"
    optimizer = "distributed" if megatron.get("use_distributed_optimizer") else "whole"
    return {
        "tensor": megatron.get("tensor_model_parallel_size", 1),
        "sequence": megatron.get("sequence_parallel", False),
        "pipeline": pipeline,
        "context": megatron.get("context_parallel_size", 1),
        "expert": megatron.get("expert_model_parallel_size", 1),
        "data": grid_of(layout).get_axis_size("data"),
        "optimizer": "overlapped" if megatron.get("overlap_grad_reduce") else optimizer,
        "form": layout.form,
        "recompute": megatron.get("recompute_granularity", "full" if layout.fields.get("activation_checkpointing") else None),
    }


FULL = pytest.mark.full("every pair of settings is in the cover, `COVER`, that runs in CI")


def tiered(verb: str, names: Iterable[Any]) -> list[Any]:
    """Parameters of a test: those outside the cover run in `make test-full` only."""
    values = [name if isinstance(name, tuple) else (name,) for name in names]
    return [pytest.param(*value, marks=() if name in COVER[verb] else FULL) for name, value in zip(names, values, strict=True)]


def jobs(world: int, *, full: bool) -> list[str]:
    """The jobs of this number of ranks in one launch: all, or only the cover."""

    def chosen(verb: str, names: Iterable[Any]) -> list[Any]:
        return [name for name in names if full or name in COVER[verb]]

    checks = [f"check:{name}" for name in chosen("check", PARITY) if LAYOUTS[name].world == world]
    checks += [f"candidates:{name}" for name in chosen("candidates", CANDIDATES) if LAYOUTS[name].world == world]
    checks += [f"masters:{name}" for name in chosen("masters", MASTERS) if LAYOUTS[name].world == world]
    pairs = chosen("resume", RESUMES)
    saves = [f"save:{name}" for name in dict.fromkeys(saved for saved, _ in pairs) if LAYOUTS[name].world == world]
    resumes = [f"resume:{saved}:{name}" for saved, name in pairs if LAYOUTS[name].world == world]
    vocabulary = ["vocabulary", *(f"values:{name}" for name in chosen("values", VALUES))] if world == 2 else []
    return [*vocabulary, *checks, *saves, *resumes]
