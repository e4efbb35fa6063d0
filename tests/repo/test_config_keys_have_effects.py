"""Every config key has an effect: the code that it configures reads it, and if it is cheap, a change is observed.

A read is an attribute of a value whose type, as mypy infers it, is the key's model. Reads in validators, in rules about a
config, in commands that print it and in unused methods of a model do not count.
"""

import ast
from collections import defaultdict
from functools import cache

import pytest
import torch
from typed_reads import attribute_reads

from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_sandbox.config import SandboxConfig
from rl_train.config.reference import schema_index

OURS = ("core", "train", "hf", "megatron", "vllm", "openai", "sandbox", "envs")
VALIDATORS = {"field_validator", "model_validator"}
CHECKING_METHODS = {"conflicts", "deep_conflicts"}
CHECKS = ("rl_train/config/rules/", "_checks.py", "assembly/checks.py", "cli/")
"""Decorators, methods and files of the code that only rejects or prints a config."""

BY_EACH = {
    ("rl_backends_hf", "rl_backends_megatron"): {
        "activation_checkpointing",
        "dtype_name",
        "frozen",
        "head",
        "logprob_batch_size",
        "max_grad_norm",
        "model_name",
        "train_micro_batch_size",
    },
    ("rl_backends_hf", "rl_backends_vllm", "rl_backends_openai"): {
        "max_new_tokens",
        "stop_strings",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    },
}
"""Keys of the base sections that each backend must apply itself; `dtype_name` is the value of `precision`."""

EXEMPT = {
    "AlgorithmPathConfig.train": "`resolve_sections` reads it before the section is validated",
    "AlgorithmPathConfig.config": "likewise",
    "DataConfig.train_data_path": "`expand_aliases` replaces it by `data.train` before the section is validated",
    "DataConfig.val_data_path": "likewise, by `data.validation`",
    "SandboxConfig.options": "for sandboxes of other distributions; a config that sets it for ours is rejected",
}
"""Keys that no code reads from the section, and why they have an effect."""


@cache
def registry():
    return Registry(discover())


@cache
def keys():
    """Each key as the model that declares it and its name."""
    fields = [field for section in schema_index(registry(), plugins=OURS).sections for field in section.fields()]
    return {(field.owner, field.name) for field in fields if field.model is None}


def full_name(model, name):
    return f"{model.__module__}.{model.__qualname__}.{name}"


def is_check(read):
    """Whether a read is in code that only rejects or prints a config."""
    functions = [scope for scope in read.scopes if not isinstance(scope, ast.ClassDef)]
    decorators = {ast.unparse(item).partition("(")[0] for function in functions for item in function.decorator_list}
    return (
        any(fragment in read.file for fragment in CHECKS)
        or bool(decorators & VALIDATORS)
        or any(function.name in CHECKING_METHODS for function in functions)
    )


@cache
def effective_reads():
    """The reads of each attribute that count: outside checks, and in a method of a model only if the method itself is used."""
    models = {f"{base.__module__}.{base.__qualname__}": base for model, _ in keys() for base in model.__mro__}
    waiting = [
        (name, read)
        for name, reads in attribute_reads().items()
        for read in reads
        if name.rpartition(".")[0] in models and not read.is_in_class_body and not is_check(read)
    ]
    found = defaultdict(set)
    while True:
        used = []
        for name, read in waiting:
            owner, _, method = read.within.rpartition(".")
            declaring = models[owner].__mro__ if owner in models else ()
            if owner not in models or any(full_name(base, method) in found for base in declaring):
                used.append((name, read))
        if not used:
            return found
        for name, read in used:
            found[name].add(read)
        waiting = [item for item in waiting if item not in used]


def reads_of(model, name):
    """The reads of a key, on a value with the type of the model or of a base class that declares the key as well."""
    return set().union(*(effective_reads().get(full_name(base, name), ()) for base in model.__mro__))


@pytest.mark.slow
def test_every_key_is_read_by_the_code_that_it_configures():
    assert {f"{model.__name__}.{name}" for model, name in keys() if not reads_of(model, name)} == set(EXEMPT)


@pytest.mark.parametrize("backends", BY_EACH, ids="+".join)
def test_every_backend_reads_the_keys_of_the_base_sections(backends):
    base = PolicyConfig if "rl_backends_megatron" in backends else GenerationConfig
    for backend in backends:
        # Both policy workers derive from a base class, which reads some of the keys for them.
        folders = (f"{backend}/", "rl_backends_base/src/")
        ignored = {
            name for name in BY_EACH[backends] if not any(read.file.startswith(folders) for read in reads_of(base, name))
        }
        assert ignored == set(), backend


def test_a_key_that_only_a_validator_reads_has_no_effect():
    # `_options_have_an_effect` reads it, and nothing else in our distributions does.
    name = full_name(SandboxConfig, "options")
    assert any(not read.is_in_class_body for read in attribute_reads()[name])
    assert name not in effective_reads()


# The following tests change a key and check the result.


def needs_and_plans(name):
    """The runtime requirements of an algorithm, as text."""

    def observe(**keys):
        config = registry().find("algorithm", name).load_config()(**keys)
        extra = {key: getattr(config, key) for key in ("rows_per_step", "prompts_per_draw") if hasattr(config, key)}
        return repr((config.runtime_needs, config.training_plan("policy", None), extra))

    return observe


def records_of(name):
    """The first records of a generated dataset, as text."""

    def observe(**keys):
        component = registry().find("dataset", name)
        records = component.load()(component.load_config()(dataset_name=name, **keys))
        return repr((len(records), [records[index] for index in range(min(8, len(records)))]))

    return observe


def loss_of(name):
    """The value of a loss on a fixed batch, and its required keys."""

    def observe(**keys):
        component = registry().find("loss", name)
        loss = component.load()(component.load_config()(**keys))
        rng = torch.Generator().manual_seed(3)

        def draw(*shape):
            return torch.rand(*shape, generator=rng)

        now = (-3 * draw(4, 9)).requires_grad_()
        # Rows of different lengths: means over tokens and over rows are then different.
        mask = (torch.arange(9) < torch.tensor([[9], [4], [7], [2]])).float()
        data = {
            "token_mask": mask,
            "sample_mask": torch.ones(4),
            "advantages": 6 * draw(4, 9) - 3,
            "prev_logprobs": now.detach() + 4 * draw(4, 9) - 2,
            "generation_logprobs": now.detach() + 4 * draw(4, 9) - 2,
            "reference_policy_logprobs": now.detach() + 6 * draw(4, 9) - 3,
            "margins": draw(4),
            "input_ids": torch.arange(36).view(4, 9),
            "desirable": torch.tensor([1.0, 0.0, 0.0, 1.0]),
            "kl_estimates": torch.full((4,), 0.5),
        }
        data |= loss.batch_columns(data)
        value, _ = loss(now, data, torch.tensor(4.0), mask.sum())
        value.backward()
        return repr((float(value.detach()), now.grad.sum(dim=1).tolist(), sorted(loss.required_keys)))

    return observe


CORRECTED = {"use_importance_sampling_correction": True}
BOUNDED = {"truncated_importance_sampling_ratio_min": 0.5}
WITH_KL = {"reference_policy_kl_penalty": 0.1}
OBSERVED = [
    ("sft", needs_and_plans, "global_batch_size", 3, {}),
    ("sft", needs_and_plans, "only_unmask_final", True, {}),
    ("sft", needs_and_plans, "val_accuracy", True, {}),
    ("sft", needs_and_plans, "max_rollout_turns", 3, {}),
    ("sft", needs_and_plans, "max_num_steps", 3, {}),
    ("dpo", needs_and_plans, "global_batch_size", 3, {}),
    ("rm", needs_and_plans, "global_batch_size", 3, {}),
    ("kto", needs_and_plans, "global_batch_size", 3, {}),
    ("grpo", needs_and_plans, "num_prompts_per_step", 3, {}),
    ("grpo", needs_and_plans, "num_generations_per_prompt", 3, {}),
    ("grpo", needs_and_plans, "val_num_generations_per_prompt", 3, {}),
    ("grpo", needs_and_plans, "max_rollout_turns", 3, {}),
    ("grpo", needs_and_plans, "batch_multiplier", 2.0, {"use_dynamic_sampling": True}),
    ("grpo", needs_and_plans, "use_dynamic_sampling", True, {}),
    ("ppo", needs_and_plans, "ppo_epochs", 3, {}),
    ("ppo", needs_and_plans, "critic_warmup_steps", 3, {}),
    ("distillation", needs_and_plans, "student_data_fraction", 0.5, {}),
    ("distillation", needs_and_plans, "num_prompts_per_step", 3, {}),
    ("distillation", needs_and_plans, "num_generations_per_prompt", 3, {}),
    ("arithmetic", records_of, "num_samples", 3, {}),
    ("arithmetic", records_of, "split", "validation", {}),
    ("arithmetic", records_of, "operations", ["*"], {}),
    ("arithmetic", records_of, "min_digits", 2, {}),
    ("arithmetic", records_of, "max_digits", 3, {}),
    ("arithmetic", records_of, "seed", 3, {}),
    ("arithmetic", records_of, "style", "chat", {}),
    ("arithmetic", records_of, "with_response", True, {}),
    ("arithmetic", records_of, "forgotten_carries", 1.0, {"with_response": True}),
    ("guess", records_of, "num_samples", 3, {}),
    ("guess", records_of, "lowest", 50, {}),
    ("guess", records_of, "highest", 50, {}),
    ("guess", records_of, "seed", 3, {}),
    ("guess", records_of, "question", "From {lowest} to {highest}?", {}),
    ("clipped_pg", loss_of, "ratio_clip_min", 0.5, {}),
    ("clipped_pg", loss_of, "ratio_clip_max", 0.5, {}),
    ("clipped_pg", loss_of, "ratio_clip_c", 1.5, {}),
    ("clipped_pg", loss_of, "disable_ppo_ratio", True, {}),
    ("clipped_pg", loss_of, "use_cispo", True, {}),
    ("clipped_pg", loss_of, "token_level_loss", False, {}),
    ("clipped_pg", loss_of, "constant_length_normalizer", 100, {"token_level_loss": False}),
    ("clipped_pg", loss_of, "sequence_level_importance_ratios", True, {"token_level_loss": False}),
    ("clipped_pg", loss_of, "reference_policy_kl_penalty", 0.2, {}),
    ("clipped_pg", loss_of, "reference_policy_kl_type", "k2", WITH_KL),
    ("clipped_pg", loss_of, "kl_input_clamp_value", 0.1, WITH_KL),
    ("clipped_pg", loss_of, "kl_output_clamp_value", 0.1, WITH_KL),
    ("clipped_pg", loss_of, "use_kl_in_reward", True, WITH_KL),
    ("clipped_pg", loss_of, "ratio_to", "sampler", {}),
    ("clipped_pg", loss_of, "use_importance_sampling_correction", True, {}),
    ("clipped_pg", loss_of, "truncated_importance_sampling_type", "icepop", {**CORRECTED, **BOUNDED}),
    ("clipped_pg", loss_of, "truncated_importance_sampling_ratio", 1.1, CORRECTED),
    ("clipped_pg", loss_of, "truncated_importance_sampling_ratio_min", 0.9, CORRECTED),
    ("dppo", loss_of, "divergence", "kl", {"divergence_max_below": 0.05, "divergence_max_above": 0.05}),
    ("dppo", loss_of, "divergence_max_below", 0.6, {}),
    ("dppo", loss_of, "divergence_max_above", 0.6, {}),
    ("dppo", loss_of, "log_ratio_penalty", 0.1, {}),
    ("dppo", loss_of, "ratio_to", "policy", {}),
    ("sapo", loss_of, "temperature_positive", 3.0, {}),
    ("sapo", loss_of, "temperature_negative", 3.0, {}),
    ("sapo", loss_of, "token_level_loss", True, {}),
    ("gmpo", loss_of, "log_ratio_clip_min", 0.8, {}),
    ("gmpo", loss_of, "log_ratio_clip_max", 0.8, {}),
    ("vespo", loss_of, "k_positive", 1.0, {}),
    ("vespo", loss_of, "k_negative", 1.0, {}),
    ("vespo", loss_of, "lambda_positive", 1.0, {}),
    ("vespo", loss_of, "lambda_negative", 1.0, {}),
    ("clip_cov", loss_of, "clip_cov_fraction", 0.1, {}),
    ("clip_cov", loss_of, "clip_cov_min", 2.5, {"clip_cov_fraction": 1.0}),
    ("clip_cov", loss_of, "clip_cov_max", 1.5, {"clip_cov_fraction": 1.0}),
    ("kl_cov", loss_of, "kl_cov_fraction", 0.3, {}),
    ("kl_cov", loss_of, "kl_cov_penalty", 0.3, {}),
    ("dpo", loss_of, "reference_policy_kl_penalty", 0.3, {}),
    ("dpo", loss_of, "label_smoothing", 0.2, {}),
    ("dpo", loss_of, "preference_average_log_probs", True, {}),
    ("dpo", loss_of, "preference_loss_weight", 0.5, {}),
    ("dpo", loss_of, "sft_loss_weight", 0.5, {}),
    ("dpo", loss_of, "sft_average_log_probs", False, {"sft_loss_weight": 0.5}),
    ("ipo", loss_of, "preference_average_log_probs", True, {}),
    ("dpo_hinge", loss_of, "preference_average_log_probs", True, {}),
    ("simpo", loss_of, "beta", 3.0, {}),
    ("simpo", loss_of, "gamma", 3.0, {}),
    ("simpo", loss_of, "label_smoothing", 0.2, {}),
    ("orpo", loss_of, "preference_loss_weight", 0.7, {}),
    ("kto", loss_of, "reference_policy_kl_penalty", 0.3, {}),
    ("kto", loss_of, "desirable_weight", 2.0, {}),
    ("kto", loss_of, "undesirable_weight", 2.0, {}),
]
"""Component, what is observed, the key, another value, and the other keys that it needs."""


@pytest.mark.parametrize(("component", "observe", "key", "value", "beside"), OBSERVED, ids=[f"{c[0]}-{c[2]}" for c in OBSERVED])
def test_another_value_of_a_key_changes_the_result(component, observe, key, value, beside):
    seen = observe(component)
    assert seen(**beside, **{key: value}) != seen(**beside)
    assert seen(**beside) == seen(**beside)


ALL_OBSERVED = ("clipped_pg", "dpo", "kto", "simpo", "dppo", "sapo", "gmpo", "vespo", "clip_cov", "kl_cov")


@pytest.mark.parametrize("loss", ALL_OBSERVED)
def test_every_key_of_these_losses_is_observed(loss):
    model = registry().find("loss", loss).load_config()
    observed = {key for component, _, key, _, _ in OBSERVED if component == loss}
    # `name` chooses the loss; the horizon of an adaptive penalty acts over steps, see test_kl_penalty.
    others = {"dpo"} if loss in ("simpo", "kto") else {"clipped_pg"}
    shared = {key for component, _, key, _, _ in OBSERVED if component in others}
    # One value of these is rejected.
    shared |= {"token_level_loss"} if loss == "gmpo" else set()
    assert set(model.model_fields) - observed - shared - {"name", "adaptive_kl"} == set()
