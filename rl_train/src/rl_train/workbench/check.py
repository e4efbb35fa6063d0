"""Checks an environment without a model (`rlcore check env`)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.environments.step_results import StepResult
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.messages import messages_of
from rl_train.diagnostics.diagnosis import Diagnosis, DiagnosisStatus
from rl_train.rollouts.environment_checks import metrics_checked, step_checked
from rl_train.workbench.answers import WRONG_ANSWERS, answer_checks
from rl_train.workbench.local_rollouts import LocalRollouts
from rl_train.workbench.play import play, random_player
from rl_train.workbench.results import CheckFailedError, check_result
from rl_train.workbench.trial import UNDECLARED_TURNS, EnvironmentTrial


def check_environment(trial: EnvironmentTrial) -> Iterator[Diagnosis]:
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

    def results(self) -> Iterator[Diagnosis]:
        if not (yield from check_result("step", self._step)):
            return
        yield from check_result("metadata and messages", self._isolation)
        yield from check_result("determinism", self._determinism)
        yield from check_result("independence of rows", self._independence)
        yield from check_result("pickling", self._pickling)
        yield from check_result("metrics", self._metrics)
        yield from check_result("turns", self._turns, passed=DiagnosisStatus.NOTE)
        if self._trial.reads_tool_calls:
            yield from check_result("tool calls", self._tool_calls)
        yield from answer_checks(self._trial, self._environment)

    def _call(
        self, environment: EnvironmentInterface, answers: Sequence[str], rows: Sequence[int], **fields: Any
    ) -> list[StepResult]:
        """One step; `fields` are added to the model's messages."""
        chosen = [self._trial.rows[row] for row in rows]
        with LocalRollouts(environment, self._trial.task, chosen, session="check") as rollouts:
            return [*rollouts.answer(dict(enumerate(answers)), **fields).values()]

    def _all(self, environment: EnvironmentInterface) -> list[StepResult]:
        return self._call(environment, self._answers, range(len(self._answers)))

    def _step(self) -> str:
        results = self._all(self._environment)
        names = ", ".join(results[0].rewards)
        unscored = sum(not result.scored for result in results)
        left_out = f"; {unscored} were not scored" if unscored else ""
        return f"{len(self._answers)} rows with wrong, empty and unusual answers were accepted; rewards: {names}{left_out}"

    def _isolation(self) -> str:
        with LocalRollouts(self._environment, self._trial.task, self._trial.rows[:1], session="check") as rollouts:
            answer = {"role": "assistant", "content": self._answers[0]}
            logs, metadata = [[*rollouts.logs[0], answer]], rollouts.metadata
            before = copy.deepcopy((logs, metadata))
            step_checked(self._environment, self._trial.task, logs, metadata)
        if not _equal((logs, metadata), before):
            raise CheckFailedError(
                "step() changed the metadata or the messages that it was passed. Return new metadata: {**info, 'key': value}."
            )
        return "step() does not change its arguments"

    def _determinism(self) -> str:
        made = [self._environment, self._environment, self._make()]
        first, again, fresh = [[*map(_comparable, self._all(environment))] for environment in made]
        if not _equal(first, again):
            raise CheckFailedError("two equal calls had different results, so the environment keeps state or draws at random.")
        if not _equal(first, fresh):
            raise CheckFailedError("a new instance returned different results, so workers would score differently.")
        return "equal calls have equal results, also of a new instance"

    def _independence(self) -> str:
        for row, (answer, result) in enumerate(zip(self._answers, self._all(self._environment), strict=True)):
            [alone] = self._call(self._environment, [answer], [row])
            together = self._shown(row, result)
            for name, value in self._shown(row, alone).items():
                if not _equal(value, together[name]):
                    raise CheckFailedError(
                        f"row {row} has the {name} {together[name]} in a batch and {value} alone: how rows are divided over "
                        "workers would change rollouts."
                    )
        return "each row has the same results alone and in a batch"

    def _shown(self, row: int, result: StepResult) -> dict[str, Any]:
        """What a step returned for a row, by name. The metadata includes only what it was passed and kept."""
        return {
            "rewards": _rewards(result),
            "end": result.terminated,
            "observation": None if result.terminated else result.observation,
            "metadata": _kept(self._trial.rows[row].metadata, result.metadata),
        }

    def _pickling(self) -> str:
        results = self._all(self._environment)
        pickle.loads(pickle.dumps([(result.metadata, result.observation, result.answer) for result in results]))
        return "metadata can be sent to another process"

    def _metrics(self) -> str:
        scored = {row: result for row, result in enumerate(self._all(self._environment)) if result.scored}
        if not scored:
            return "no row was scored, so there are no metrics"
        metrics = metrics_checked(self._environment, self._trial.task, self._finished(scored))
        if not metrics:
            return "the environment reports none; with `accuracy`, validation reports validation/accuracy"
        return ", ".join(f"{name} {value:g}" for name, value in metrics.items())

    def _finished(self, results: Mapping[int, StepResult]) -> BatchedDataDict[Any]:
        return BatchedDataDict(
            {
                "rewards": torch.tensor([self._trial.reward_of(result.rewards) for result in results.values()]),
                "truncated": torch.zeros(len(results), dtype=torch.bool),
                "message_log": [
                    [*self._trial.rows[row].messages, {"role": "assistant", "content": self._answers[row]}] for row in results
                ],
                "extra_env_info": [result.metadata for result in results.values()],
                "answers": [result.answer for result in results.values()],
                "task_name": [self._trial.task] * len(results),
                "idx": list(results),
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
        [result] = self._call(self._environment, [""], [0], tool_calls=[call])
        reply = "the end of the rollout" if result.terminated else repr(messages_of(result.observation)[0]["content"])
        return f"a call of an unknown tool was answered with {reply}; calls in a model's text are not checked"


def _comparable(result: StepResult) -> Any:
    reply = None if result.terminated else result.observation
    return _rewards(result), result.terminated, reply, result.answer, result.scored


def _rewards(result: StepResult) -> dict[str, float]:
    """The rewards by name; those that are 0.0, as an omitted name is, are left out."""
    return {name: value for name, value in result.rewards.items() if value}


def _kept(passed: Any, returned: Any) -> dict[str, Any] | None:
    """The entries of the metadata that a step did not change; None for metadata of another form, or that stays as it is."""
    if not isinstance(passed, Mapping) or not isinstance(returned, Mapping):
        return None
    return {key: value for key, value in passed.items() if key in returned and _equal(returned[key], value)}


def _equal(one: Any, other: Any) -> bool:
    """Whether two objects are equal; objects without a truth value, such as arrays, are compared by their pickles."""
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):
        return pickle.dumps(one) == pickle.dumps(other)
