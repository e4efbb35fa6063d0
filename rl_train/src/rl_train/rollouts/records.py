"""Finished rollouts as records for logs, with their metrics, and as files of a checkpoint.

Recorded rollouts can be trained on again. A resumed run trains on those in its checkpoint, instead of sampling them again:
`groups.json` has everything but the tensors, and `groups.safetensors` one tensor for each dtype, with all tensors of that dtype
one after the other, so that log-probabilities are exact. `images.safetensors` has the tensors of each image once.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.images import ImageInputs, RowImage
from rl_core.errors import DataError
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.records import plain_text
from rl_core.testing.outputs.environment import metrics_checked
from rl_train.data.images import TextImage
from rl_train.data.messages import images_of
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
    shown: set[str] = set()
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
                "prompt": "".join(plain_text(message["content"]) for message in log[:first]),
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
                "baseline_reward": trajectory.baseline_reward,
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
                **({"images": images} if any(images := [_image_records(each) for each in segments]) else {}),
                **({"thumbnails": small} if (small := _thumbnails(trajectory, shown)) else {}),
            }
        )
    return records


def recorded_rollout(record: Mapping[str, Any], reward_weights: Mapping[str, float]) -> Trajectory:
    """The rollout of a record, with everything that training reads; without the environment's metadata.

    Args:
        record: of `rollout_records`, also from JSON.
        reward_weights: weights of named rewards that are not 1.

    Raises:
        DataError: it has images, which records only refer to.
    """
    if record.get("images"):
        raise DataError("a recorded rollout has images, whose pixels are not recorded, so it cannot be replayed")
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
        message_log=logs[-1],
        earlier_segments=logs[:-1],
        metadata=None,
        reward_weights=reward_weights,
        baseline_reward=record.get("baseline_reward"),
        done=True,
        **fields,
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


def _image_records(log: MessageLog) -> list[dict[str, Any]]:
    """The places of the images of a segment, without their tensors."""
    return [{"digest": image.digest, "start": image.start, "length": image.length} for image in images_of(log) or ()]


def _thumbnails(trajectory: Trajectory, shown: set[str]) -> dict[str, str]:
    """Thumbnails, by digest, of pictures without a file that are not among those `shown`, to which they are added."""
    small = {
        each.digest: each.thumbnail for each in trajectory.images() or () if isinstance(each, TextImage) and each.thumbnail
    }
    new = {digest: url for digest, url in small.items() if digest not in shown}
    shown.update(new)
    return new


def _segment_record(log: MessageLog) -> dict[str, Any]:
    """All tokens of a segment, with the turn of each; 0 for tokens that were not sampled."""
    turns = [turn for message in log for turn in [message.get("turn", 0)] * len(message["token_ids"])]
    return {"tokens": log_token_ids(log).tolist(), "turns": turns}


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


_JSON, _TENSORS, _IMAGES = "groups.json", "groups.safetensors", "images.safetensors"
_TENSOR, _IMAGE = "$tensor", "$image"
_log = logging.getLogger("rlcore")


@dataclass(frozen=True, kw_only=True)
class SavedGroup:
    """The finished rollouts of a group that is in no batch yet."""

    ordinal: int
    """The prompt's number."""
    began: int
    """The step of the weights with which it began."""
    accepted: bool
    """Whether it was counted and selected; otherwise, the next batch does it."""
    rows: list[Trajectory]
    """Those of its G rollouts that are finished."""


def save_groups(folder: Path, groups: Sequence[SavedGroup], limits: Mapping[str, Any]) -> None:
    """Write groups to a folder; nothing without any.

    A group whose metadata are not JSON is left out with a warning: a resumed run samples it again.

    Args:
        folder: created if necessary.
        groups: the groups.
        limits: what the schedule that began the groups depends on.
    """
    tensors, saved = _Tensors(), []
    for group in groups:
        try:
            content = [{each.name: tensors.put(getattr(row, each.name)) for each in fields(row)} for row in group.rows]
            is_exact = json.loads(json.dumps(content)) == content
        except (TypeError, ValueError):
            is_exact = False
        if is_exact:
            saved.append({"ordinal": group.ordinal, "began": group.began, "accepted": group.accepted, "rows": content})
    if len(saved) < len(groups):
        _log.warning(
            "The finished rollouts of %d of %d groups are not in the checkpoint, because their metadata are not JSON values; a "
            "resumed run samples them again.",
            len(groups) - len(saved),
            len(groups),
        )
    if saved:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _JSON).write_text(json.dumps({"limits": dict(limits), "groups": saved}), encoding="utf-8")
        save_file(tensors.joined(), folder / _TENSORS)
        if tensors.images:
            save_file(tensors.images, folder / _IMAGES)


def load_groups(folder: Path, limits: Mapping[str, Any]) -> list[SavedGroup]:
    """The groups in a folder; none if it has none, or if they were saved with other limits, so that they may be too many.

    Args:
        folder: of `save_groups`.
        limits: those of the resumed run.
    """
    if not (folder / _JSON).is_file():
        return []
    content = json.loads((folder / _JSON).read_text(encoding="utf-8"))
    if content["limits"] != dict(limits):
        _log.info("the finished rollouts of the checkpoint are sampled again, because the settings of rollouts have changed")
        return []
    tensors = load_file(folder / _TENSORS)
    images: defaultdict[str, ImageInputs] = defaultdict(ImageInputs)
    for key, tensor in load_file(folder / _IMAGES).items() if (folder / _IMAGES).is_file() else ():
        digest, _, name = key.partition(" ")
        images[digest][name] = tensor
    return [
        SavedGroup(
            ordinal=group["ordinal"],
            began=group["began"],
            accepted=group["accepted"],
            rows=[Trajectory(**{**_restored(row, tensors, images), "finished": True}) for row in group["rows"]],
        )
        for group in content["groups"]
    ]


@dataclass
class _Tensors:
    """Tensors [n] joined by dtype, and those of images."""

    images: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the digest of the image and its name, with a space between them."""
    _parts: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)

    def put(self, value: Any) -> Any:
        """The value, in which each tensor is `{"$tensor": [dtype, start, stop]}`, and each image its other fields."""
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            start = self._sizes.get(dtype, 0)
            self._sizes[dtype] = start + value.numel()
            self._parts.setdefault(dtype, []).append(value)
            return {_TENSOR: [dtype, start, self._sizes[dtype]]}
        if isinstance(value, RowImage):
            self.images |= {f"{value.digest} {name}": tensor.contiguous() for name, tensor in value.inputs.items()}
            return {_IMAGE: {each.name: getattr(value, each.name) for each in fields(value) if each.name != "inputs"}}
        if isinstance(value, Mapping):
            return {key: self.put(each) for key, each in value.items()}
        return [self.put(each) for each in value] if isinstance(value, list) else value

    def joined(self) -> dict[str, torch.Tensor]:
        return {dtype: torch.cat(parts) for dtype, parts in self._parts.items()}


def _restored(value: Any, tensors: Mapping[str, torch.Tensor], images: Mapping[str, ImageInputs]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_IMAGE}:
            kind: Any = TextImage if "text" in value[_IMAGE] else RowImage
            return kind(**value[_IMAGE], inputs=images[value[_IMAGE]["digest"]])
        if value.keys() == {_TENSOR}:
            dtype, start, stop = value[_TENSOR]
            return tensors[dtype][start:stop].clone()
        return {key: _restored(each, tensors, images) for key, each in value.items()}
    return [_restored(each, tensors, images) for each in value] if isinstance(value, list) else value
