"""Registers the built-in algorithms, losses, loggers and datasets through the hooks that every plugin uses; strings only."""

from __future__ import annotations

from rl_core.plugins import Component, hookimpl


@hookimpl
def rlcore_algorithms() -> list[Component]:
    """Algorithms that learn from rewards, from preferences, from a teacher and from given answers."""
    return [
        Component(
            "grpo",
            target="rl_train.algorithms.grpo:train",
            config="rl_train.algorithms.grpo_config:GRPOConfig",
            summary="Group-relative policy optimisation: rewards, compared within the samples of one prompt",
        ),
        Component(
            "ppo",
            target="rl_train.algorithms.ppo:train",
            config="rl_train.algorithms.ppo_config:PPOConfig",
            summary="Proximal policy optimisation: a critic says what each token was worth",
        ),
        Component(
            "dpo",
            target="rl_train.algorithms.dpo:train",
            config="rl_train.algorithms.dpo_config:DPOConfig",
            summary="Direct preference optimisation on pairs of a better and a worse answer",
        ),
        Component(
            "distillation",
            target="rl_train.algorithms.distillation:train",
            config="rl_train.algorithms.distillation_config:DistillationConfig",
            summary="On-policy distillation: a teacher says at each token of the student's answers what it would have said",
        ),
        Component(
            "rm",
            target="rl_train.algorithms.rm:train",
            config="rl_train.algorithms.rm_config:RewardModelConfig",
            summary="A reward model, learnt from pairs of a better and a worse answer",
        ),
        Component(
            "sft",
            target="rl_train.algorithms.sft:train",
            config="rl_train.algorithms.sft_config:SFTConfig",
            summary="Supervised fine-tuning on given answers",
        ),
    ]


@hookimpl
def rlcore_losses() -> list[Component]:
    """Policy gradients under the settings of their papers, preferences, negative log-likelihood, and a critic's error."""
    return [
        _policy_gradient("clipped_pg", "ClippedPGLossConfig", "Policy gradient with a clipped probability ratio"),
        _policy_gradient("grpo", "GRPOLossConfig", "Policy gradient of GRPO: a mean of sequence means, a KL penalty"),
        _policy_gradient("dapo", "DAPOLossConfig", "Policy gradient of DAPO: clip-higher, a mean over tokens"),
        _policy_gradient("dr_grpo", "DrGRPOLossConfig", "Policy gradient of Dr. GRPO: sums of sequences by one constant"),
        _policy_gradient("gspo", "GSPOLossConfig", "Policy gradient of GSPO: one clipped ratio a sequence"),
        _policy_gradient("cispo", "CISPOLossConfig", "Policy gradient of CISPO: clipped ratios as weights"),
        _preference("dpo", "DPO", "Preferences by likelihood against a reference policy; with label smoothing, cDPO"),
        _preference("ipo", "IPO", "Preferences by a bounded margin against a reference policy"),
        _preference("dpo_hinge", "Hinge", "Preferences by a hinge on the margin against a reference policy"),
        _preference("simpo", "SimPO", "Preferences by mean log-probabilities and a margin, without a reference policy"),
        _preference("orpo", "ORPO", "Preferences by odds beside the likelihood of chosen answers, without a reference policy"),
        Component(
            "distillation",
            target="rl_train.algorithms.losses.distillation:DistillationLossFn",
            config="rl_train.algorithms.losses.distillation_config:DistillationLossConfig",
            summary="How far the policy is from a teacher: forward or reverse KL, both, or the Jensen-Shannon divergence",
        ),
        Component(
            "bradley_terry",
            target="rl_train.algorithms.losses.reward:BradleyTerryLossFn",
            config="rl_train.algorithms.losses.reward_config:BradleyTerryLossConfig",
            summary="Preferences by the scores of a reward model, with margins",
        ),
        Component(
            "nll",
            target="rl_train.algorithms.losses.nll:NLLLossFn",
            config="rl_train.algorithms.losses.config:NLLLossConfig",
            summary="Negative log-likelihood of the answer's tokens",
        ),
        Component(
            "mse_value",
            target="rl_train.algorithms.losses.value:MseValueLossFn",
            config="rl_train.algorithms.losses.value_config:MseValueLossConfig",
            summary="Squared error of a critic's values, clipped",
        ),
    ]


def _policy_gradient(name: str, config: str, summary: str) -> Component:
    """One loss, under the settings that go by a name."""
    return Component(
        name,
        target="rl_train.algorithms.losses.policy_gradient:ClippedPGLossFn",
        config=f"rl_train.algorithms.losses.config:{config}",
        summary=summary,
    )


def _preference(name: str, of: str, summary: str) -> Component:
    """A loss over pairs."""
    return Component(
        name,
        target=f"rl_train.algorithms.losses.preference:{of}LossFn",
        config=f"rl_train.algorithms.losses.preference_config:{of}LossConfig",
        summary=summary,
    )


@hookimpl
def rlcore_loggers() -> list[Component]:
    """The run folder's metrics file and the terminal, which every run has, and three that need an extra of rl-core."""
    return [
        Component("jsonl", target="rl_train.metrics.jsonl:JsonlLogger", summary="One JSON object a step, in the run folder"),
        Component(
            "console",
            target="rl_train.metrics.console:ConsoleLogger",
            summary="Live progress on a terminal, plain lines when piped",
        ),
        Component(
            "tensorboard",
            target="rl_train.metrics.tensorboard:TensorBoardLogger",
            config="rl_train.metrics.logger_config:TensorBoardConfig",
            summary="Event files for TensorBoard",
            needs=("tensorboard>=2.18",),
            install="pip install 'rl-train[tensorboard]'",
        ),
        Component(
            "wandb",
            target="rl_train.metrics.wandb:WandbLogger",
            config="rl_train.metrics.logger_config:WandbConfig",
            summary="Weights & Biases, offline unless told otherwise",
            needs=("wandb>=0.31",),
            install="pip install 'rl-train[wandb]'",
        ),
        Component(
            "mlflow",
            target="rl_train.metrics.mlflow:MlflowLogger",
            config="rl_train.metrics.logger_config:MlflowConfig",
            summary="MLflow, in a database of the run folder unless told otherwise",
            needs=("mlflow-skinny<4,>=3.17", "sqlalchemy<3,>=2", "alembic<2,>=1.13"),
            install="pip install 'rl-train[mlflow]'",
        ),
    ]


@hookimpl
def rlcore_datasets() -> list[Component]:
    """Prompts and conversations, or preferences, from each kind of source."""
    return [
        _dataset("jsonl", "Jsonl", "One JSON object a line: prompts, conversations or answers"),
        _dataset("parquet", "Parquet", "Parquet files: prompts, conversations or answers"),
        _dataset("huggingface", "HuggingFace", "Hugging Face datasets, on disk or of the hub: prompts or conversations"),
        _dataset("preference", "Preference", "One JSON object a line: prompts with a better and a worse answer"),
        _dataset("preference_parquet", "ParquetPreference", "Parquet files: prompts with a better and a worse answer"),
        _dataset(
            "preference_huggingface",
            "HuggingFacePreference",
            "Hugging Face datasets, on disk or of the hub: prompts with a better and a worse answer",
        ),
    ]


def _dataset(name: str, config: str, summary: str) -> Component:
    """Records of one form from one kind of source."""
    reader = "preferences:PreferenceDataset" if config.endswith("Preference") else "datasets:RecordDataset"
    has_lines = config in ("Jsonl", "Preference")
    return Component(
        name,
        target=f"rl_train.data.{reader}",
        config=f"rl_train.data.dataset_config:{config}DatasetConfig",
        summary=summary,
        needs=() if has_lines else ("datasets<6,>=5.2",),
        install=None if has_lines else "pip install 'rl-train[data]'",
    )
