"""Checks an environment without a model (`rlcore check env`)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn
from rl_core.interfaces.messages import messages_of
from rl_train.rollouts.environment_checks import metrics_checked, step_checked
from rl_train.rollouts.records import expected_answer
from rl_train.runtime.environment_sessions import LocalSession
from rl_train.runtime.environment_trial import EnvironmentTrial

ANSWER_FORMS = ("{0}", "\\boxed{{{0}}}", "<answer>{0}</answer>", "Prediction: {0}", "The answer is {0}.")
"""Forms of the expected answer; an environment may accept only one."""
WRONG_ANSWERS = ("", "I do not know.", "\N{PARTY POPPER} \\boxed{} </answer> \x00")
"""Answers that every environment must be able to score, and should not reward."""


class CheckStatus(StrEnum):
    """Result of a check: a note is neither good nor bad."""

    OK = "ok"
    NOTE = "note"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What one check found."""

    status: CheckStatus
    name: str
    detail: str


def check_environment(trial: EnvironmentTrial) -> Iterator[CheckResult]:
    """Run all checks; a check that needs one that failed is left out.

    Args:
        trial: the environment and its rows.
    """
    environments: list[EnvironmentInterface] = []

    def make() -> EnvironmentInterface:
        environments.append(trial.make())
        return environments[-1]

    try:
        created = yield from _result("construction", lambda: f"{type(make()).__name__} was created")
        if created:
            yield from _EnvironmentCheck(trial, environments[0], make).results()
    finally:
        for environment in environments:
            environment.shutdown()
            environment.shutdown()  # the interface allows it twice


class _EnvironmentCheck:
    def __init__(
        self, trial: EnvironmentTrial, environment: EnvironmentInterface, make: Callable[[], EnvironmentInterface]
    ) -> None:
        self._trial, self._environment, self._make = trial, environment, make
        self._answers = [WRONG_ANSWERS[i % len(WRONG_ANSWERS)] for i in range(len(trial.rows))]

    def results(self) -> Iterator[CheckResult]:
        if not (yield from _result("step", self._step)):
            return
        yield from _result("metadata and messages", self._isolation)
        yield from _result("determinism", self._determinism)
        yield from _result("independence of rows", self._independence)
        yield from _result("pickling", self._pickling)
        yield from _result("metrics", self._metrics)
        yield from _result("turns", self._turns, passed=CheckStatus.NOTE)
        if self._trial.reads_tool_calls:
            yield from _result("tool calls", self._tool_calls)
        yield from self._right_answers()

    def _call(
        self, environment: EnvironmentInterface, answers: Sequence[str], rows: Sequence[int], **fields: Any
    ) -> EnvironmentReturn:
        """One step; `fields` are added to the model's messages."""
        chosen = [self._trial.rows[row] for row in rows]
        logs: Any = [
            [*copy.deepcopy(list(row.messages)), {"role": "assistant", "content": answer, **fields}]
            for row, answer in zip(chosen, answers, strict=True)
        ]
        sessions = [LocalSession(environment, f"check-{number}") for number in range(len(chosen))]
        try:
            opened = [each.open(copy.deepcopy(row.metadata)) for each, row in zip(sessions, chosen, strict=True)]
            logs = [[*log[:-1], *first, log[-1]] for log, (_, first) in zip(logs, opened, strict=True)]
            return step_checked(environment, self._trial.task, logs, [metadata for metadata, _ in opened])
        finally:
            for each in sessions:
                each.close()

    def _all(self, environment: EnvironmentInterface) -> EnvironmentReturn:
        return self._call(environment, self._answers, range(len(self._answers)))

    def _step(self) -> str:
        step_return = self._all(self._environment)
        names = ", ".join(step_return.rewards) if isinstance(step_return.rewards, Mapping) else "reward"
        unscored = 0 if step_return.scored is None else int((~step_return.scored).sum())
        left_out = f"; {unscored} were not scored" if unscored else ""
        return f"{len(self._answers)} rows with wrong, empty and unusual answers were accepted; rewards: {names}{left_out}"

    def _isolation(self) -> str:
        row = self._trial.rows[0]
        session = LocalSession(self._environment, "check")
        try:
            shared, first = session.open(copy.deepcopy(row.metadata))
            answer = {"role": "assistant", "content": self._answers[0]}
            logs: Any = [[*copy.deepcopy(list(row.messages)), *first, answer]]
            before = copy.deepcopy((logs, shared))
            step_checked(self._environment, self._trial.task, logs, [shared])
        finally:
            session.close()
        if not _equal((logs, shared), before):
            raise _CheckFailedError(
                "step() changed the metadata or the messages that it was passed. Return new metadata: {**info, 'key': value}."
            )
        return "step() does not change its arguments"

    def _determinism(self) -> str:
        first, again, fresh = self._all(self._environment), self._all(self._environment), self._all(self._make())
        if not _equal(_comparable(first), _comparable(again)):
            raise _CheckFailedError("two equal calls had different results, so the environment keeps state or draws at random.")
        if not _equal(_comparable(first), _comparable(fresh)):
            raise _CheckFailedError("a new instance returned different results, so workers would score differently.")
        return "equal calls have equal results, also of a new instance"

    def _independence(self) -> str:
        together = self._all(self._environment)
        rewards = _per_row(together)
        for row, answer in enumerate(self._answers):
            alone = _per_row(self._call(self._environment, [answer], [row]))[0]
            if not _equal(alone, rewards[row]):
                raise _CheckFailedError(
                    f"row {row} has the rewards {rewards[row]} in a batch and {alone} alone: how rows are divided over workers "
                    "would change rewards."
                )
        return "each row has the same rewards alone and in a batch"

    def _pickling(self) -> str:
        step_return = self._all(self._environment)
        pickle.loads(pickle.dumps((step_return.metadata, step_return.observations, step_return.answers)))
        return "metadata can be sent to another process"

    def _metrics(self) -> str:
        step_return = self._all(self._environment)
        scored = [row for row in range(len(self._answers)) if step_return.scored is None or bool(step_return.scored[row])]
        if not scored:
            return "no row was scored, so there are no metrics"
        metrics = metrics_checked(self._environment, self._trial.task, self._finished(step_return, scored))
        if not metrics:
            return "the environment reports none; with `accuracy`, validation reports validation/accuracy"
        return ", ".join(f"{name} {value:g}" for name, value in metrics.items())

    def _finished(self, step_return: EnvironmentReturn, rows: Sequence[int]) -> BatchedDataDict[Any]:
        logs = [[*self._trial.rows[row].messages, {"role": "assistant", "content": self._answers[row]}] for row in rows]
        return BatchedDataDict(
            {
                "rewards": torch.tensor([sum(_per_row(step_return)[row].values()) for row in rows]),
                "truncated": torch.zeros(len(rows), dtype=torch.bool),
                "message_log": logs,
                "extra_env_info": [step_return.metadata[row] for row in rows],
                "answers": [step_return.answers[row] if step_return.answers is not None else None for row in rows],
                "task_name": [self._trial.task] * len(rows),
                "idx": list(rows),
            }
        )

    def _turns(self) -> str:
        ended = self._all(self._environment).terminateds
        share = f"{int(ended.sum())} of {len(ended)} rows ended after their first turn"
        return f"the environment declares up to {self._trial.section.turns_needed} turns; {share}"

    def _tool_calls(self) -> str:
        call = {"id": "000000001", "type": "function", "function": {"name": "no_such_tool", "arguments": {}}}
        step_return = self._call(self._environment, [""], [0], tool_calls=[call])
        reply = (
            "the end of the rollout"
            if step_return.terminateds[0]
            else repr(messages_of(step_return.observations[0])[0]["content"])
        )
        return f"a call of an unknown tool was answered with {reply}; calls in a model's text are not checked"

    def _right_answers(self) -> Iterator[CheckResult]:
        rows = [row for row in range(len(self._trial.rows)) if expected_answer(self._trial.rows[row].metadata) is not None]
        if not rows:
            yield CheckResult(
                status=CheckStatus.NOTE, name="correct answers", detail="the rows have no expected answer, so none was tried"
            )
            return
        yield from _result("correct answers", lambda: self._compare(rows))

    def _compare(self, rows: Sequence[int]) -> str:
        expected = [expected_answer(self._trial.rows[row].metadata) for row in rows]
        wrong_totals = _totals(self._call(self._environment, [WRONG_ANSWERS[1]] * len(rows), rows))
        best: tuple[int, str, list[float]] = (-1, "", [])
        for form in ANSWER_FORMS:
            expected_totals = _totals(self._call(self._environment, [form.format(each) for each in expected], rows))
            better = sum(a > b for a, b in zip(expected_totals, wrong_totals, strict=True))
            best = max(best, (better, form, expected_totals), key=lambda each: each[0])
        better, form, expected_totals = best
        shown = form.format("ANSWER")
        if better == 0:
            raise _CheckFailedError(
                f"no form of the expected answer got a higher reward than {WRONG_ANSWERS[1]!r} (tried "
                f"{', '.join(each.format('ANSWER') for each in ANSWER_FORMS)})."
            )
        mean = sum(expected_totals) / len(expected_totals)
        return f"as {shown!r}, {better} of {len(rows)} expected answers got more than a wrong one; mean reward {mean:g}"


class _CheckFailedError(Exception):
    """A check found a mistake in the environment."""


def _result(name: str, check: Callable[[], str], *, passed: CheckStatus = CheckStatus.OK) -> Generator[CheckResult, None, bool]:
    """Yields the result of a check, and returns whether it passed; an exception is a failure."""
    try:
        detail = check()
    except _CheckFailedError as error:
        yield CheckResult(status=CheckStatus.FAILED, name=name, detail=str(error))
        return False
    except Exception as error:  # of the environment, which may raise anything
        yield CheckResult(status=CheckStatus.FAILED, name=name, detail=f"{type(error).__name__}: {error}")
        return False
    yield CheckResult(status=passed, name=name, detail=detail)
    return True


def _per_row(step_return: EnvironmentReturn) -> list[dict[str, float]]:
    named = step_return.rewards if isinstance(step_return.rewards, Mapping) else {"reward": step_return.rewards}
    return [{name: float(values[row]) for name, values in named.items()} for row in range(len(step_return.observations))]


def _totals(step_return: EnvironmentReturn) -> list[float]:
    return [sum(rewards.values()) for rewards in _per_row(step_return)]


def _comparable(step_return: EnvironmentReturn) -> Any:
    ended = step_return.terminateds.tolist()
    replies = [None if over else message for message, over in zip(step_return.observations, ended, strict=True)]
    scored = None if step_return.scored is None else step_return.scored.tolist()
    return (_per_row(step_return), ended, replies, step_return.answers, scored)


def _equal(one: Any, other: Any) -> bool:
    """Whether two objects are equal; objects without a truth value, such as arrays, are compared by their pickles."""
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):
        return pickle.dumps(one) == pickle.dumps(other)
