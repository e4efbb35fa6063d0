"""A rollout that grows turn by turn, finished rollouts as rows of a batch, and the seeds of their samples.

A rollout has one or more segments: sequences of tokens that the model has read and sampled. Rewriting the history starts one.

Rewards, baselines and statistics belong to rollouts; models compute segments. `to_batch` has a row for each segment,
`join_segments` one for each rollout, `split_segments` goes back. If each rollout has one segment, both return their argument.
"""

from __future__ import annotations

import copy
import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, cast

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import SETS, SampledSets, joined_sets
from rl_core.data.images import RowImage, prompt_identity
from rl_core.data.schema import pad_value
from rl_core.dispatch.rows import padding_rows
from rl_core.errors import UserError
from rl_core.interfaces.records import MESSAGE_KEYS, Message, Observation, ToolSpec, messages_of
from rl_train.data.messages import images_of
from rl_train.files import format_size
from rl_train.tools.parsers import SampledMessage, ToolCallParser, parse_message

MessageLog = list[dict[str, Any]]
_OF_TOKENS = ("generation_logprobs", "weight_version", "token_versions", "turn", SETS, "images")
"""Keys of a message that it only has in the segment in which its tokens are."""

_SAME = ("reward_parts", "task_name", "tools", "prefill", "feedback")
_COLUMNS = {"idx": "index", "extra_env_info": "metadata", **dict(zip(_SAME, _SAME, strict=True))}
"""Columns of a batch that are attributes of rollouts."""
_COUNTERS = ("retries", "restarts", "environment_wait_s", "environment_step_s")
"""Fields that a rollout keeps if it begins again."""


@dataclass(kw_only=True)
class Trajectory:
    """An unfinished or finished conversation; the tokens of its segments are the training sequences."""

    message_log: MessageLog
    """The current segment: messages with `role`, `content`, `token_ids` [T], and `images` of these tokens, a list of
    `RowImage`, if there are any; those that were sampled in it also with `generation_logprobs` [T], `weight_version`,
    `token_versions` [T] or None, `turn` (from 1) and, if they were requested, `sampled_sets`."""
    earlier_segments: list[MessageLog] = field(default_factory=list)
    """Message logs of the segments before the current one."""
    metadata: Any
    """The environment's state for this row."""
    task_name: str
    """Task, which selects the environment."""
    group_id: int
    """Shared by all rows of a prompt."""
    index: int
    """Index of the record in the dataset."""
    ordinal: int
    """The prompt's number in the endless order of draws, from 0; see `rl_train.rollouts.trajectory`."""
    sample: int
    """Index of the sample in its group; -1 for the greedy rollout whose reward is the baseline of the group."""
    loss_multiplier: float = 1.0
    """0 excludes the row from the loss."""
    stop_strings: list[str] | None = None
    """Stop strings of the next turn."""
    reward: float = 0.0
    """Sum over turns of all rewards, weighted."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Rewards by name, summed over turns; `reward` if the environment returns only one."""
    turn_rewards: list[dict[str, float]] = field(default_factory=list)
    """Rewards by name, for each turn that was scored."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of named rewards that are not 1."""
    baseline_reward: float | None = None
    """Reward of the greedy rollout of the same prompt; None if there is none."""
    scored: bool = True
    """Whether the environment could score every turn; otherwise the row counts neither in statistics nor in the loss."""
    failure: str | None = None
    """Type and first line of the error that kept the row from being scored; None if there was none."""
    failure_details: str = ""
    """The whole text of that error."""
    retries: int = 0
    """Number of repeated environment steps."""
    restarts: int = 0
    """Number of times that it began again from its prompt; they also count as `retries`."""
    environment_wait_s: float = 0.0
    """Seconds in which its steps waited for a free worker of the environment, over all attempts."""
    environment_step_s: float = 0.0
    """Seconds in which environment calls with its steps ran, over all attempts."""
    truncated: bool = False
    """Whether a limit truncated the last turn."""
    done: bool = False
    """Whether the environment or a limit has ended it."""
    finished: bool = False
    """Whether it was played to its end; nothing changes it afterwards, so a checkpoint may contain it."""
    turns: int = 0
    """Number of sampled turns."""
    answer: str | None = None
    """The answer that the environment extracted."""
    feedback: str = ""
    """What the environment wrote after the last turn; empty if it wrote nothing."""
    tools: list[dict[str, Any]] | None = None
    """The tools offered to the model."""
    prefill: str = ""
    """The beginning of the first answer, with which the tokens of the prompt end."""

    @property
    def segments(self) -> list[MessageLog]:
        """The message logs of the segments with a sampled message, in order; the current one if there is none."""
        logs = [log for log in (*self.earlier_segments, self.message_log) if any(map(is_sampled, log))]
        return logs or [self.message_log]

    @property
    def sampled_messages(self) -> MessageLog:
        """The sampled messages of all segments, in the order of their turns."""
        return [message for log in self.segments for message in log if is_sampled(message)]

    def token_ids(self) -> torch.Tensor:
        """[T] int64, the tokens of the current segment, which the model reads before its next turn."""
        return log_token_ids(self.message_log)

    def images(self) -> list[RowImage] | None:
        """The images in the tokens of the current segment; None without any."""
        return images_of(self.message_log)

    def num_tokens(self) -> int:
        """T, number of tokens of the current segment."""
        return sum(message["token_ids"].numel() for message in self.message_log)

    def num_sampled_tokens(self) -> int:
        """Number of sampled tokens of all turns."""
        return sum(message["token_ids"].numel() for message in self.sampled_messages)

    @property
    def weight_version(self) -> int:
        """The oldest version of the weights that sampled a turn; -1 if none was sampled."""
        return min(map(_oldest_version, self.segments))

    def weighted_turn_rewards(self) -> list[float]:
        """The weighted reward of each turn; their sum is `reward`."""
        return [
            sum(self.reward_weights.get(name, 1.0) * value for name, value in rewards.items()) for rewards in self.turn_rewards
        ]

    def add_answer(
        self,
        text: str,
        token_ids: torch.Tensor,
        logprobs: torch.Tensor,
        *,
        weight_version: int = -1,
        token_versions: torch.Tensor | None = None,
        sampled_sets: SampledSets | None = None,
        parser: ToolCallParser | None = None,
    ) -> None:
        """Append a sampled message after its given beginning; with a parser, its tool calls are separated from its content."""
        text = text if self.turns else self.prefill + text
        message = {"role": "assistant", "content": text, "token_ids": token_ids, "generation_logprobs": logprobs}
        if parser is not None:
            sampled = SampledMessage(
                text=text,
                token_ids=token_ids.tolist(),
                prompt_ids=self.token_ids().tolist(),
                tools=cast("list[ToolSpec]", self.tools or []),
            )
            parsed = parse_message(parser, sampled, self.message_log)
            if parsed.calls:
                message |= {"content": parsed.content, "tool_calls": parsed.calls, "sampled_text": text}
        self.turns += 1
        versions = {"weight_version": weight_version, "token_versions": token_versions}
        self.message_log.append({**message, **versions, "turn": self.turns, **sets_entry(sampled_sets)})

    def add_observation(self, observation: Observation, token_ids: torch.Tensor, images: Sequence[RowImage] = ()) -> None:
        """Append what the model reads next; the last message has all tokens, [T], and the images in them."""
        messages = messages_of(observation)
        for number, message in enumerate(messages, start=1):
            ids = token_ids if number == len(messages) else token_ids[:0]
            self.message_log.append({**message, "token_ids": ids})
        if images:
            self.message_log[-1]["images"] = list(images)

    def start_segment(self, observation: Observation, token_ids: torch.Tensor, images: Sequence[RowImage] = ()) -> None:
        """Append what the model reads next and start a new segment.

        Args:
            observation: the new messages.
            token_ids: [T] all tokens that the model reads before its next turn.
            images: the images in these tokens.
        """
        self.earlier_segments.append(self.message_log)
        none = token_ids[:0]
        self.message_log = [
            {key: value for key, value in message.items() if key not in _OF_TOKENS} | {"token_ids": none}
            for message in self.message_log
        ]
        self.add_observation(observation, token_ids, images)

    def add_rewards(self, rewards: Mapping[str, float]) -> None:
        """Add the rewards of one turn."""
        self.turn_rewards.append(dict(rewards))
        for name, value in rewards.items():
            self.reward_parts[name] = self.reward_parts.get(name, 0.0) + value
        self.reward = sum(self.reward_weights.get(name, 1.0) * value for name, value in self.reward_parts.items())

    def restart(self, prompt: Trajectory) -> None:
        """Go back to the prompt; counts as a retry.

        Args:
            prompt: a copy of this rollout from before it was run.
        """
        counters = {name: getattr(self, name) for name in _COUNTERS}
        vars(self).update(vars(copy.deepcopy(prompt)) | counters)
        self.retries += 1
        self.restarts += 1

    def fail(self, headline: str, details: str) -> None:
        """End it as a row that could not be scored."""
        self.failure, self.failure_details = headline, details
        self.scored, self.done = False, True

    def conversation(self) -> list[Message]:
        """The messages for an environment, without tokens."""
        return [
            cast("Message", {key: value for key in MESSAGE_KEYS if (value := message.get(key)) is not None})
            for message in self.message_log
        ]


def to_batch(trajectories: Sequence[Trajectory]) -> BatchedDataDict[Any]:
    """Rows [B, T] of finished rollouts with the keys for losses, logs and metrics, see `rl_core.data.schema`.

    Each segment is a row; the rows of a rollout are adjacent and in the order of its segments.
    """
    rows = [(number, log) for number, rollout in enumerate(trajectories) for log in rollout.segments]
    logs = [log for _, log in rows]
    of_row = [trajectories[number] for number, _ in rows]
    # Columns of tokens are made for all messages at once: a batch may have thousands, and each tensor takes microseconds.
    messages = [message for log in logs for message in log]
    counts = [message["token_ids"].numel() for message in messages]
    lengths = [sum(message["token_ids"].numel() for message in log) for log in logs]

    def repeated(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(torch.tensor(counts, dtype=torch.int64))

    def joined(key: str, otherwise: torch.Tensor) -> torch.Tensor:
        parts = [message.get(key) for message in messages]
        filled = [rest if part is None else part for part, rest in zip(parts, otherwise.split(counts), strict=True)]
        return torch.cat(filled).to(otherwise.dtype)

    def padded(key: str, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(values.split(lengths)), batch_first=True, padding_value=pad_value(key))

    versions = repeated([message.get("weight_version", -1) for message in messages], torch.int64)
    images = {"images": list(map(images_of, logs))} if any("images" in message for message in messages) else {}
    baselines = [rollout.baseline_reward for rollout in of_row]
    return BatchedDataDict(
        {
            "input_ids": padded("input_ids", log_token_ids(messages)),
            "input_lengths": torch.tensor(lengths, dtype=torch.int64),
            "token_mask": padded("token_mask", repeated([is_sampled(message) for message in messages], torch.float32)),
            "generation_logprobs": padded("generation_logprobs", joined("generation_logprobs", torch.zeros(sum(counts)))),
            "sample_mask": torch.tensor([rollout.loss_multiplier * rollout.scored for rollout in of_row], dtype=torch.float32),
            "rewards": torch.tensor([rollout.reward for rollout in of_row], dtype=torch.float32),
            "reward_weights": [dict(rollout.reward_weights) for rollout in of_row],
            "turn_rewards": [rollout.weighted_turn_rewards() for rollout in of_row],
            "scored": torch.tensor([rollout.scored for rollout in of_row], dtype=torch.bool),
            "prompt_id": torch.tensor(_prompt_ids(trajectories), dtype=torch.int64),
            "group_ids": torch.tensor([rollout.group_id for rollout in of_row], dtype=torch.int64),
            "rollout_ids": torch.tensor([number for number, _ in rows], dtype=torch.int64),
            "token_turns": padded("token_turns", repeated([message.get("turn", 0) for message in messages], torch.int64)),
            "token_versions": padded("token_versions", joined("token_versions", versions)),
            "weight_version": torch.tensor([_oldest_version(log) for log in logs], dtype=torch.int64),
            "truncated": torch.tensor([rollout.truncated for rollout in of_row], dtype=torch.bool),
            "message_log": logs,
            **{key: [getattr(rollout, name) for rollout in of_row] for key, name in _COLUMNS.items()},
            **_sampled_sets(logs),
            **images,
            **({} if None in baselines else {"baseline_rewards": torch.tensor(baselines, dtype=torch.float32)}),
        }
    )


MOST_SET_BYTES = 4 * 2**30
"""Maximum size of the sampled sets of a step."""


def sets_entry(sets: SampledSets | None) -> dict[str, SampledSets]:
    """The entry of a sampled message for the sets of its tokens; none if they were not requested."""
    return {} if sets is None else {SETS: sets}


def _sampled_sets(logs: Sequence[MessageLog]) -> dict[str, list[SampledSets]]:
    """The column of rows whose messages have sampled sets, if there are any."""
    if not any(SETS in message for log in logs for message in log):
        return {}
    sets = [joined_sets([message.get(SETS) or message["token_ids"].numel() for message in log]) for log in logs]
    size = sum(tensor.nbytes for of_row in sets for tensor in (of_row["counts"], of_row["words"]))
    if size > MOST_SET_BYTES:
        raise UserError(
            f"The tokens that top_p, top_k and min_p kept take {format_size(size)} in this step, more than the "
            f"{format_size(MOST_SET_BYTES)} that are allowed. Lower policy.generation.top_p, set policy.generation.top_k, or "
            "sample fewer tokens in a step.",
            key="policy.generation.top_p",
        )
    return {SETS: sets}


def is_sampled(message: Mapping[str, Any]) -> bool:
    """Whether the model sampled this message in this segment."""
    return "generation_logprobs" in message


def log_token_ids(log: MessageLog) -> torch.Tensor:
    """[T] int64, the tokens of a message log."""
    return torch.cat([message["token_ids"] for message in log])


def sampled_mask(log: MessageLog) -> torch.Tensor:
    """[T] bool, True on sampled tokens."""
    return torch.cat([torch.full(message["token_ids"].shape, is_sampled(message)) for message in log])


_MAX_ROWS = 2**20
"""Upper bound of the segments of a rollout, and of the samples of a prompt, in `prompt_id`."""


def _prompt_ids(trajectories: Sequence[Trajectory]) -> list[int]:
    """The `prompt_id` of each row: the ordinal of its prompt if it begins with the prompt, else a separate id, below -1.

    A rewritten history may begin with other tokens. With the id of its prompt, the other rows could share fewer tokens.
    """
    ids = []
    for rollout in trajectories:
        first, *later = rollout.segments
        ids.append(rollout.ordinal)
        if not later:
            continue
        end = next((i for i, message in enumerate(first) if is_sampled(message)), len(first))
        prompt = log_token_ids(first[:end]) if end else torch.zeros(0, dtype=torch.int64)
        seen = _images_within(first, len(prompt))
        for number, log in enumerate(later):
            unique_id = -2 - (rollout.ordinal * _MAX_ROWS + rollout.sample) * _MAX_ROWS - number
            is_same = torch.equal(log_token_ids(log)[: len(prompt)], prompt) and seen == _images_within(log, len(prompt))
            ids.append(rollout.ordinal if is_same else unique_id)
    return ids


def _images_within(log: MessageLog, length: int) -> tuple[tuple[int, str], ...]:
    return prompt_identity([image for image in images_of(log) or () if image.end <= length])


def _oldest_version(log: MessageLog) -> int:
    return min((message["weight_version"] for message in log if "weight_version" in message), default=-1)


_OF_SEGMENT = ("input_lengths", "prompt_id", "weight_version", "message_log", SETS, "images")
"""Columns without a token axis that differ between the segments of a rollout."""


def rows_of_rollouts(batch: BatchedDataDict[Any]) -> list[list[int]]:
    """The rows of each rollout, in the order of the batch. Without `rollout_ids`, each row is a rollout."""
    if "rollout_ids" not in batch:
        return [[row] for row in range(batch.size)]
    rows: dict[int, list[int]] = {}
    for row, rollout in enumerate(batch["rollout_ids"].tolist()):
        rows.setdefault(rollout, []).append(row)
    return list(rows.values())


def has_segments(batch: BatchedDataDict[Any]) -> bool:
    """Whether a rollout has several rows."""
    return "rollout_ids" in batch and len(batch["rollout_ids"].unique()) < batch.size


def join_segments(batch: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """The batch with one row per rollout, which has the tokens of all its segments one after the other.

    `input_lengths` is the number of tokens of all segments, and `segments` has what differs between them; other columns
    without a token axis are those of the first. The batch itself if each rollout has one row.
    """
    if not has_segments(batch):
        return batch
    rollouts = rows_of_rollouts(batch)
    lengths = batch["input_lengths"].tolist()
    joined: BatchedDataDict[Any] = BatchedDataDict()
    for key, column in batch.items():
        if isinstance(column, torch.Tensor) and column.ndim > 1:
            rows = [torch.cat([column[row, : lengths[row]] for row in rollout]) for rollout in rollouts]
            joined[key] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_value(key))
        elif isinstance(column, torch.Tensor):
            joined[key] = column[[rollout[0] for rollout in rollouts]]
        else:
            joined[key] = [column[rollout[0]] for rollout in rollouts]
    joined["input_lengths"] = torch.tensor([sum(lengths[row] for row in rollout) for rollout in rollouts], dtype=torch.int64)
    own = [key for key in _OF_SEGMENT if key in batch]
    joined["segments"] = [{key: [batch[key][row] for row in rollout] for key in own} for rollout in rollouts]
    return joined


def split_segments(batch: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """The rows that models compute: one for each segment. The inverse of `join_segments`, also of some of its rows.

    Columns that were added or changed are split as well; those without a token axis are repeated for each segment.
    """
    if "segments" not in batch:
        return batch
    lengths = [[int(length) for length in segments["input_lengths"]] for segments in batch["segments"]]
    of_row = [number for number, of_rollout in enumerate(lengths) for _ in of_rollout]
    rows: BatchedDataDict[Any] = BatchedDataDict()
    for key, column in batch.items():
        if key in _OF_SEGMENT:
            values = [value for segments in batch["segments"] for value in segments[key]]
            rows[key] = torch.stack(values) if isinstance(column, torch.Tensor) else values
        elif isinstance(column, torch.Tensor) and column.ndim > 1:
            parts = [
                part
                for row, of_rollout in zip(column, lengths, strict=True)
                for part in row.split([*of_rollout, len(row) - sum(of_rollout)])[:-1]
            ]
            rows[key] = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=pad_value(key))
        elif key != "segments":
            rows[key] = column[of_row] if isinstance(column, torch.Tensor) else [column[number] for number in of_row]
    return rows


def rollout_means(values: torch.Tensor, batch: BatchedDataDict[Any]) -> torch.Tensor:
    """[R] mean over the trained tokens of each rollout, 0.0 if it has none.

    Args:
        values: [B, T].
        batch: B rows, one for each segment.
    """
    trained = batch["token_mask"] > 0
    sums, counts = torch.where(trained, values, 0.0).sum(-1), trained.sum(-1)
    rollouts = rows_of_rollouts(batch)
    totals = torch.stack([sums[rows].sum() for rows in rollouts])
    return totals / torch.stack([counts[rows].sum() for rows in rollouts]).clamp(min=1)


def optimizer_batches(
    batch: BatchedDataDict[Any], rollouts_per_update: int | None, *, multiple_of: int
) -> tuple[BatchedDataDict[Any], int | None]:
    """The rows for `TrainableInterface.train` and its `gbs`, so that each optimizer step trains on whole rollouts.

    The number of optimizer steps is the same as with one row per rollout. Steps with fewer rows are filled with rows that are
    masked out. If each rollout has one row, nothing changes and `gbs` is None.

    Args:
        batch: the rows of a step; the rows of a rollout are adjacent.
        rollouts_per_update: `train_global_batch_size`; None for all at once.
        multiple_of: number of data-parallel ranks.
    """
    if not has_segments(batch):
        return batch, None
    rollouts = rows_of_rollouts(batch)
    size = rollouts_per_update or len(rollouts)
    updates = [
        [row for rollout in rollouts[start : start + size] for row in rollout] for start in range(0, len(rollouts), size)
    ]
    most = -(-max(len(rows) for rows in updates) // multiple_of) * multiple_of
    filled = []
    for rows in updates:
        filled.append(batch.select_indices(rows))
        if len(rows) < most:
            filled.append(padding_rows(batch, rows[0], most - len(rows)))
    return BatchedDataDict.from_batches(filled), most


class SampleStream(IntEnum):
    """Purpose of rollouts; the seeds of a prompt differ between them."""

    TRAINING = 0
    VALIDATION = 1


def rollout_seed(run_seed: int, stream: SampleStream, *, ordinal: int, sample: int, turn: int) -> int:
    """The seed in [0, 2^63) of one turn of one rollout.

    It depends neither on the training step nor on the other rows of the batch, so a resumed run, an additional draw of dynamic
    sampling and a prefetching source all give a prompt the same seed. A prompt that was put back is sampled again with its
    seed, by newer weights.

    Args:
        run_seed: the algorithm's `seed`.
        stream: purpose of the rollout.
        ordinal: the prompt's number, from 0: for training in the loader's endless order (`BatchedDataLoader.next_ordinal`), for
            validation among the prompts of one validation.
        sample: which rollout of the prompt, from 0.
        turn: which turn of the rollout, from 0.
    """
    return sample_seed(run_seed, stream, ordinal, sample, turn)


def sample_seed(*parts: int) -> int:
    """A seed in [0, 2^63): a hash of integers that identify the draw, each within 64 bits."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1
