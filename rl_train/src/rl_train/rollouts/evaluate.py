"""Held-out prompts, sampled and scored with the policy's newest weights; knows neither where these came from nor who asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.correctness import judge
from rl_train.rollouts.eval_metrics import grouped, score, usual_ks
from rl_train.rollouts.seeds import SampleStream
from rl_train.rollouts.source import start_rollouts
from rl_train.rollouts.summary import ask_environments, summarize
from rl_train.rollouts.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Validates a policy on prompts that it is not trained on.

    Attributes:
        collector: plays the rollouts.
        prompts: the validation data in its own order.
        max_samples: validate on the first so many prompts; all where None.
        samples_per_prompt: rollouts of each prompt.
        greedy: take the most likely tokens.
    """

    collector: Collector
    prompts: BatchedDataLoader
    max_samples: int | None
    samples_per_prompt: int
    greedy: bool

    @property
    def num_prompts(self) -> int:
        """P, how many prompts are asked."""
        rows = len(self.prompts.dataset)
        return rows if self.max_samples is None else min(rows, self.max_samples)

    def play(self, told: Callable[[int], None] | None = None) -> list[Trajectory]:
        """The finished rollouts of all P prompts, those of a prompt side by side.

        Args:
            told: given the number of prompts that are done, after every batch of them.
        """
        trajectories: list[Trajectory] = []
        for prompts in self._first_prompts():
            first = len(trajectories) // self.samples_per_prompt
            rows = start_rollouts(prompts, self.samples_per_prompt, first_ordinal=first)
            self.collector.collect(rows, stream=SampleStream.VALIDATION, greedy=self.greedy)
            trajectories.extend(rows)
            if told is not None:
                told(len(trajectories) // self.samples_per_prompt)
        return trajectories

    def evaluate(self) -> tuple[dict[str, float], list[Trajectory]]:
        """Metrics named `validation/...`, and the rollouts that they are of.

        `validation/accuracy` is the mean of what the environments call accuracy, `validation/reward` the mean reward; neither
        is there without an environment. With
        several samples of each prompt, `validation/pass@k` and `validation/cons@k` where they can be told, see
        `rl_train.rollouts.eval_metrics.score`.
        """
        trajectories = self.play()
        found = summarize(trajectories) | ask_environments(trajectories, self.collector.environments)
        metrics = {
            "validation/length": found["length/mean"],
            "validation/truncated_frac": found["length/truncated_frac"],
            "validation/rows": found["rollout/rows"],
        }
        told = {"validation/reward": "reward/mean", "validation/accuracy": "rollout/accuracy"}
        metrics |= {name: found[of] for name, of in told.items() if of in found}
        if self.samples_per_prompt > 1:
            metrics |= self._of_several_samples(trajectories)
        return metrics, trajectories

    def _of_several_samples(self, trajectories: list[Trajectory]) -> dict[str, float]:
        judgement = judge(trajectories, self.collector.environments)
        groups = grouped(trajectories, judgement, samples_per_prompt=self.samples_per_prompt)
        scores = score(groups, judgement, ks=usual_ks(self.samples_per_prompt))
        told = {name: found for name, found in scores.metrics.items() if name.startswith(("pass@", "cons@"))}
        return {f"validation/{name}": found.value for name, found in told.items()}

    def _first_prompts(self) -> Iterator[BatchedDataDict[Any]]:
        # A loader that was left before its end goes on there: the next validation would be on other prompts.
        self.prompts.load_state_dict({**self.prompts.state_dict(), "cursor": 0})
        left = self.num_prompts
        for batch in self.prompts:
            yield batch.slice(0, min(left, batch.size))
            left -= batch.size
            if left <= 0:
                return
