"""The rows of a step as a teacher with another prompt or tokenizer reads them, and its scores at the student's positions.

With another prompt, everything up to the first sampled token is replaced; sampled tokens and later messages of the environment
are kept as they are. With another tokenizer, the answer is read as text, and scores are added up over spans of it
(`rl_train.data.teacher_spans`).

Fields of a template: `question`, the first user message of the prompt; `completion`, what the student wrote in all turns;
`feedback`, what the environment wrote after the last turn; and the fields of the row's metadata, which take precedence.

A function is called with a mapping of `question`, `completion`, `feedback`, `messages` (the student's prompt), `metadata`,
`reward`, and `group`: the `completion`, `feedback` and `reward` of all samples of the prompt in the batch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.schema import pad_value
from rl_core.errors import ConfigError, DataError, with_key
from rl_core.interfaces.records import MESSAGE_KEYS, plain_text
from rl_train.config.algorithm import TeacherPrompt
from rl_train.config.schema import RunConfig
from rl_train.data.conversations import read_messages
from rl_train.data.messages import prompt_log
from rl_train.data.processors import load_policy_tokenizer
from rl_train.data.records import load_function
from rl_train.data.row_sections import OnTooLong
from rl_train.data.teacher_spans import answer_spans, over_spans
from rl_train.errors import reporting_errors
from rl_train.prompts.templates import PromptTemplate
from rl_train.rollouts.trajectory import is_sampled, log_token_ids

Batch = BatchedDataDict[Any]
_OF_A_SAMPLE = ("completion", "feedback", "reward")


@dataclass(frozen=True, kw_only=True)
class TeacherRows:
    """Rows for a teacher, and how its scores are moved back."""

    rows: Batch
    """B rows [B, T'] that the teacher scores."""
    sample_mask: torch.Tensor | None = None
    """[B] float32, that of the student's rows, with 0 for rows that are too long for the teacher; None if it is unchanged."""
    starts: torch.Tensor | None = None
    """[B] int64, first sampled position in the student's row; None if both read the same rows."""
    shifts: torch.Tensor | None = None
    """[B] int64, position of a token in the teacher's row minus that in the student's."""
    lengths: torch.Tensor | None = None
    """[B] int64, tokens of the student's rows."""
    width: int = 0
    """T of the student's rows."""
    spans: tuple[torch.Tensor, torch.Tensor] | None = None
    """[B, T] and [B, T'] int64, the span of text that a token of the student and of the teacher belongs to, from 1, or 0 for
    none; None if both have the same tokens."""

    def aligned(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [B, T'] or [B, T', K] of the teacher's rows, at the positions of the student's: [B, T] or [B, T, K].

        0 before the first sampled token and on padding. With `spans`, the sum over the span that a token belongs to.
        """
        if self.spans is not None:
            of_student, of_teacher = self.spans
            return over_spans(scores, of_teacher, at=of_student).masked_fill_(of_student == 0, 0)
        if self.starts is None or self.shifts is None or self.lengths is None:
            return scores
        positions = torch.arange(self.width)
        is_scored = (positions >= self.starts.unsqueeze(1)) & (positions < self.lengths.unsqueeze(1))
        moved = torch.where(is_scored, positions + self.shifts.unsqueeze(1), 0)
        found = scores[torch.arange(len(scores)).unsqueeze(1), moved]
        return found.masked_fill_(~is_scored.reshape(*is_scored.shape, *[1] * (found.ndim - 2)), 0)


class TeacherPrompts:
    """Writes the prompts of a teacher.

    Args:
        prompt: the template or function.
        algorithm: name of the algorithm's section, for errors.
        tokenizer: the one that the teacher reads, with its chat template: the policy's, unless `student` is set.
        max_length: maximum number of tokens of the teacher's rows; a mapping by task if there are several teachers.
        on_too_long: how a longer row is handled.
        student: the policy's tokenizer, if the teacher reads answers in its own tokens.

    Raises:
        ConfigError: the function cannot be imported.
    """

    def __init__(
        self,
        prompt: TeacherPrompt,
        *,
        algorithm: str,
        tokenizer: Any,
        max_length: int | Mapping[str, int],
        on_too_long: OnTooLong,
        student: Any = None,
    ) -> None:
        self._student = student
        self.key, self.max_length = f"{algorithm}.{prompt.key}", max_length
        self._tokenizer, self._on_too_long = tokenizer, on_too_long
        self._template = None if prompt.template is None else PromptTemplate(user=prompt.template, source=prompt.key)
        self._function = None if prompt.function is None else load_function(prompt.function, self.key)

    @classmethod
    def of_run(cls, run: RunConfig, tokenizer: Any) -> TeacherPrompts | None:
        """The prompts of a run; None if its teacher reads those of the policy."""
        prompt, teacher = run.algorithm.runtime_needs.teacher_prompt, run.teacher or run.policy
        if prompt is None:
            return None
        own = prompt.own_tokens and run.teacher is not None
        return cls(
            prompt,
            algorithm=run.algorithm_name,
            tokenizer=load_policy_tokenizer(teacher) if own else tokenizer,
            student=tokenizer if own else None,
            max_length={task: section.max_total_sequence_length for task, section in run.teachers.items()}
            or teacher.max_total_sequence_length,
            on_too_long=OnTooLong(run.data.on_long_prompt),
        )

    def check(self, datums: Sequence[Mapping[str, Any]]) -> None:
        """Check that the template can be filled for prompts of the data, and that one of them leaves tokens for an answer.

        A function is not called, because it may read what only a rollout has.

        Raises:
            DataError: a field is missing, or the prompts are too long.
        """
        if self._function is not None or not datums:
            return
        lengths = [(len(self._tokens(_sample(datum), datum)), self._limit(datum.get("task_name"))) for datum in datums]
        too_long = [(length, limit) for length, limit in lengths if length >= limit]
        if too_long and (self._on_too_long is OnTooLong.ERROR or len(too_long) == len(lengths)):
            raise self._too_long(*max(too_long), f"{len(too_long)} of {len(lengths)} checked prompts of the teacher leave")

    def rows_of(self, rows: Batch) -> TeacherRows:
        """The rows of a step for the teacher. Rows that are masked or too long keep the prompt of the student, and are masked.

        Raises:
            DataError: a field is missing, there are images, or a row is too long and `on_too_long` says error.
            ConfigError: the function raised, or did not return a prompt.
        """
        if any(rows.get("images") or ()):
            raise DataError("A row has images, which a teacher with its own prompt cannot read. Remove the key.", key=self.key)
        samples = [_sample({key: rows[key][row] for key in _COLUMNS if key in rows}) for row in range(rows.size)]
        groups: dict[int, list[Mapping[str, Any]]] = {}
        for sample, group in zip(samples, rows["group_ids"].tolist(), strict=True):
            groups.setdefault(group, []).append({key: sample[key] for key in _OF_A_SAMPLE})
        lengths, mask = rows["input_lengths"], rows["sample_mask"].clone()
        starts, shifts, tokens, known = lengths.clone(), torch.zeros_like(lengths), [], dict[str, torch.Tensor]()
        of_student, of_teacher = torch.zeros_like(rows["input_ids"]), []
        for row, sample in enumerate(samples):
            ids = rows["input_ids"][row, : int(lengths[row])]
            trained, own = rows["token_mask"][row].nonzero(), ids if self._student is None else torch.zeros_like(ids[:1])
            spans = torch.zeros_like(own)
            if len(trained) and mask[row]:
                starts[row] = start = int(trained[0])
                sample["group"] = groups[int(rows["group_ids"][row])]
                prompt = self._tokens(sample, {key: rows[key][row] for key in ("tools", "prefill") if key in rows}, known)
                limit = self._limit(rows["task_name"][row] if "task_name" in rows else None)
                answer, in_student, in_teacher = self._answer(ids[start:])
                if len(prompt) + len(answer) <= limit:
                    own, shifts[row] = torch.cat([prompt, answer]), len(prompt) - start
                    of_student[row, start : len(ids)] = in_student
                    spans = torch.cat([torch.zeros_like(prompt), in_teacher])
                elif self._on_too_long is OnTooLong.ERROR:
                    raise self._too_long(len(prompt) + len(answer), limit, "A row of the teacher has")
                else:
                    mask[row] = 0.0
            tokens.append(own)
            of_teacher.append(spans)
        seen: Batch = BatchedDataDict(
            input_ids=torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=pad_value("input_ids")),
            input_lengths=torch.tensor([len(each) for each in tokens]),
        )
        if "prompt_id" in rows:
            seen["prompt_id"] = rows["prompt_id"]
        aligned = None
        if self._student is not None:
            aligned = of_student, torch.nn.utils.rnn.pad_sequence(of_teacher, batch_first=True)
        moved: dict[str, Any] = {"starts": starts, "shifts": shifts, "lengths": lengths, "spans": aligned}
        return TeacherRows(rows=seen, sample_mask=mask, width=rows["input_ids"].shape[1], **moved)

    def _answer(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tokens of an answer as the teacher reads them, and the spans of both sides' tokens."""
        if self._student is None:
            return ids, torch.zeros_like(ids), torch.zeros_like(ids)
        return answer_spans(ids.tolist(), self._student, self._tokenizer)

    def _tokens(
        self, sample: Mapping[str, Any], row: Mapping[str, Any], known: dict[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """[t] int64, the teacher's prompt; those of equal messages are tokenized once if `known` has them."""
        with with_key(self.key):
            messages = self._messages(sample)
            given: dict[str, Any] = {"tools": row.get("tools"), "prefill": row.get("prefill") or ""}
            name = json.dumps([messages, given], default=str)
            known = {} if known is None else known
            if name not in known:
                known[name] = log_token_ids(prompt_log(messages, self._tokenizer, **given))
            return known[name]

    def _messages(self, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = sample["messages"]
        if self._function is not None:
            with reporting_errors(f"{self.key} {self._function.__name__}", self._function):
                returned = self._function(sample)
            if not isinstance(returned, str):
                return read_messages(returned, f"the result of {self._function.__name__}", role="user")
        elif self._template is None:
            return messages
        else:
            metadata = sample["metadata"] if isinstance(sample["metadata"], Mapping) else {}
            fields = {key: sample[key] for key in ("question", "completion", "feedback")} | dict(metadata)
            returned = self._template.fill(fields)[0]["content"]
        number = _first_user(messages)
        return [*messages[:number], {**messages[number], "content": returned}, *messages[number + 1 :]]

    def _limit(self, task: str | None) -> int:
        return self.max_length if isinstance(self.max_length, int) else self.max_length[str(task)]

    def _too_long(self, length: int, limit: int, what: str) -> ConfigError:
        return ConfigError(
            f"{what} {length} tokens, but {limit} are allowed for prompt and answer. Raise "
            "teacher.max_total_sequence_length (policy.max_total_sequence_length if the policy teaches itself), shorten the "
            "teacher's prompt, or drop such rows (data.on_long_prompt: drop).",
            key=self.key,
        )


def rows_of_teacher(rows: Batch, prompts: TeacherPrompts | None) -> TeacherRows:
    """The rows that a teacher scores: the student's, unless it reads other prompts."""
    return TeacherRows(rows=rows) if prompts is None else prompts.rows_of(rows)


Teacher = TypeVar("Teacher")
_SCORES = ("topk_token_ids", "topk_logprobs", "logprobs")


def teacher_scores(
    rows: Batch,
    teachers: Teacher | Mapping[str, Teacher],
    prompts: TeacherPrompts | None,
    *,
    scores_of: Callable[[Teacher, Batch], Mapping[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Columns of a batch with what teachers make of its rows, and `sample_mask` if they read other prompts.

    Args:
        rows: B rows.
        teachers: the teacher, or the teacher of each task, which scores only the rows of that task.
        prompts: writes their prompts; None if they read those of the student.
        scores_of: the columns `logprobs`, or `topk_token_ids` and `topk_logprobs`, of a teacher for some of the rows.
    """
    seen, columns = rows_of_teacher(rows, prompts), dict[str, torch.Tensor]()
    if not isinstance(teachers, Mapping):
        columns |= scores_of(teachers, seen.rows)
        numbers: dict[str, int] = {}
    else:
        numbers = {task: number for number, task in enumerate(teachers)}
        models = [teachers[task] for task in rows["task_name"]]
        for model in dict.fromkeys(models):
            own = [row for row, each in enumerate(models) if each is model]
            for name, values in scores_of(model, seen.rows.select_indices(own)).items():
                columns.setdefault(name, values.new_zeros(len(models), *values.shape[1:]))[own] = values
    scores = {f"teacher_{name}": seen.aligned(columns[name]) for name in _SCORES if name in columns}
    if numbers:
        scores["teacher_numbers"] = torch.tensor([numbers[task] for task in rows["task_name"]])
    if seen.spans is not None:
        scores["teacher_spans"] = seen.spans[0]
    return scores if seen.sample_mask is None else scores | {"sample_mask": seen.sample_mask}


_COLUMNS = ("message_log", "extra_env_info", "feedback", "rewards")


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a batch, or a prompt of the data, as a function of the user receives it."""
    log = row["message_log"]
    prompt = [
        {key: message[key] for key in MESSAGE_KEYS if key == "content" or message.get(key) is not None}
        for message in takewhile(lambda message: not is_sampled(message), log)
    ]
    return {
        "question": plain_text(prompt[_first_user(prompt)]["content"]),
        "messages": prompt,
        "completion": "\n".join(str(each.get("sampled_text", each["content"])) for each in log if is_sampled(each)),
        "feedback": row.get("feedback", ""),
        "metadata": row.get("extra_env_info"),
        "reward": float(row.get("rewards", 0.0)),
    }


def _first_user(messages: Sequence[Mapping[str, Any]]) -> int:
    """Number of the first message of the user; of the last message if there is none."""
    return next((number for number, each in enumerate(messages) if each["role"] == "user"), len(messages) - 1)
