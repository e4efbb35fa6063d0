"""Checks of an environment without a model: types, unchanged arguments, determinism, independence of rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.environments.step_results import StepResult
from rl_core.interfaces.environment import SESSION_KEY, EnvironmentInterface
from rl_core.interfaces.messages import messages_of
from rl_core.plugins.component import describe
from rl_core.testing.environments.local_rollouts import LocalRollouts
from rl_core.testing.environments.trial import EnvironmentTrial
from rl_core.testing.outputs.environment import metrics_checked, step_checked
from rl_core.testing.promises import Found

WRONG_ANSWERS = ("", "I do not know.", "\N{PARTY POPPER} \\boxed{} </answer> \x00")
"""Answers that every environment must be able to score, and should not reward."""


class EnvironmentChecks:
    """The checks of one environment: each returns what it found, or raises `Found` or an error of the environment.

    Args:
        trial: the environment and its rows.
        environment: an instance.
        make: creates another instance.
    """

    def __init__(
        self, trial: EnvironmentTrial, environment: EnvironmentInterface, make: Callable[[], EnvironmentInterface]
    ) -> None:
        self.trial, self.environment, self.make = trial, environment, make
        self._answers = [WRONG_ANSWERS[i % len(WRONG_ANSWERS)] for i in range(len(trial.rows))]

    def step(self) -> str:
        """Unusual answers are scored, and the response has the form of `EnvironmentReturn`."""
        results = self._all(self.environment)
        played = self._played(self.environment)
        names = ", ".join(results[0].rewards)
        unscored = sum(not result.scored for result in results)
        left_out = f"; {unscored} were not scored" if unscored else ""
        return f"{len(self._answers)} rows with wrong, empty and unusual answers were accepted; rewards: {names}{left_out}" + (
            f"; the answers of the test class were scored in {len(played)} turns" if played else ""
        )

    def unchanged_arguments(self) -> str:
        """`step` does not change its arguments."""
        with LocalRollouts(self.environment, self.trial.task, self.trial.rows[:1], session="check") as rollouts:
            answer = {"role": "assistant", "content": self._answers[0]}
            logs, metadata = [[*rollouts.logs[0], answer]], rollouts.metadata
            before = copy.deepcopy((logs, metadata))
            step_checked(self.environment, self.trial.task, logs, metadata)
        if not _equal((logs, metadata), before):
            raise Found(
                "step() changed the metadata or the messages that it was passed. Return new metadata: {**info, 'key': value}."
            )
        return "step() does not change its arguments"

    def repeated_calls(self) -> str:
        """Equal calls of one instance have equal results."""
        environment = self.make()
        first, again = [[*map(_comparable, self._results(environment))] for _ in range(2)]
        if not _equal(first, again):
            raise Found("two equal calls had different results, so the environment keeps state or draws at random.")
        return "equal calls have equal results"

    def instances(self) -> str:
        """Equal calls of two instances have equal results."""
        first, fresh = [[*map(_comparable, self._results(each))] for each in (self.make(), self.make())]
        if not _equal(first, fresh):
            raise Found("a new instance returned different results, so workers would score differently.")
        return "equal calls have equal results in a new instance"

    def determinism(self) -> str:
        """`unknown_session` and `reopened_session`."""
        self.repeated_calls()
        self.instances()
        return "equal calls have equal results, also of a new instance"

    def independence(self) -> str:
        """A row has the same result alone and in a batch, in which other rows are answered with what is in their metadata."""
        answers = [
            _known_answer(row.metadata, self._answers[i]) if i % 2 else self._answers[i]
            for i, row in enumerate(self.trial.rows)
        ]
        results = self._call(self.environment, answers, range(len(answers)))
        for row, (answer, result) in enumerate(zip(answers, results, strict=True)):
            [alone] = self._call(self.environment, [answer], [row])
            together = self._shown(row, result)
            for name, value in self._shown(row, alone).items():
                if not _equal(value, together[name]):
                    raise Found(
                        f"row {row} has the {name} {together[name]} in a batch and {value} alone: how rows are divided over "
                        "workers would change rollouts."
                    )
        return "each row has the same results alone and in a batch"

    def pickling(self) -> str:
        """Metadata, observations and answers can be sent to another process."""
        results = self._results(self.environment)
        try:
            pickle.loads(pickle.dumps([(result.metadata, result.observation, result.answer) for result in results]))
        except Exception as error:  # what is raised depends on the object and on Python's release
            raise Found(f"metadata, an observation or an answer cannot be pickled: {describe(error)}") from error
        return "metadata can be sent to another process"

    def metrics(self) -> str:
        """`global_post_process_and_metrics` returns the batch and numbers by name."""
        scored = {row: result for row, result in enumerate(self._all(self.environment)) if result.scored}
        if not scored:
            return "no row was scored, so there are no metrics"
        metrics = metrics_checked(self.environment, self.trial.task, self._finished(scored))
        if not metrics:
            return "the environment reports none; with `accuracy`, validation reports validation/accuracy"
        return ", ".join(f"{name} {value:g}" for name, value in metrics.items())

    def unknown_session(self) -> None:
        """`close` accepts a session that was not opened."""
        self.environment.close("never-opened")

    def reopened_session(self) -> str:
        """A session that is opened again after `close` starts from the beginning."""
        openings = []
        for _ in range(2):
            with LocalRollouts(self.environment, self.trial.task, self.trial.rows[:1], session="again") as rollouts:
                openings.append(copy.deepcopy(rollouts.logs[0]))
                rollouts.answer({0: "I do not know."})
        if openings[0] != openings[1]:
            raise Found(f"the first session began with {openings[0]}, the second with {openings[1]}.")
        return f"sessions are named by `{SESSION_KEY}`"

    def sessions(self) -> str:
        """Both of the above."""
        self.unknown_session()
        self.reopened_session()
        return "`close` accepts an unknown session, and a session that is opened again starts from the beginning"

    def tool_calls(self) -> str:
        """A call of an unknown tool is answered."""
        call = {"id": "000000001", "type": "function", "function": {"name": "no_such_tool", "arguments": {}}}
        [result] = self._call(self.environment, [""], [0], tool_calls=[call])
        reply = "the end of the rollout" if result.terminated else repr(messages_of(result.observation)[0]["content"])
        return f"a call of an unknown tool was answered with {reply}; calls in a model's text are not checked"

    def _call(
        self, environment: EnvironmentInterface, answers: Sequence[str], rows: Sequence[int], **fields: Any
    ) -> list[StepResult]:
        """One step; `fields` are added to the model's messages."""
        chosen = [self.trial.rows[row] for row in rows]
        with LocalRollouts(environment, self.trial.task, chosen, session="check") as rollouts:
            return [*rollouts.answer(dict(enumerate(answers)), **fields).values()]

    def _all(self, environment: EnvironmentInterface) -> list[StepResult]:
        return self._call(environment, self._answers, range(len(self._answers)))

    def _played(self, environment: EnvironmentInterface) -> list[StepResult]:
        """The results of all turns of rollouts that are answered with the trial's own answers, until they end."""
        results: list[StepResult] = []
        with LocalRollouts(environment, self.trial.task, self.trial.rows, session="played") as rollouts:
            for text in self.trial.answers[: self.trial.max_turns]:
                results += rollouts.answer({row: text for row, ended in enumerate(rollouts.ended) if not ended}).values()
        return results

    def _results(self, environment: EnvironmentInterface) -> list[StepResult]:
        return [*self._all(environment), *self._played(environment)]

    def _shown(self, row: int, result: StepResult) -> dict[str, Any]:
        """What a step returned for a row, by name. The metadata includes only what it was passed and kept."""
        return {
            "rewards": _rewards(result),
            "end": result.terminated,
            "observation": None if result.terminated else result.observation,
            "metadata": _kept(self.trial.rows[row].metadata, result.metadata),
        }

    def _finished(self, results: Mapping[int, StepResult]) -> BatchedDataDict[Any]:
        return BatchedDataDict(
            {
                "rewards": torch.tensor([self.trial.reward_of(result.rewards) for result in results.values()]),
                "truncated": torch.zeros(len(results), dtype=torch.bool),
                "message_log": [
                    [*self.trial.rows[row].messages, {"role": "assistant", "content": self._answers[row]}] for row in results
                ],
                "extra_env_info": [result.metadata for result in results.values()],
                "answers": [result.answer for result in results.values()],
                "task_name": [self.trial.task] * len(results),
                "idx": list(results),
            }
        )


def _known_answer(metadata: Any, otherwise: str) -> str:
    """The first text or number of the metadata: often the right answer, so that rows of a call have different rewards."""
    values = metadata.values() if isinstance(metadata, Mapping) else ()
    return next((str(value) for value in values if isinstance(value, str | int | float)), otherwise)


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
