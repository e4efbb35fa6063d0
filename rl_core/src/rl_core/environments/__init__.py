"""Environments that score one answer per rollout, and responses of environments row by row."""

from rl_core.environments.scorer import Score, ScorerEnvironment, StepResult, environment_return, final_text, step_results

__all__ = ["Score", "ScorerEnvironment", "StepResult", "environment_return", "final_text", "step_results"]
