"""Samples and scores validation prompts: correctness, rewards and lengths, each a mean over prompts with its standard error.

Environments decide which rollouts are correct; pass@k and cons@k are estimated exactly from n samples per prompt.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rl_core.interfaces.environment import EnvironmentInterface
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.messages import DatumSpec
from rl_train.rollouts.batches import TrainingBatches
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.environment_pool import refuse_total_failure
from rl_train.rollouts.records import environment_metrics, failure_metrics, summarize
from rl_train.rollouts.source import start_rollouts
from rl_train.rollouts.trajectory import SampleStream, Trajectory


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
        see `rl_train.rollouts.evaluation.score`.
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


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Correctness of B rollouts."""

    correct: Sequence[bool | None]
    """One entry per rollout; None if unknown."""
    unknown: Mapping[str, str]
    """Reason why correctness is unknown, by task."""


def correct_rollouts(
    rows: Sequence[Trajectory], environments: Mapping[str, EnvironmentInterface], *, reward_above: float | None = None
) -> Accuracy:
    """Whether each rollout is correct: its environment reports an `accuracy` of 1 for it.

    The environment is called because a reward alone does not show correctness (it may reward the format of a wrong answer). It
    is called for all rows with equal rewards at once, and row by row only if the accuracy of those is neither 0 nor 1.

    Args:
        rows: B finished rollouts.
        environments: by task name.
        reward_above: rollouts with a higher reward count as correct; the environment is not called.
    """
    if reward_above is not None:
        return Accuracy(correct=[row.reward > reward_above for row in rows], unknown={})
    correct: list[bool | None] = [None] * len(rows)
    unknown: dict[str, str] = {}
    for task_name in dict.fromkeys(row.task_name for row in rows):
        indices = [i for i, row in enumerate(rows) if row.task_name == task_name]
        if not all(rows[i].scored for i in indices):
            unscored = sum(not rows[i].scored for i in indices)
            unknown[task_name] = f"{unscored} of {len(indices)} rollouts could not be scored"
            continue
        try:
            grades = _grades([rows[i] for i in indices], environments)
        except NoAccuracyError as error:
            unknown[task_name] = str(error)
            continue
        for index, grade in zip(indices, grades, strict=True):
            correct[index] = grade
    return Accuracy(correct=correct, unknown=unknown)


class NoAccuracyError(Exception):
    """The environment does not report whether rows are correct."""


def _grades(rows: Sequence[Trajectory], environments: Mapping[str, EnvironmentInterface]) -> list[bool]:
    same_rewards: defaultdict[tuple[tuple[str, float], ...], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        same_rewards[tuple(sorted(row.reward_parts.items()))].append(i)
    grades = [False] * len(rows)
    for indices in same_rewards.values():
        accuracy = _accuracy([rows[i] for i in indices], environments)
        for i in indices:
            single = accuracy if accuracy in (0.0, 1.0) else _accuracy([rows[i]], environments)
            if single not in (0.0, 1.0):
                raise NoAccuracyError(f"the environment's accuracy of one sample is {single:g}, neither 0 nor 1")
            grades[i] = single == 1.0
    return grades


def _accuracy(rows: Sequence[Trajectory], environments: Mapping[str, EnvironmentInterface]) -> float:
    metrics = environment_metrics(rows, environments)
    if "rollout/accuracy" not in metrics:
        raise NoAccuracyError("the environment reports no accuracy")
    return metrics["rollout/accuracy"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over prompts."""

    value: float
    standard_error: float | None
    """Standard error of the mean over prompts; None for a single prompt."""


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of P values, one per prompt, with the standard error s / sqrt(P), where s is the unbiased standard deviation.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("cannot average over zero prompts")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(value=mean, standard_error=None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(value=mean, standard_error=math.sqrt(variance / count))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that k of the n samples, drawn without replacement, contain a correct one: 1 - C(n-c, k) / C(n, k).

    Unbiased for k new samples; computed with integers.

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1.

    Args:
        num_samples: n.
        num_correct: c, number of correct samples.
        k: number of samples drawn.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    _check_draw(num_samples, k)
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} of {num_samples} samples cannot be correct")
    every = math.comb(num_samples, k)
    return float(Fraction(every - math.comb(num_samples - num_correct, k), every))


def consensus_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """The probability that the majority answer of k of the n samples, drawn without replacement, is correct.

    The mean over all C(n, k) subsets, not the vote of the first k, which would leave n - k samples unused and depend on their
    order. Ties are broken uniformly, which equals choosing the first answer on average over the order of the samples. None is
    not a vote; without votes, the majority is wrong. An answer that is correct in some samples and wrong in others counts by
    the fraction of its samples that are correct.

    Source: Wang et al. 2022 (self-consistency), https://arxiv.org/abs/2203.11171; here unbiased for every k up to n.

    Args:
        answers: n answers; equal answers are votes for the same.
        correct: whether each sample is correct.
        k: number of samples drawn.

    Raises:
        ValueError: not 1 <= k <= n, or the lengths differ.
    """
    _check_draw(len(answers), k)
    votes = Counter(answer for answer in answers if answer is not None)
    hits: Counter[Hashable] = Counter()
    for answer, is_correct in zip(answers, correct, strict=True):
        hits[answer] += is_correct
    # Sorted, so that the result is cached for prompts with the same votes.
    classes = tuple(sorted((count, hits[answer]) for answer, count in votes.items()))
    return _majority_accuracy(classes, len(answers), k)


@lru_cache(maxsize=4096)
def _majority_accuracy(classes: tuple[tuple[int, int], ...], num_samples: int, k: int) -> float:
    """`consensus_at_k` from `classes`, the votes and the number of correct samples of each answer."""
    most = max((count for count, _ in classes), default=0)
    won = sum((_wins_with(classes, num_samples, k, winner) for winner in range(1, min(most, k) + 1)), Fraction(0))
    return float(won / math.comb(num_samples, k))


def _wins_with(classes: Sequence[tuple[int, int]], num_samples: int, k: int, winner: int) -> Fraction:
    """Number of subsets whose majority has exactly `winner` votes, weighted by the fraction of correct ones in tied answers.

    Answers with fewer than `winner` votes in total cannot win: together with samples that do not vote they form a pool from
    which any number may be drawn. The others are added one by one: `ways[drawn, tied]` counts their subsets with `drawn`
    samples in which `tied` answers have `winner` votes, and `weight` sums the fractions of correct ones of those answers.
    """
    rivals = [(count, hit) for count, hit in classes if count >= winner]
    pool = num_samples - sum(count for count, _ in rivals)
    ways: Mapping[tuple[int, int], int] = {(0, 0): 1}
    weight: Mapping[tuple[int, int], Fraction] = {}
    for count, hit in rivals:
        fraction = Fraction(hit, count)
        more_ways: defaultdict[tuple[int, int], int] = defaultdict(int)
        more_weight: defaultdict[tuple[int, int], Fraction] = defaultdict(Fraction)
        for (drawn, tied), number in ways.items():
            for votes in range(min(winner, k - drawn) + 1):
                at = drawn + votes, tied + (votes == winner)
                choices = math.comb(count, votes)
                more_ways[at] += number * choices
                more_weight[at] += choices * (weight.get((drawn, tied), 0) + (number * fraction if votes == winner else 0))
        ways, weight = more_ways, more_weight
    return sum(
        (total / tied * math.comb(pool, k - drawn) for (drawn, tied), total in weight.items() if tied), start=Fraction(0)
    )


def _check_draw(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}, but must be from 1 to {num_samples}, the number of samples")


@dataclass(frozen=True, kw_only=True)
class Group:
    """The samples of one prompt."""

    rows: Sequence[Trajectory]
    """n finished rollouts."""
    correct: Sequence[bool] | None
    """Whether each is correct; None if unknown."""

    @property
    def task_name(self) -> str:
        """Task of the prompt."""
        return self.rows[0].task_name

    @property
    def answers(self) -> list[str | None]:
        """The answer that the environment extracted from each."""
        return [row.answer for row in self.rows]

    @property
    def lengths(self) -> list[int]:
        """Number of sampled tokens of each."""
        return [row.num_sampled_tokens() for row in self.rows]

    @property
    def is_truncated(self) -> bool:
        """Whether the prompt was too long and truncated."""
        return self.rows[0].loss_multiplier == 0.0


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The metrics of some prompts."""

    num_prompts: int
    """P, number of prompts."""
    samples_per_prompt: int
    """n, number of samples per prompt."""
    metrics: Mapping[str, Estimate]
    """`mean@n`, `pass@k`, `cons@k`, `reward`, `reward/<part>`, `length` (tokens), `truncated_frac`."""
    max_length: int
    """Largest number of sampled tokens of a rollout."""
    num_truncated_prompts: int
    """Number of truncated prompts."""
    not_reported: Mapping[str, str]
    """Reason for each of `pass@k` and `cons@k` that is not among the metrics."""


def grouped(rows: Sequence[Trajectory], correctness: Accuracy, *, samples_per_prompt: int) -> list[Group]:
    """Rollouts as groups; those of one prompt must be consecutive."""
    groups = []
    for start in range(0, len(rows), samples_per_prompt):
        correct = [
            is_correct for is_correct in correctness.correct[start : start + samples_per_prompt] if is_correct is not None
        ]
        group = rows[start : start + samples_per_prompt]
        groups.append(Group(rows=group, correct=correct if len(correct) == len(group) else None))
    return groups


def default_ks(samples_per_prompt: int) -> tuple[int, ...]:
    """The powers of two up to n, and n."""
    powers = (2**exponent for exponent in range(samples_per_prompt.bit_length()))
    return tuple(sorted({*powers, samples_per_prompt}))


def score(groups: Sequence[Group], correctness: Accuracy, *, ks: Sequence[int]) -> Scores:
    """The scores of P prompts of n samples each.

    A metric is only reported if it is known for every prompt, because a mean over some tasks would look like one over all.

    Args:
        groups: P groups of n.
        correctness: of the rollouts, with the reasons for unknown ones.
        ks: the k of pass@k and cons@k.
    """
    num_samples = len(groups[0].rows)
    metrics: dict[str, Estimate] = {}
    not_reported: dict[str, str] = {}
    tasks = dict.fromkeys(group.task_name for group in groups)
    unknown = [task for task in tasks if task in correctness.unknown]
    without_answers = [task for task in tasks if not _has_answers(groups, task)]
    if unknown:
        not_reported["pass@k"] = "; ".join(f"{task}: {correctness.unknown[task]}" for task in unknown)
    else:
        metrics[f"mean@{num_samples}"] = _over_prompts(groups, lambda group: _mean(group.correct or ()))
        for k in ks:
            metrics[f"pass@{k}"] = _over_prompts(groups, lambda g, k=k: pass_at_k(num_samples, sum(g.correct or ()), k))
    if unknown:
        not_reported["cons@k"] = not_reported["pass@k"]
    elif without_answers:
        not_reported["cons@k"] = "; ".join(f"{task}: the environment returned no answers" for task in without_answers)
    else:
        for k in ks:
            metrics[f"cons@{k}"] = _over_prompts(groups, lambda g, k=k: consensus_at_k(g.answers, g.correct or (), k))
    return Scores(
        num_prompts=len(groups),
        samples_per_prompt=num_samples,
        metrics=metrics | _plain_means(groups),
        max_length=max(length for group in groups for length in group.lengths),
        num_truncated_prompts=sum(group.is_truncated for group in groups),
        not_reported=not_reported,
    )


def _plain_means(groups: Sequence[Group]) -> dict[str, Estimate]:
    names = sorted({name for group in groups for row in group.rows for name in row.reward_parts})
    parts = {
        f"reward/{name}": _over_prompts(groups, lambda g, name=name: _mean([r.reward_parts.get(name, 0.0) for r in g.rows]))
        for name in names
        if names != ["reward"]
    }
    return {
        "reward": _over_prompts(groups, lambda group: _mean([row.reward for row in group.rows])),
        **parts,
        "length": _over_prompts(groups, lambda group: _mean(group.lengths)),
        "truncated_frac": _over_prompts(groups, lambda group: _mean([row.truncated for row in group.rows])),
    }


def _has_answers(groups: Sequence[Group], task_name: str) -> bool:
    return any(answer is not None for group in groups if group.task_name == task_name for answer in group.answers)


def _over_prompts(groups: Sequence[Group], of_one: Callable[..., float]) -> Estimate:
    return estimate([of_one(group) for group in groups])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_AREA = "validation/"


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """Validation data of a run: prompts that are sampled and scored, rows on which the loss is computed, or both."""

    name: str = ""
    """Key in `data.validation_sets`; empty for `data.validation`."""
    val_period: int
    """Number of steps between validations; 0 for none."""
    evaluation: Evaluation | None = None
    """Evaluation on the prompts."""
    batches: TrainingBatches | None = None
    """Supervised batches."""

    def named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics `validation/x` as `validation/<name>/x`; unchanged for `data.validation`."""
        prefix = f"{_AREA}{self.name}/" if self.name else _AREA
        return {prefix + name.removeprefix(_AREA): value for name, value in metrics.items()}
