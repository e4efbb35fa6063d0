"""Finished rollouts as plain records for logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_train.rollouts.trajectory import Trajectory

EXPECTED_KEYS = ("expected_answer", "ground_truth")
"""Keys of the right answer in an environment's metadata, in this order."""


def rollout_records(
    trajectories: Sequence[Trajectory],
    advantages: torch.Tensor | None = None,
    policy_logprobs: torch.Tensor | None = None,
) -> list[dict[str, Any]]:
    """One JSON-ready record per rollout.

    Args:
        trajectories: B finished rollouts.
        advantages: [B], if they were trained on.
        policy_logprobs: [B, T] in nats, of the policy before training on them, if it scored them.
    """
    records = []
    for row, trajectory in enumerate(trajectories):
        sampled = [message for message in trajectory.message_log if "generation_logprobs" in message]
        log = trajectory.message_log
        # A rollout whose `reset` failed has no sampled message.
        first = next((i for i, message in enumerate(log) if "generation_logprobs" in message), len(log))
        records.append(
            {
                "task": trajectory.task_name,
                "index": trajectory.index,
                "group": trajectory.group_id,
                "sample": trajectory.sample,
                "prompt": "".join(message["content"] for message in log[:first]),
                "completion": "".join(message.get("sampled_text", message["content"]) for message in sampled),
                "messages": trajectory.conversation(),
                "answer": trajectory.answer,
                "expected_answer": expected_answer(trajectory.metadata),
                "prompt_tokens": torch.cat([m["token_ids"] for m in log[:first]]).tolist(),
                "tokens": [token for message in sampled for token in message["token_ids"].tolist()],
                "logprobs": [round(x, 6) for m in sampled for x in m["generation_logprobs"].tolist()],
                "policy_logprobs": None if policy_logprobs is None else _sampled_only(policy_logprobs[row], trajectory),
                "reward": trajectory.reward,
                "reward_parts": trajectory.reward_parts,
                "turn_rewards": trajectory.turn_rewards,
                "scored": trajectory.scored,
                "failure": trajectory.failure,
                "advantage": float(advantages[row]) if advantages is not None else None,
                "truncated": trajectory.truncated,
                "turns": trajectory.turns,
                "weight_version": trajectory.weight_version,
                "turn_versions": [message["weight_version"] for message in sampled],
            }
        )
    return records


def expected_answer(metadata: Any) -> str | int | float | None:
    """The right answer in a row's metadata, as text unless it is a number; None if there is none."""
    if not isinstance(metadata, Mapping):
        return None
    found = next((metadata[key] for key in EXPECTED_KEYS if metadata.get(key) is not None), None)
    if found is None or isinstance(found, int | float):
        return found
    # Metadata may have unpaired surrogates, which cannot be encoded as UTF-8: they are escaped.
    return str(found).encode(errors="backslashreplace").decode()


def _sampled_only(values: torch.Tensor, trajectory: Trajectory) -> list[float]:
    """The values of sampled tokens from the values [T] of a row."""
    lengths = torch.tensor([len(message["token_ids"]) for message in trajectory.message_log])
    is_sampled = torch.tensor(["generation_logprobs" in message for message in trajectory.message_log])
    mask = is_sampled.repeat_interleave(lengths)
    return [round(value, 6) for value in values[: len(mask)][mask].tolist()]
