"""Checks of an environment without a model: types, unchanged arguments, determinism, independence of rows.

The caller gives the rows and the answers of rollouts.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from rl_core.cluster.remote_actor import plain_class
from rl_core.config.schema import EnvironmentConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.environments.scorer import StepResult
from rl_core.errors import ConfigError, DataError, WrongKindError
from rl_core.event_loop import finished
from rl_core.interfaces.environment import SESSION_KEY, EnvironmentInterface, keeps_sessions
from rl_core.interfaces.records import messages_of
from rl_core.plugins.component import Component, describe
from rl_core.plugins.registry import Registry
from rl_core.plugins.requirements import unmet_needs
from rl_core.testing.outputs.environment import checked_observation, metrics_checked, step_checked
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
        """`repeated_calls` and `instances`."""
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
        """`unknown_session` and `reopened_session`."""
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


_PROMPTS = ("messages", "prompt", "question", "problem")
_NOT_METADATA = (*_PROMPTS, "task_name", "tools", "stop_strings")


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A prompt and its metadata."""

    messages: Sequence[Mapping[str, Any]]
    """The conversation up to the first answer."""
    metadata: Any
    """What the environment gets as the metadata of the first turn."""
    source: str = ""
    """Name of its dataset, if there are several."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentTrial:
    """An environment that can be created, and rows for it."""

    task: str
    """Task name, for messages."""
    section: EnvironmentConfig
    make: Callable[[], EnvironmentInterface]
    """Creates an instance."""
    rows: Sequence[TrialRow]
    """At least one row."""
    max_turns: int
    """Maximum number of turns of a rollout."""
    answers: Sequence[str] = ()
    """Texts that a rollout of each row is also answered with, one after the other, until it ends."""
    reads_tool_calls: bool = False
    """Whether messages of the model are parsed for tool calls, which needs the tokens of a model."""

    def reward_of(self, rewards: Mapping[str, float]) -> float:
        """The reward of a row: the weighted sum of its named rewards."""
        return sum(self.section.reward_weights.get(name, 1.0) * value for name, value in rewards.items())


def trial_row(
    row: Mapping[str, Any], what: str, *, read: Callable[[Any, str], Sequence[Mapping[str, Any]]] | None = None
) -> TrialRow:
    """A row with `messages`, or a text as `prompt`, `question` or `problem`; answers at the end are left out.

    Args:
        row: the fields; `extra_env_info` is the metadata, or else all other fields.
        what: names the row in the error.
        read: returns the messages of a prompt; its second argument names the key. By default they are not checked.

    Raises:
        DataError: it has no prompt.
    """
    key = next((key for key in _PROMPTS if row.get(key) is not None), None)
    if key is None:
        raise DataError(f"{what} has {sorted(row)}, but none of {', '.join(_PROMPTS)}; --config FILE maps the fields.")
    prompt = row[key] if key == "messages" or read is not None else [{"role": "user", "content": row[key]}]
    messages = list(prompt if read is None else read(prompt, repr(key)))
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    metadata = row.get("extra_env_info", {name: value for name, value in row.items() if name not in _NOT_METADATA})
    return TrialRow(messages=messages, metadata=metadata)


def constructor(section: EnvironmentConfig, task: str, registry: Registry) -> partial[EnvironmentInterface]:
    """Creates instances of a task's environment in this process.

    Raises:
        UserError: there is no such environment, or it lacks a requirement.
    """
    name = section.env_cls or section.name or task
    worker_class = environment_component(name, registry).load()
    if not issubclass(plain_class(worker_class), EnvironmentInterface):
        raise WrongKindError(f"{name} is not a subclass of rl_core.interfaces.EnvironmentInterface.")
    return partial(plain_class(worker_class), **first_argument(worker_class, constructor_config(section)))


def parses_tool_calls(make: partial[EnvironmentInterface]) -> bool:
    """Whether the messages of a model are parsed for tool calls, for an environment that `constructor` returned."""
    plain: Any = make.func
    return bool(plain.reads_tool_calls or plain.offered_tools(*make.args, *make.keywords.values()))


def environment_component(name: str, registry: Registry) -> Component:
    """A registered environment, or the class of a path.

    Raises:
        UserError: there is no such environment, or it lacks a requirement.
    """
    component = registry.find("environment", name)
    problem = unmet_needs(component.needs)
    if problem is not None:
        raise ConfigError(f"The environment {name!r} cannot run here: {problem}. {component.install or ''}".rstrip())
    return component


def constructor_config(section: EnvironmentConfig) -> Any:
    """What an environment is created with: its section, or, for a class named by its path, a dict of the section's keys."""
    return section if section.env_cls is None else section.model_dump(exclude={"env_cls"})


def first_argument(worker_class: Any, config: Any) -> Mapping[str, Any]:
    """The config as a keyword argument for the first parameter of the class; empty if it has no parameters."""
    parameters = [p for p in inspect.signature(plain_class(worker_class)).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return {parameters[0].name: config} if parameters else {}


class LocalRollouts:
    """B rollouts, which are stepped together. Their sessions, if the environment keeps any, are open within a `with` block.

    Args:
        environment: an instance in this process.
        task: task name, for errors.
        rows: B prompts and their metadata.
        session: beginning of the name of each session.

    Attributes:
        logs: the conversation of each rollout so far.
        metadata: the environment's state for each rollout.
        ended: which rollouts the environment has ended.
    """

    def __init__(self, environment: EnvironmentInterface, task: str, rows: Sequence[TrialRow], *, session: str) -> None:
        self._environment, self._task = environment, task
        self._sessions = [f"{session}-{row}" for row in range(len(rows))] if keeps_sessions(type(environment)) else []
        self.logs: list[list[Any]] = [copy.deepcopy(list(row.messages)) for row in rows]
        self.metadata: list[Any] = [copy.deepcopy(row.metadata) for row in rows]
        self.ended = [False] * len(rows)

    def __enter__(self) -> Self:
        try:
            for row, name in enumerate(self._sessions):
                self.metadata[row] = (self.metadata[row] or {}) | {SESSION_KEY: name}
                observation = finished(self._environment.reset(self.metadata[row]))
                if observation is not None:
                    self.logs[row] += messages_of(checked_observation(observation, task_name=self._task))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def answer(self, answers: Mapping[int, str], **fields: Any) -> dict[int, StepResult]:
        """Add an answer to some of the rollouts, by their index; returns the environment's response to each.

        Args:
            answers: the texts.
            fields: further fields of each message.
        """
        return self.step(
            {row: [*self.logs[row], {"role": "assistant", "content": text, **fields}] for row, text in answers.items()}
        )

    def step(self, logs: Mapping[int, list[Any]]) -> dict[int, StepResult]:
        """Replace the conversations of some of the rollouts, which end with answers; returns the environment's responses."""
        if not logs:
            return {}
        self.logs = [logs.get(row, log) for row, log in enumerate(self.logs)]
        metadata = [self._with_session(row) for row in logs]
        results = step_checked(self._environment, self._task, copy.deepcopy([*logs.values()]), metadata)
        for row, result in zip(logs, results, strict=True):
            self.ended[row] = result.terminated
            if result.metadata is not None:
                self.metadata[row] = result.metadata
            if not result.terminated:
                self.logs[row] = [*self.logs[row], *messages_of(result.observation)]
        return dict(zip(logs, results, strict=True))

    def _with_session(self, row: int) -> Any:
        return self.metadata[row] | {SESSION_KEY: self._sessions[row]} if self._sessions else self.metadata[row]

    def _close(self) -> None:
        close: Any = self._environment.close  # which may be async
        for name in self._sessions:
            finished(close(name))
