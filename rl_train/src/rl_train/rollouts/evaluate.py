"""Samples and scores validation prompts with the current weights of the generation backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.messages import DatumSpec
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.correctness import correct_rollouts
from rl_train.rollouts.eval_metrics import default_ks, grouped, score
from rl_train.rollouts.failures import refuse_total_failure
from rl_train.rollouts.seeds import SampleStream
from rl_train.rollouts.source import start_rollouts
from rl_train.rollouts.summary import environment_metrics, failure_metrics, summarize
from rl_train.rollouts.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluates a policy on validation prompts.

    Attributes:
        collector: plays the rollouts.
        prompts: the validation data in its original order.
        max_samples: use only the first `max_samples` prompts; None for all.
        samples_per_prompt: number of rollouts per prompt.
        greedy: use greedy decoding.
    """

    collector: Collector
    prompts: BatchedDataLoader
    max_samples: int | None
    samples_per_prompt: int
    greedy: bool

    @property
    def num_prompts(self) -> int:
        """P, number of prompts."""
        rows = len(self.prompts.dataset)
        return rows if self.max_samples is None else min(rows, self.max_samples)

    def play(self, progress: Callable[[int], None] | None = None) -> list[Trajectory]:
        """The finished rollouts of all P prompts; those of one prompt are consecutive.

        Args:
            progress: called with the number of finished prompts after every batch.

        Raises:
            RLCoreError: the environments failed for every rollout.
        """
        trajectories: list[Trajectory] = []
        for prompts in self._first_prompts():
            first = len(trajectories) // self.samples_per_prompt
            ordinals = range(first, first + len(prompts))
            rows = start_rollouts(prompts, self.samples_per_prompt, ordinals=ordinals)
            self.collector.collect(rows, stream=SampleStream.VALIDATION, greedy=self.greedy)
            trajectories.extend(rows)
            if progress is not None:
                progress(len(trajectories) // self.samples_per_prompt)
        refuse_total_failure(trajectories)
        return trajectories

    def evaluate(self) -> tuple[dict[str, float], list[Trajectory]]:
        """Metrics named `validation/...`, and their rollouts.

        `validation/accuracy` is the mean accuracy that the environments report, `validation/reward` the mean reward; both need
        an environment. With several samples per prompt, `validation/pass@k` and `validation/cons@k` are added if known,
        see `rl_train.rollouts.eval_metrics.score`.
        """
        trajectories = self.play()
        summary = summarize(trajectories) | environment_metrics(trajectories, self.collector.environments)
        metrics = {
            "validation/length": summary["length/mean"],
            "validation/truncated_frac": summary["length/truncated_frac"],
            "validation/rows": summary["rollout/rows"],
        }
        reported = {"validation/reward": "reward/mean", "validation/accuracy": "rollout/accuracy"}
        metrics |= {name: summary[of] for name, of in reported.items() if of in summary}
        metrics |= {name.replace("rollout/", "validation/"): n for name, n in failure_metrics(trajectories).items()}
        if self.samples_per_prompt > 1:
            metrics |= self._multi_sample_metrics(trajectories)
        return metrics, trajectories

    def _multi_sample_metrics(self, trajectories: list[Trajectory]) -> dict[str, float]:
        correctness = correct_rollouts(trajectories, self.collector.environments)
        groups = grouped(trajectories, correctness, samples_per_prompt=self.samples_per_prompt)
        scores = score(groups, correctness, ks=default_ks(self.samples_per_prompt))
        selected = {name: estimate for name, estimate in scores.metrics.items() if name.startswith(("pass@", "cons@"))}
        return {f"validation/{name}": estimate.value for name, estimate in selected.items()}

    def _first_prompts(self) -> Iterator[Sequence[DatumSpec]]:
        # Rewind: a loader that was left early would continue with other prompts.
        self.prompts.load_state_dict({**self.prompts.state_dict(), "cursor": 0})
        remaining = self.num_prompts
        for batch in self.prompts:
            yield batch[:remaining]
            remaining -= len(batch)
            if remaining <= 0:
                return
