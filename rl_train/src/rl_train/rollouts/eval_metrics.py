"""Evaluation metrics: correctness, rewards and lengths, each a mean over prompts with its standard error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rl_train.rollouts.correctness import Accuracy
from rl_train.rollouts.pass_at_k import Estimate, consensus_at_k, estimate, pass_at_k
from rl_train.rollouts.trajectory import Trajectory


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
