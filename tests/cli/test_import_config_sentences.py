"""The reasons that `rlcore import-config` gives agree with the config keys and components that rlcore has."""

import re

import pytest

from rl_core.plugins.component import Kind
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.reference import schema_index
from rlcore_cli.explain import known_keys
from rlcore_cli.importing.table import nemo_rl

REGISTRY = Registry(discover())
KEYS = set(known_keys(schema_index(REGISTRY)))
COMPONENTS = {f"{kind} {name}" for kind in Kind for name in REGISTRY.names(kind)}
PARTS = {name for kind in (Kind.POLICY, Kind.GENERATION, Kind.ENVIRONMENT, Kind.LOGGER) for name in REGISTRY.names(kind)}
REASONS = {}
"""The patterns of NeMo RL's keys by the reason why rlcore does not support them, and whether it supports some values."""
for row in nemo_rl().rows:
    is_partly_kept = any(not case.keys() & {"redundant", "unsupported", "call"} for case in row.cases)
    for case in row.cases:
        if "unsupported" in case:
            REASONS.setdefault(case["unsupported"], []).append((row.pattern, is_partly_kept))

SAME_NAME = {
    "adv_estimator.reward_weights": "in NeMo RL, a list",
    "ppo.use_dynamic_sampling": "a key of grpo",
    "ppo.adv_estimator.name": "a key of grpo",
    "value_loss_fn.scale": "a key of environments",
    "reward_model_cfg.enabled": "another component",
    "reward_model_cfg.reward_model_type": "another component",
    "dtensor_cfg.tensor_parallel_size": "a key of other backends",
    "peft.dropout": "a key of the backend hf",
    "dtensor_cfg.context_parallel_size": "a key of other backends",
    "dtensor_cfg.sequence_parallel": "a key of other backends",
    "generation.refit_transport": "other names",
    "env.*.math_verify_impl": "another component",
}
"""Unsupported keys of NeMo RL with a name that something else has in rlcore, and what that is."""

LACKING = {
    "draft models are not trained": r"draft",
    "experts are routed again in training": r"router_replay",
    "MTP heads are not supported": r"\bmtp",
    "training uses no CUDA graphs": r"policy\.megatron_cfg\..*graph",
    "adapters of megatron_cfg.lora have no dropout": r"policy\.megatron_cfg\.lora\.dropout",
    "training is in float32 or bfloat16": r"fp8_cfg",
    "checkpoints are saved synchronously": r"checkpointing\..*async",
    "GPUs are not monitored": r"logger\..*(monitor|gpu)",
    "tokens cannot be forbidden": r"bad_words|banned|forbidden",
    "Megatron is not available as a generation backend": r"^generation megatron$",
    "vLLM does not shard experts": r"vllm_cfg\..*expert",
    "the loss has no log-likelihood term": r"^loss_fn\..*nll",
    "no loss has a reward scale": r"^loss_fn\.reward_scale",
    "grpo does not use a teacher": r"^grpo\..*teacher",
    "loggers: tensorboard, wandb, mlflow, or your own": r"^logger (?!tensorboard|wandb|mlflow|console|jsonl)",
}
"""Features that a reason says are missing, and what their keys or components would be called."""


def test_every_rlcore_key_in_a_reason_exists():
    named = set(re.findall(r"\b(?:rollout|policy|data|loss_fn|checkpointing)\.[\w.]*\w", "\n".join(REASONS)))
    assert {"rollout.max_staleness", "policy.generation.resources", "data.mix"} <= named <= KEYS


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_names_the_config_key_or_component_that_has_the_name_of_the_unsupported_one(reason):
    for pattern, is_partly_kept in REASONS[reason]:
        *_, name = [part for part in pattern.split(".") if "*" not in part and part != "enabled"]
        keys = [key for key in KEYS if key.rpartition(".")[2] == name]
        components = [one for one in PARTS if re.search(rf"(^|_){re.escape(one)}(_|$)", name)]
        if (keys or components) and not is_partly_kept and not reason.startswith("must be a section"):
            is_named = any(one in reason for one in (*keys, *components))
            assert is_named or pattern.endswith(tuple(SAME_NAME)), (pattern, keys, components)


@pytest.mark.parametrize("reason", LACKING)
def test_a_feature_that_a_reason_calls_missing_is_missing(reason):
    assert reason in REASONS
    assert [name for name in (*KEYS, *COMPONENTS) if re.search(LACKING[reason], name)] == []
