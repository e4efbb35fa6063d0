"""Finished rollouts as plain records for a log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_core.rollouts.trajectory import Trajectory


def rollout_records(trajectories: Sequence[Trajectory], advantages: torch.Tensor | None = None) -> list[dict[str, Any]]:
    """One JSON-ready record a rollout.

    Args:
        trajectories: B finished rollouts.
        advantages: [B], where they were trained on.
    """
    records = []
    for row, trajectory in enumerate(trajectories):
        sampled = [message for message in trajectory.message_log if "generation_logprobs" in message]
        first = next(i for i, message in enumerate(trajectory.message_log) if "generation_logprobs" in message)
        records.append(
            {
                "task": trajectory.task_name,
                "index": trajectory.index,
                "group": trajectory.group_id,
                "sample": trajectory.sample,
                "prompt": "".join(message["content"] for message in trajectory.message_log[:first]),
                "completion": "".join(message["content"] for message in sampled),
                "messages": trajectory.conversation(),
                "answer": trajectory.answer,
                "prompt_tokens": torch.cat([m["token_ids"] for m in trajectory.message_log[:first]]).tolist(),
                "tokens": torch.cat([message["token_ids"] for message in sampled]).tolist(),
                "logprobs": [round(x, 6) for m in sampled for x in m["generation_logprobs"].tolist()],
                "reward": trajectory.reward,
                "reward_parts": trajectory.reward_parts,
                "advantage": float(advantages[row]) if advantages is not None else None,
                "truncated": trajectory.truncated,
                "turns": trajectory.turns,
                "weight_version": trajectory.weight_version,
            }
        )
    return records
