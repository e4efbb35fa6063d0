"""What the rollouts of many prompts come to: right ones, rewards, lengths; each a mean over prompts with its standard error."""

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
    right: Sequence[bool] | None
    """Of each; None where nobody says."""

    @property
    def task_name(self) -> str:
        """Which environment answered."""
        return self.rows[0].task_name

    @property
    def answers(self) -> list[str | None]:
        """What the environment read, of each."""
        return [row.answer for row in self.rows]

    @property
    def lengths(self) -> list[int]:
        """Sampled tokens, of each."""
        return [row.num_sampled_tokens() for row in self.rows]

    @property
    def is_cut(self) -> bool:
        """Whether the prompt was longer than the config allows, and was asked without its end."""
        return self.rows[0].loss_multiplier == 0.0


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What some prompts came to."""

    num_prompts: int
    """P."""
    samples_per_prompt: int
    """n."""
    metrics: Mapping[str, Estimate]
    """`mean@n`, `pass@k`, `cons@k`, `reward`, `reward/<part>`, `length` (tokens), `truncated_frac`."""
    max_length: int
    """Most sampled tokens of a rollout."""
    num_cut_prompts: int
    """Prompts that were too long and asked cut."""
    not_reported: Mapping[str, str]
    """`pass@k` or `cons@k` to why it is not among the metrics."""


def grouped(rows: Sequence[Trajectory], judgement: Accuracy, *, samples_per_prompt: int) -> list[Group]:
    """Rollouts as groups; those of a prompt lie side by side."""
    groups = []
    for start in range(0, len(rows), samples_per_prompt):
        right = [verdict for verdict in judgement.right[start : start + samples_per_prompt] if verdict is not None]
        group = rows[start : start + samples_per_prompt]
        groups.append(Group(rows=group, right=right if len(right) == len(group) else None))
    return groups


def usual_ks(samples_per_prompt: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, and n itself."""
    powers = (2**exponent for exponent in range(samples_per_prompt.bit_length()))
    return tuple(sorted({*powers, samples_per_prompt}))


def score(groups: Sequence[Group], judgement: Accuracy, *, ks: Sequence[int]) -> Scores:
    """The scores of P prompts of n samples each.

    A metric is reported where it is known of every prompt: a mean over some of the tasks would pass for one over all.

    Args:
        groups: P groups of n.
        judgement: where they were judged; says why some were not.
        ks: the k of pass@k and cons@k.
    """
    num_samples = len(groups[0].rows)
    metrics: dict[str, Estimate] = {}
    not_reported: dict[str, str] = {}
    tasks = dict.fromkeys(group.task_name for group in groups)
    unjudged = [task for task in tasks if task in judgement.unjudged]
    silent = [task for task in tasks if not _has_answers(groups, task)]
    if unjudged:
        not_reported["pass@k"] = "; ".join(f"{task}: {judgement.unjudged[task]}" for task in unjudged)
    else:
        metrics[f"mean@{num_samples}"] = _over_prompts(groups, lambda group: _mean(group.right or ()))
        for k in ks:
            metrics[f"pass@{k}"] = _over_prompts(groups, lambda g, k=k: pass_at_k(num_samples, sum(g.right or ()), k))
    if unjudged:
        not_reported["cons@k"] = not_reported["pass@k"]
    elif silent:
        not_reported["cons@k"] = "; ".join(f"{task}: the environment returned no answers" for task in silent)
    else:
        for k in ks:
            metrics[f"cons@{k}"] = _over_prompts(groups, lambda g, k=k: consensus_at_k(g.answers, g.right or (), k))
    return Scores(
        num_prompts=len(groups),
        samples_per_prompt=num_samples,
        metrics=metrics | _plain_means(groups),
        max_length=max(length for group in groups for length in group.lengths),
        num_cut_prompts=sum(group.is_cut for group in groups),
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
