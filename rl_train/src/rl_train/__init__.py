"""rl-train: the training runtime of rlcore: algorithms, losses, rollouts, data loading, configs, checkpoints and metrics."""

__version__ = "0.1.0"
