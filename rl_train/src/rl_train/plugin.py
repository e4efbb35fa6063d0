"""Registers the built-in algorithms, losses, environment, loggers, datasets and weight transports. Imports none of them."""

from __future__ import annotations

from functools import partial

from rl_core.plugins import Component, hookimpl


@hookimpl
def rlcore_algorithms() -> list[Component]:
    """The built-in algorithms."""
    return [
        Component(
            "grpo",
            target="rl_train.algorithms.grpo:train",
            config="rl_train.algorithms.policy_configs:GRPOConfig",
            summary="Group Relative Policy Optimization: rewards relative to the other samples of the same prompt",
        ),
        Component(
            "ppo",
            target="rl_train.algorithms.ppo:train",
            config="rl_train.algorithms.policy_configs:PPOConfig",
            summary="Proximal Policy Optimization with a critic",
        ),
        Component(
            "dpo",
            target="rl_train.algorithms.dpo:train",
            config="rl_train.algorithms.supervised_configs:DPOConfig",
            summary="Direct Preference Optimization on pairs of chosen and rejected answers",
        ),
        Component(
            "kto",
            target="rl_train.algorithms.kto:train",
            config="rl_train.algorithms.supervised_configs:KTOConfig",
            summary="Kahneman-Tversky Optimization on answers with a label: desirable or undesirable",
        ),
        Component(
            "distillation",
            target="rl_train.algorithms.distillation:train",
            config="rl_train.algorithms.supervised_configs:DistillationConfig",
            summary="On-policy distillation: a teacher scores each token of the student's own answers",
        ),
        Component(
            "rm",
            target="rl_train.algorithms.rm:train",
            config="rl_train.algorithms.supervised_configs:RewardModelConfig",
            summary="Reward model training on pairs of chosen and rejected answers",
        ),
        Component(
            "sft",
            target="rl_train.algorithms.sft:train",
            config="rl_train.algorithms.supervised_configs:SFTConfig",
            summary="Supervised fine-tuning on reference answers",
        ),
    ]


@hookimpl
def rlcore_losses() -> list[Component]:
    """The built-in losses: policy gradient, preference, distillation, reward model, likelihood and value losses."""
    return [
        _policy_gradient("clipped_pg", "ClippedPG", "Policy gradient with a clipped probability ratio"),
        _policy_gradient("grpo", "GRPO", "GRPO policy gradient: mean of sequence means, KL penalty"),
        _policy_gradient("dapo", "DAPO", "DAPO policy gradient: clip-higher, token mean"),
        _policy_gradient("dr_grpo", "DrGRPO", "Dr. GRPO policy gradient: sequence sums divided by a constant"),
        _policy_gradient("gspo", "GSPO", "GSPO policy gradient: one clipped ratio per sequence"),
        _policy_gradient("cispo", "CISPO", "CISPO policy gradient: clipped ratios as weights"),
        _trust_region("dppo", "DPPO", "DPPO policy gradient: drops tokens whose probability has moved too far"),
        _trust_region("sapo", "SAPO", "SAPO policy gradient: a sigmoid of the ratio instead of a clip"),
        _trust_region("gmpo", "GMPO", "GMPO policy gradient: the geometric mean of clipped ratios"),
        _trust_region("vespo", "VESPO", "VESPO policy gradient: a smooth weight of the ratio of the whole sequence"),
        _trust_region("gspo_sequence", "GSPOSequence", "GSPO policy gradient with one advantage per sequence", config="GSPO"),
        _trust_region("clip_cov", "ClipCov", "Clip-Cov policy gradient: some tokens of high covariance have no gradient"),
        _trust_region("kl_cov", "KLCov", "KL-Cov policy gradient: a KL penalty on the tokens of highest covariance"),
        _preference("dpo", "DPO", "DPO preference loss against a reference policy; with label smoothing, cDPO"),
        _preference("ipo", "IPO", "IPO preference loss: a bounded margin against a reference policy"),
        _preference("dpo_hinge", "Hinge", "Hinge preference loss on the margin against a reference policy"),
        _preference("simpo", "SimPO", "SimPO preference loss: mean log-probabilities and a margin, without a reference policy"),
        _preference(
            "orpo",
            "ORPO",
            "ORPO preference loss: log odds ratio plus the likelihood of chosen answers, without a reference policy",
        ),
        _preference("kto", "KTO", "KTO loss on answers with a label against a reference policy"),
        _loss(
            "distillation",
            "Distillation",
            "Divergence from a teacher: forward KL, reverse KL, a mix of both, or Jensen-Shannon",
            module="distillation",
        ),
        _preference("bradley_terry", "BradleyTerry", "Bradley-Terry loss on the scores of a reward model, with margins"),
        _loss("nll", "NLL", "Negative log-likelihood of the answer tokens", module="supervised"),
        Component(
            "mse_value",
            target="rl_train.algorithms.losses.value:MseValueLossFn",
            config="rl_train.algorithms.losses.config:MseValueLossConfig",
            summary="Clipped squared error of a critic's values",
        ),
    ]


def _loss(name: str, of: str, summary: str, *, module: str, config: str | None = None, configs: str = "config") -> Component:
    """A loss, with the modules of its class and of its section."""
    return Component(
        name,
        target=f"rl_train.algorithms.losses.{module}:{of}LossFn",
        config=f"rl_train.algorithms.losses.{configs}:{config or of}LossConfig",
        summary=summary,
    )


def _policy_gradient(name: str, config: str, summary: str) -> Component:
    """The clipped policy gradient loss with the settings of one paper."""
    return _loss(name, "ClippedPG", summary, module="policy_gradient", config=config)


_trust_region = partial(_loss, module="trust_regions")
_preference = partial(_loss, module="supervised", configs="preference_configs")


@hookimpl
def rlcore_environments() -> list[Component]:
    """Rewards as plain functions."""
    return [
        Component(
            "function",
            target="rl_train.rewards.environment:FunctionEnvironment",
            config="rl_train.rewards.config:FunctionEnvironmentConfig",
            summary="Plain Python functions score the completion: `reward_fn`, or several `reward_fns`",
        ),
        Component(
            "agent",
            target="rl_train.agents.environment:AgentEnvironment",
            config="rl_train.rewards.config:AgentEnvironmentConfig",
            summary="An agent with its own control loop returns the reward",
        ),
        Component(
            "inspect",
            target="rl_train.agents.environment:AgentEnvironment",
            config="rl_train.rewards.config:InspectConfig",
            summary="Inspect: the solver of a task runs the rollouts, and its scorers give the reward",
            needs=("inspect-ai>=0.3.285,<0.4",),
            install="pip install 'rl-train[inspect]'",
        ),
        Component(
            "verifiers",
            target="rl_train.agents.environment:AgentEnvironment",
            config="rl_train.rewards.config:VerifiersConfig",
            summary="verifiers: the task of a taskset runs the rollouts and gives the rewards",
            needs=("verifiers>=0.4,<0.5",),
            install="pip install 'rl-train[verifiers]'",
        ),
    ]


@hookimpl
def rlcore_loggers() -> list[Component]:
    """`jsonl` and `console`, which every run has, and three loggers that need an extra of rl-train."""
    return [
        Component("jsonl", target="rl_train.metrics.jsonl:JsonlLogger", summary="One JSON object per step, in the run folder"),
        Component(
            "console",
            target="rl_train.metrics.console:ConsoleLogger",
            summary="Live progress on a terminal, plain lines when piped",
        ),
        Component(
            "tensorboard",
            target="rl_train.metrics.logger:TensorBoardLogger",
            config="rl_train.metrics.logger_config:TensorBoardConfig",
            summary="Event files for TensorBoard",
            needs=("tensorboard>=2.18",),
            install="pip install 'rl-train[tensorboard]'",
        ),
        Component(
            "wandb",
            target="rl_train.metrics.logger:WandbLogger",
            config="rl_train.metrics.logger_config:WandbConfig",
            summary="Weights & Biases, offline by default",
            needs=("wandb>=0.31",),
            install="pip install 'rl-train[wandb]'",
        ),
        Component(
            "mlflow",
            target="rl_train.metrics.logger:MlflowLogger",
            config="rl_train.metrics.logger_config:MlflowConfig",
            summary="MLflow, in a database in the run folder by default",
            needs=("mlflow-skinny<4,>=3.17", "sqlalchemy<3,>=2", "alembic<2,>=1.13"),
            install="pip install 'rl-train[mlflow]'",
        ),
    ]


@hookimpl
def rlcore_datasets() -> list[Component]:
    """Datasets of prompts, conversations or preferences from each kind of source."""
    return [
        _dataset("jsonl", "Jsonl", "JSON lines: prompts, conversations or answers"),
        _dataset("parquet", "Parquet", "Parquet files: prompts, conversations or answers"),
        _dataset("huggingface", "HuggingFace", "Hugging Face datasets, on disk or from the hub: prompts or conversations"),
        _dataset("preference", "Preference", "JSON lines: prompts with chosen and rejected answers, or with a labelled one"),
        _dataset(
            "preference_parquet",
            "ParquetPreference",
            "Parquet files: prompts with chosen and rejected answers, or with a labelled one",
        ),
        _dataset(
            "preference_huggingface",
            "HuggingFacePreference",
            "Hugging Face datasets, on disk or from the hub: prompts with chosen and rejected answers, or with a labelled one",
        ),
    ]


@hookimpl
def rlcore_weight_transports() -> list[Component]:
    """Transports within a process, within a node, between processes of a group, and by files."""
    return [
        _transport("by_reference", "ByReference", "Policy and generation share a process and its tensors"),
        _transport("shared_memory", "SharedMemory", "Policy and generation on one node use shared memory"),
        _transport("collective", "Collective", "Broadcast over a process group, gloo or NCCL"),
        _transport("disk", "Disk", "Files in a folder that both sides can access"),
    ]


def _transport(name: str, of: str, summary: str) -> Component:
    """A weight transport."""
    return Component(name, target=f"rl_train.weight_sync.transports:{of}Transport", summary=summary)


def _dataset(name: str, config: str, summary: str) -> Component:
    """A dataset of one record form from one kind of source."""
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
