"""Held-out prompts, sampled and scored with the policy's newest weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.dataloader import BatchedDataLoader
from rl_core.rollouts.collect import Collector
from rl_core.rollouts.source import start_rollouts
from rl_core.rollouts.summary import ask_environments, summarize
from rl_core.rollouts.trajectory import Trajectory

VALIDATION_STREAM = -1
"""Keeps the seeds of validation apart from those of every step, and the same at every validation."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Validates a policy on prompts that it is not trained on.

    Attributes:
        collector: plays the rollouts.
        prompts: the validation data, one epoch of it.
        max_samples: validate on the first so many prompts; all where None.
        samples_per_prompt: rollouts of each prompt.
        greedy: take the most likely tokens.
    """

    collector: Collector
    prompts: BatchedDataLoader
    max_samples: int | None
    samples_per_prompt: int
    greedy: bool

    def evaluate(self) -> tuple[dict[str, float], list[Trajectory]]:
        """Metrics named `validation/...`, and the rollouts that they are of.

        `validation/accuracy` is the mean of what the environments call accuracy, `validation/reward` the mean reward.
        """
        trajectories: list[Trajectory] = []
        left = self.max_samples
        for batch in self.prompts:
            prompts: BatchedDataDict[Any] = batch if left is None else batch.slice(0, min(left, batch.size))
            rows = start_rollouts(prompts, self.samples_per_prompt)
            self.collector.collect(rows, stream=VALIDATION_STREAM, greedy=self.greedy)
            trajectories.extend(rows)
            if left is not None:
                left -= prompts.size
                if left <= 0:
                    break
        found = summarize(trajectories) | ask_environments(trajectories, self.collector.environments)
        metrics = {
            "validation/reward": found["reward/mean"],
            "validation/length": found["length/mean"],
            "validation/truncated_frac": found["length/truncated_frac"],
            "validation/rows": found["rollout/rows"],
        }
        if "rollout/accuracy" in found:
            metrics["validation/accuracy"] = found["rollout/accuracy"]
        return metrics, trajectories
