"""Finished rollouts as plain records for logs, and recorded rollouts, which can be trained on again."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_train.rollouts.trajectory import MessageLog, Trajectory, is_sampled, log_token_ids, sampled_mask

EXPECTED_KEYS = ("expected_answer", "ground_truth")
"""Keys of the right answer in an environment's metadata, in this order."""


def rollout_records(
    trajectories: Sequence[Trajectory],
    advantages: torch.Tensor | None = None,
    policy_logprobs: torch.Tensor | None = None,
) -> list[dict[str, Any]]:
    """One JSON-ready record per rollout.

    Args:
        trajectories: R finished rollouts.
        advantages: [R], if they were trained on.
        policy_logprobs: [B, T] in nats, of the policy before training on them, if it scored them: one row for each segment, in
            the order of `to_batch`.
    """
    records = []
    next_row = 0
    for number, trajectory in enumerate(trajectories):
        segments, sampled = trajectory.segments, trajectory.sampled_messages
        rows = slice(next_row, next_row + len(segments))
        next_row = rows.stop
        log = segments[0]
        texts = [str(message.get("sampled_text", message["content"])) for message in sampled]
        # A rollout whose `reset` failed has no sampled message.
        first = next((i for i, message in enumerate(log) if is_sampled(message)), len(log))
        records.append(
            {
                "task": trajectory.task_name,
                "index": trajectory.index,
                "ordinal": trajectory.ordinal,
                "group": trajectory.group_id,
                "sample": trajectory.sample,
                "prompt": "".join(message["content"] for message in log[:first]),
                "completion": "".join(texts),
                "turn_texts": texts if len(texts) > 1 else None,
                "messages": trajectory.conversation(),
                "answer": trajectory.answer,
                "expected_answer": expected_answer(trajectory.metadata),
                "prompt_tokens": torch.cat([m["token_ids"] for m in log[:first]]).tolist(),
                "tokens": [token for message in sampled for token in message["token_ids"].tolist()],
                "logprobs": [value for m in sampled for value in _exact(m["generation_logprobs"])],
                "policy_logprobs": None if policy_logprobs is None else _sampled_only(policy_logprobs[rows], segments),
                "segments": [_segment_record(each) for each in segments] if len(segments) > 1 else None,
                "sequence": _segment_record(log) if len(segments) == 1 and log[first + 1 :] else None,
                "reward": trajectory.reward,
                "reward_parts": trajectory.reward_parts,
                "turn_rewards": trajectory.turn_rewards,
                "scored": trajectory.scored,
                "failure": trajectory.failure,
                "advantage": float(advantages[number]) if advantages is not None else None,
                "truncated": trajectory.truncated,
                "turns": trajectory.turns,
                "weight_version": trajectory.weight_version,
                "turn_versions": [message["weight_version"] for message in sampled],
                "token_versions": _mixed_versions(sampled),
                "loss_multiplier": trajectory.loss_multiplier,
            }
        )
    return records


def recorded_rollout(record: Mapping[str, Any], reward_weights: Mapping[str, float]) -> Trajectory:
    """The rollout of a record, with everything that training reads; without the environment's metadata.

    Args:
        record: of `rollout_records`, also from JSON.
        reward_weights: weights of named rewards that are not 1.
    """
    whole = {
        "tokens": record["prompt_tokens"] + record["tokens"],
        "turns": [0] * len(record["prompt_tokens"]) + [1] * len(record["tokens"]),
    }
    segments = record["segments"] or [record["sequence"] or whole]
    versions = record["token_versions"] or [None] * len(record["turn_versions"])
    logprobs = iter(record["logprobs"])
    texts = record["turn_texts"] or [record["completion"]]
    logs = []
    for segment in segments:
        log: MessageLog = []
        for turn, pairs in itertools.groupby(zip(segment["turns"], segment["tokens"], strict=True), key=lambda pair: pair[0]):
            tokens = torch.tensor([token for _, token in pairs], dtype=torch.int64)
            if turn == 0:
                log.append({"role": "user", "content": "" if log else record["prompt"], "token_ids": tokens})
                continue
            sampled: dict[str, Any] = {"role": "assistant", "content": texts[turn - 1], "token_ids": tokens, "turn": turn}
            sampled["generation_logprobs"] = torch.tensor(list(itertools.islice(logprobs, len(tokens))), dtype=torch.float32)
            sampled["weight_version"], mixed = record["turn_versions"][turn - 1], versions[turn - 1]
            sampled["token_versions"] = None if mixed is None else torch.tensor(mixed, dtype=torch.int64)
            log.append(sampled)
        logs.append(log)
    renamed = {"task_name": "task", "group_id": "group"}
    same = ("index", "ordinal", "sample", "loss_multiplier", "reward", "reward_parts", "turn_rewards", "scored", "failure")
    fields = {name: record[renamed.get(name, name)] for name in (*renamed, *same, "truncated", "turns", "answer")}
    return Trajectory(
        message_log=logs[-1], earlier_segments=logs[:-1], metadata=None, reward_weights=reward_weights, done=True, **fields
    )


def expected_answer(metadata: Any) -> str | int | float | None:
    """The correct answer in a row's metadata, as text unless it is a number; None if there is none."""
    if not isinstance(metadata, Mapping):
        return None
    answer = next((metadata[key] for key in EXPECTED_KEYS if metadata.get(key) is not None), None)
    if answer is None or isinstance(answer, int | float):
        return answer
    # Metadata may have unpaired surrogates, which cannot be encoded as UTF-8: they are escaped.
    return str(answer).encode(errors="backslashreplace").decode()


def _sampled_only(values: torch.Tensor, segments: Sequence[MessageLog]) -> list[float]:
    """The values of sampled tokens from the values [S, T] of the segments of a rollout."""
    sampled: list[float] = []
    for row, log in zip(values, segments, strict=True):
        mask = sampled_mask(log)
        sampled += row[: len(mask)][mask].tolist()
    return [round(value, 6) for value in sampled]


def _exact(values: torch.Tensor) -> list[float]:
    """The shortest decimal numbers that are rounded to these float32 values."""
    return [float(str(value)) for value in values.float().numpy()]


def _mixed_versions(sampled: Sequence[Mapping[str, Any]]) -> list[list[int] | None] | None:
    """For each turn, the weight versions of its tokens if they differ; None if no turn has several."""
    turns = [message.get("token_versions") for message in sampled]
    mixed = [None if each is None or bool((each == each[:1]).all()) else each.tolist() for each in turns]
    return mixed if any(mixed) else None


def _segment_record(log: MessageLog) -> dict[str, Any]:
    """All tokens of a segment, with the turn of each; 0 for tokens that were not sampled."""
    turns = [turn for message in log for turn in [message.get("turn", 0)] * len(message["token_ids"])]
    return {"tokens": log_token_ids(log).tolist(), "turns": turns}
