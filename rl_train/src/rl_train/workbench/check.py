"""Checks an environment without a model (`rlcore check env`)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn
from rl_core.interfaces.messages import messages_of
from rl_train.rollouts.environment_checks import metrics_checked, step_checked
from rl_train.workbench.answers import WRONG_ANSWERS, answer_checks
from rl_train.workbench.play import play, random_player, rewards_by_row
from rl_train.workbench.results import CheckFailedError, CheckResult, CheckStatus, check_result
from rl_train.workbench.sessions import LocalSession
from rl_train.workbench.trial import UNDECLARED_TURNS, EnvironmentTrial


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
        created = yield from check_result("construction", lambda: f"{type(make()).__name__} was created")
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
        if not (yield from check_result("step", self._step)):
            return
        yield from check_result("metadata and messages", self._isolation)
        yield from check_result("determinism", self._determinism)
        yield from check_result("independence of rows", self._independence)
        yield from check_result("pickling", self._pickling)
        yield from check_result("metrics", self._metrics)
        yield from check_result("turns", self._turns, passed=CheckStatus.NOTE)
        if self._trial.reads_tool_calls:
            yield from check_result("tool calls", self._tool_calls)
        yield from answer_checks(self._trial, self._environment)

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
            raise CheckFailedError(
                "step() changed the metadata or the messages that it was passed. Return new metadata: {**info, 'key': value}."
            )
        return "step() does not change its arguments"

    def _determinism(self) -> str:
        first, again, fresh = self._all(self._environment), self._all(self._environment), self._all(self._make())
        if not _equal(_comparable(first), _comparable(again)):
            raise CheckFailedError("two equal calls had different results, so the environment keeps state or draws at random.")
        if not _equal(_comparable(first), _comparable(fresh)):
            raise CheckFailedError("a new instance returned different results, so workers would score differently.")
        return "equal calls have equal results, also of a new instance"

    def _independence(self) -> str:
        together = self._all(self._environment)
        rewards = rewards_by_row(together)
        for row, answer in enumerate(self._answers):
            alone = rewards_by_row(self._call(self._environment, [answer], [row]))[0]
            if not _equal(alone, rewards[row]):
                raise CheckFailedError(
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
                "rewards": torch.tensor([self._trial.reward_of(rewards_by_row(step_return)[row]) for row in rows]),
                "truncated": torch.zeros(len(rows), dtype=torch.bool),
                "message_log": logs,
                "extra_env_info": [step_return.metadata[row] for row in rows],
                "answers": [step_return.answers[row] if step_return.answers is not None else None for row in rows],
                "task_name": [self._trial.task] * len(rows),
                "idx": list(rows),
            }
        )

    def _turns(self) -> str:
        trial, turns, ended = self._trial, 0, 0
        for number, row in enumerate(trial.rows):
            played = list(play(self._environment, trial.task, row, random_player(number), max_turns=trial.max_turns))
            turns, ended = max(turns, len(played)), ended + played[-1].ended
        declared = f"up to {trial.max_turns} turns"
        if trial.section.env_cls is not None and trial.max_turns == UNDECLARED_TURNS:
            declared += " (the class declares no number: a run needs `max_rollout_turns`, else a rollout has one turn)"
        return f"{declared}; with random answers, {ended} of {len(trial.rows)} rollouts ended, after at most {turns} turns"

    def _tool_calls(self) -> str:
        call = {"id": "000000001", "type": "function", "function": {"name": "no_such_tool", "arguments": {}}}
        step_return = self._call(self._environment, [""], [0], tool_calls=[call])
        reply = (
            "the end of the rollout"
            if step_return.terminateds[0]
            else repr(messages_of(step_return.observations[0])[0]["content"])
        )
        return f"a call of an unknown tool was answered with {reply}; calls in a model's text are not checked"


def _comparable(step_return: EnvironmentReturn) -> Any:
    ended = step_return.terminateds.tolist()
    replies = [None if over else message for message, over in zip(step_return.observations, ended, strict=True)]
    scored = None if step_return.scored is None else step_return.scored.tolist()
    return (rewards_by_row(step_return), ended, replies, step_return.answers, scored)


def _equal(one: Any, other: Any) -> bool:
    """Whether two objects are equal; objects without a truth value, such as arrays, are compared by their pickles."""
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):
        return pickle.dumps(one) == pickle.dumps(other)
