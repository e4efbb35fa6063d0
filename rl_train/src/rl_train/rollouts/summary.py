"""Metrics of a batch of rollouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.testing.outputs.environment import metrics_checked
from rl_train.rollouts.trajectory import Trajectory


def summarize(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Lengths, turns, segments and truncation of finished rollouts, and the rewards of the scored ones, if there are any."""
    lengths = torch.tensor([row.num_sampled_tokens() for row in trajectories], dtype=torch.float64)
    metrics = {
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
        "length/truncated_frac": sum(row.truncated for row in trajectories) / len(trajectories),
        "rollout/turns": sum(row.turns for row in trajectories) / len(trajectories),
        "rollout/rows": float(len(trajectories)),
    }
    segments = sum(len(row.segments) for row in trajectories)
    if segments > len(trajectories):
        metrics["rollout/segments"] = segments / len(trajectories)
    scored = [row for row in trajectories if row.scored]
    if len(scored) < len(trajectories):
        metrics["rollout/unscored_frac"] = 1 - len(scored) / len(trajectories)
    names = sorted({name for row in scored for name in row.reward_parts})
    if names:
        rewards = torch.tensor([row.reward for row in scored], dtype=torch.float64)
        metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std(correction=0))}
    if (equal := equal_groups_frac(trajectories)) is not None:
        metrics["reward/equal_groups_frac"] = equal
    if names != ["reward"]:
        metrics |= {f"reward/{name}": _mean([row.reward_parts.get(name, 0.0) for row in scored]) for name in names}
    return metrics


def failure_metrics(trajectories: Sequence[Trajectory], *, replaced_groups: int = 0) -> dict[str, float]:
    """Counts of failed rows, repeated steps, restarted rollouts and replaced groups; those that are 0 are left out.

    Args:
        trajectories: all finished rollouts of a draw, including those of replaced groups.
        replaced_groups: number of groups that had too few scored rows.
    """
    counts = {
        "rollout/failed_rows": sum(row.failure is not None for row in trajectories),
        "rollout/repeated_steps": sum(row.retries for row in trajectories),
        "rollout/restarted": sum(row.restarts > 0 for row in trajectories),
        "rollout/replaced_groups": replaced_groups,
    }
    return {name: float(count) for name, count in counts.items() if count}


def environment_times(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`env/<task>/wait_s` and `env/<task>/step_s`: mean seconds per rollout in which its steps waited for a worker, and ran."""
    metrics: dict[str, float] = {}
    for task_name in dict.fromkeys(row.task_name for row in trajectories if row.environment_step_s):
        rows = [row for row in trajectories if row.task_name == task_name]
        metrics[f"env/{task_name}/wait_s"] = _mean([row.environment_wait_s for row in rows])
        metrics[f"env/{task_name}/step_s"] = _mean([row.environment_step_s for row in rows])
    return metrics


def environment_metrics(
    trajectories: Sequence[Trajectory], environments: Mapping[str, EnvironmentInterface]
) -> dict[str, float]:
    """The environments' own metrics, as `env/<task>/<name>`; `rollout/accuracy` is over all that report an `accuracy`.

    Rows that were not scored are left out. Without any environment there are no metrics.
    """
    metrics: dict[str, float] = {}
    correct = 0.0
    counted = 0
    for task_name in dict.fromkeys(row.task_name for row in trajectories if environments and row.scored):
        rows = [row for row in trajectories if row.task_name == task_name and row.scored]
        reported = metrics_checked(environments[task_name], task_name, _for_environment(rows))
        metrics |= {f"env/{task_name}/{name}": value for name, value in reported.items()}
        if "accuracy" in reported:
            correct += reported["accuracy"] * len(rows)
            counted += len(rows)
    if counted:
        metrics["rollout/accuracy"] = correct / counted
    return metrics


def _for_environment(rows: Sequence[Trajectory]) -> BatchedDataDict[Any]:
    """The data of finished rows for an environment, without tokens, which would be expensive to send."""
    return BatchedDataDict(
        {
            "rewards": torch.tensor([row.reward for row in rows], dtype=torch.float32),
            "truncated": torch.tensor([row.truncated for row in rows], dtype=torch.bool),
            "message_log": [row.conversation() for row in rows],
            "extra_env_info": [row.metadata for row in rows],
            "answers": [row.answer for row in rows],
            "task_name": [row.task_name for row in rows],
            "idx": [row.index for row in rows],
        }
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


_ROUNDING = 1e-6


def equal_groups_frac(trajectories: Sequence[Trajectory]) -> float | None:
    """The fraction of groups in which the environment's rewards are equal, name by name; None without rewards to compare.

    Rows are compared within their group, or with all rows if each prompt has one sample.

    Args:
        trajectories: finished rollouts. Rollouts that were not scored are ignored.
    """
    rows = [row for row in trajectories if row.scored]
    if len(rows) < 2 or not any(row.reward_parts for row in rows):
        return None
    groups: defaultdict[int, list[Mapping[str, float]]] = defaultdict(list)
    for row in rows:
        groups[row.ordinal].append(row.reward_parts)
    compared = list(groups.values())
    if all(len(group) == 1 for group in compared):
        compared = [[parts for group in compared for parts in group]]
    return sum(map(_are_equal, compared)) / len(compared)


def _are_equal(group: Sequence[Mapping[str, float]]) -> bool:
    """Whether all rows have the same rewards, name by name, up to rounding; a missing one counts as 0."""
    for name in {name for parts in group for name in parts}:
        values = [parts.get(name, 0.0) for parts in group]
        if max(values) - min(values) > _ROUNDING * max(1.0, *(abs(value) for value in values)):
            return False
    return True
