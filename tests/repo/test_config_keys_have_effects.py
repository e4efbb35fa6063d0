"""Every config key has an effect: the code that it configures reads it, and if it is cheap, a change is observed.

A key without an entry in one of the tables below fails, so a new key comes with the folder that reads it.
"""

import ast
import inspect
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
import torch

from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.schema_index import schema_index

ROOT = Path(__file__).parents[2]
OURS = ("core", "train", "hf", "megatron", "vllm", "openai", "sandbox", "envs")

RUNTIME = (
    "rl_train/assembly",
    "rl_train/launch",
    "rl_train/evaluation",
    "rl_train/run_folders",
    "rl_train/trainers",
    "rl_train/workbench",
)
LOSSES = ("rl_train/algorithms/losses",)
ROWS = ("rl_train/data",)
CHOICE = ("rl_core/config", "rl_train/config", *RUNTIME)
READERS: dict[str, tuple[str, ...]] = {
    "AdaptiveKLConfig": ("rl_train/algorithms",),
    "AdvantageConfig": ("rl_train/algorithms",),
    "AlgorithmConfig": (*RUNTIME, "rl_train/algorithms", "rl_train/run.py"),
    "AlgorithmPathConfig": ("rl_train/config/algorithm.py",),
    "ArithmeticDatasetConfig": ("rl_envs/arithmetic", *CHOICE),
    "ArithmeticEnvironmentConfig": ("rl_envs/arithmetic",),
    "BradleyTerryLossConfig": LOSSES,
    "CISPOLossConfig": LOSSES,
    "CheckpointingConfig": (*RUNTIME, "rl_train/run.py", "rl_train/checkpoints"),
    "ClippedPGLossConfig": ("rl_train/algorithms",),
    "ClusterConfig": (*RUNTIME,),
    "CodeEnvironmentConfig": ("rl_envs/code",),
    "DAPOLossConfig": LOSSES,
    "DPOLossConfig": LOSSES,
    "DataConfig": (*RUNTIME,),
    "DatasetConfig": CHOICE,
    "DeadlineConfig": ("rl_core/dispatch", *RUNTIME),
    "DistillationConfig": ("rl_train/algorithms",),
    "DistillationLossConfig": LOSSES,
    "DrGRPOLossConfig": LOSSES,
    "DynamicBatchingConfig": ("rl_core/dispatch",),
    "EnvironmentConfig": (*RUNTIME, "rl_train/config", "rl_train/tools"),
    "FunctionEnvironmentConfig": ("rl_train/rewards", "rl_train/assembly/reward_checks.py"),
    "GAEConfig": ("rl_train/algorithms",),
    "GRPOConfig": ("rl_train/algorithms",),
    "GRPOLossConfig": LOSSES,
    "GSPOLossConfig": LOSSES,
    "GenerationConfig": (*RUNTIME, "rl_core/dispatch", "rl_train/rollouts", "rl_backends_hf"),
    "GuessNumberDatasetConfig": ("rl_envs/guess", *CHOICE),
    "GuessNumberEnvironmentConfig": ("rl_envs/guess",),
    "HFConfig": ("rl_backends_hf",),
    "HFGenerationConfig": CHOICE,
    "HFModelConfig": ("rl_backends_hf/model.py", "rl_backends_hf/training/worker.py"),
    "HFPolicyConfig": CHOICE,
    "HFSamplerConfig": ("rl_backends_hf",),
    "HingeLossConfig": LOSSES,
    "HuggingFaceDatasetConfig": CHOICE,
    "HuggingFacePreferenceDatasetConfig": CHOICE,
    "HuggingFaceSource": ROWS,
    "IPOLossConfig": LOSSES,
    "InstructionFollowingConfig": ("rl_envs/instruction_following",),
    "JsonLinesSource": ROWS,
    "JsonlDatasetConfig": CHOICE,
    "JudgeEnvironmentConfig": ("rl_envs/judge",),
    "LoRAConfig": ("rl_backends_hf/training/lora.py", "rl_backends_hf/training/worker.py"),
    "LoggerConfig": (*RUNTIME,),
    "ProfilingConfig": ("rl_train/profiling.py", "rl_train/config"),
    "LoggingConfig": (*RUNTIME, "rl_train/run.py"),
    "LossConfig": (*RUNTIME,),
    "MathEnvironmentConfig": ("rl_envs/math",),
    "MegatronConfig": ("rl_backends_megatron",),
    "MegatronPolicyConfig": CHOICE,
    "MlflowConfig": ("rl_train/metrics",),
    "MseValueLossConfig": LOSSES,
    "ORPOLossConfig": LOSSES,
    "OptimizerConfig": ("rl_backends_hf", "rl_backends_megatron"),
    "PPOConfig": ("rl_train/algorithms",),
    "ParquetDatasetConfig": CHOICE,
    "ParquetPreferenceDatasetConfig": CHOICE,
    "ParquetSource": ROWS,
    "PolicyConfig": ("rl_backends_hf", "rl_core/dispatch", "rl_core/training", "rl_core/config"),
    "PairsConfig": ("rl_train/algorithms",),
    "PolicyGradientConfig": ("rl_train/algorithms",),
    "PreferenceDatasetConfig": CHOICE,
    "PreferenceFields": ROWS,
    "PreferenceLossConfig": LOSSES,
    "PromptConfig": ("rl_train/config",),
    "ReasoningGymDatasetConfig": ("rl_envs/reasoning_gym", *CHOICE),
    "ReasoningGymEnvironmentConfig": ("rl_envs/reasoning_gym",),
    "RecordFields": ROWS,
    "RewardModelEnvironmentConfig": ("rl_envs/reward_model",),
    "RewardScalingConfig": ("rl_train/algorithms",),
    "RewardShapingConfig": ("rl_train/algorithms",),
    "RolloutAlgorithmConfig": ("rl_train/algorithms",),
    "RolloutConfig": (*RUNTIME, "rl_train/config", "rl_core/config"),
    "RowsConfig": ROWS,
    "SFTConfig": ("rl_train/algorithms",),
    "SandboxConfig": ("rl_sandbox", "rl_envs/code"),
    "SchedulerConfig": ("rl_core/training",),
    "SequencePackingConfig": ("rl_core/dispatch",),
    "SimPOLossConfig": LOSSES,
    "SlidingPuzzleDatasetConfig": ("rl_envs/sliding_puzzle", *CHOICE),
    "SlidingPuzzleEnvironmentConfig": ("rl_envs/sliding_puzzle",),
    "SplitConfig": (*RUNTIME,),
    "TensorBoardConfig": ("rl_train/metrics",),
    "TokenizerConfig": ("rl_core/data/tokenizer.py", *RUNTIME, "rl_backends_hf"),
    "ToolEnvironmentConfig": ("rl_core/tools/environment.py",),
    "ToolsEnvironmentConfig": ("rl_envs/tools",),
    "VllmConfig": ("rl_backends_vllm", *CHOICE),
    "OpenAIConfig": ("rl_backends_openai", *CHOICE),
    "OpenAIServerConfig": ("rl_backends_openai",),
    "VllmEngineConfig": ("rl_backends_vllm",),
    "WandbConfig": ("rl_train/metrics",),
}
"""By model: the folders and files whose code reads its keys. A key that is read nowhere else has no effect."""

BY_EACH = {
    ("rl_backends_hf", "rl_backends_megatron"): {
        "activation_checkpointing",
        "frozen",
        "head",
        "logprob_batch_size",
        "max_grad_norm",
        "model_name",
        "precision",
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
"""Keys of the base sections that each backend must apply itself."""

ELSEWISE = {
    "AlgorithmPathConfig.train": "the chooser of the algorithm reads all keys of the model by `model_fields`",
    "AlgorithmPathConfig.config": "likewise",
}
"""Keys that no attribute names, and why they have an effect."""


@cache
def registry():
    return Registry(discover())


def keys_by_model():
    """The names of the keys that each model declares."""
    found = defaultdict(set)
    for section in schema_index(registry(), plugins=OURS).sections:
        for field in section.fields():
            if field.model is None:
                found[field.owner].add(field.name)
    return found


@cache
def reads(file):
    """The names that a file reads as attributes or as text: `getattr(config, "...")`, tables of keys."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return attributes | texts


def read_in(place):
    [root] = [found for found in ROOT.glob(f"*/src/{place}") if found.exists()]
    files = [root] if root.is_file() else sorted(root.rglob("*.py"))
    return set().union(*(reads(file) for file in files if "importing" not in file.parts))


def test_every_config_model_has_a_declared_reader():
    models = {model.__name__ for model in keys_by_model()}
    assert models - set(READERS) == set(), "say in READERS which folder reads the keys of these models"
    installed = {section.component.name for section in schema_index(registry(), plugins=OURS).sections if section.component}
    if {"hf", "megatron", "vllm", "math"} <= installed:
        assert set(READERS) - models == set(), "these models are gone"


def test_every_key_is_read_by_the_code_that_it_configures():
    unread = []
    for model, names in keys_by_model().items():
        declared = Path(inspect.getfile(model))
        # A declaration does not count as use; a property of the model that algorithms read is.
        own = {node.attr for node in ast.walk(ast.parse(declared.read_text())) if isinstance(node, ast.Attribute)}
        found = own.union(*(read_in(place) for place in READERS.get(model.__name__, ())))
        unread += [f"{model.__name__}.{name}" for name in names if name not in found]
    assert sorted(set(unread) - set(ELSEWISE)) == []


@pytest.mark.parametrize("backends", BY_EACH, ids="+".join)
def test_every_backend_reads_the_keys_of_the_base_sections(backends):
    # Both policy workers derive from a base class, which reads some of the keys for them.
    shared = read_in("rl_core/training")
    for backend in backends:
        assert BY_EACH[backends] - read_in(backend) - shared == set(), backend


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
        }
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
    ("clipped_pg", loss_of, "use_importance_sampling_correction", True, {}),
    ("clipped_pg", loss_of, "truncated_importance_sampling_type", "icepop", {**CORRECTED, **BOUNDED}),
    ("clipped_pg", loss_of, "truncated_importance_sampling_ratio", 1.1, CORRECTED),
    ("clipped_pg", loss_of, "truncated_importance_sampling_ratio_min", 0.9, CORRECTED),
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
]
"""Component, what is observed, the key, another value, and the other keys that it needs."""


@pytest.mark.parametrize(("component", "observe", "key", "value", "beside"), OBSERVED, ids=[f"{c[0]}-{c[2]}" for c in OBSERVED])
def test_another_value_of_a_key_changes_the_result(component, observe, key, value, beside):
    seen = observe(component)
    assert seen(**beside, **{key: value}) != seen(**beside)
    assert seen(**beside) == seen(**beside)


@pytest.mark.parametrize("loss", ["clipped_pg", "dpo", "simpo"])
def test_every_key_of_these_losses_is_observed(loss):
    model = registry().find("loss", loss).load_config()
    observed = {key for component, _, key, _, _ in OBSERVED if component == loss}
    # `name` chooses the loss; the horizon of an adaptive penalty acts over steps, see test_kl_penalty.
    shared = {key for component, _, key, _, _ in OBSERVED if component == "dpo"} if loss != "clipped_pg" else set()
    assert set(model.model_fields) - observed - shared - {"name", "adaptive_kl"} == set()
