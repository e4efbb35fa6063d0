"""rl-train: the training runtime of rlcore: algorithms, losses, rollouts, data loading, configs, checkpoints and metrics."""

import rl_core as rl_core  # which finds modules of this package by their old paths

__version__ = "0.1.0"
