"""Conformance of environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rl_core.config.schema import DatasetConfig, EnvironmentConfig
from rl_core.errors import ConfigError
from rl_core.interfaces.environment import EnvironmentInterface, keeps_sessions
from rl_core.plugins.component import Kind, is_path
from rl_core.plugins.registry import Registry
from rl_core.testing.comparisons import section_of
from rl_core.testing.environments.checks import (
    EnvironmentChecks,
    EnvironmentTrial,
    TrialRow,
    constructor,
    parses_tool_calls,
    trial_row,
)
from rl_core.testing.promises import Condition, Conformance, Found, creation, promise

_NUM_ROWS = 6
_SESSIONS = Condition(text="`reset` and `close` are not overridden", holds=lambda t: keeps_sessions(t.registered().load()))
_TOOLS = Condition(text="no tools are offered", holds=lambda tests: tests.trial().reads_tool_calls)
_STEP, _EQUAL = "test_step_returns_one_valid_entry_per_row", "test_equal_calls_have_equal_results"


class EnvironmentConformance(Conformance[EnvironmentChecks]):
    """Promises of environments.

    Attributes:
        rows: prompts: `messages`, or a text as `prompt`, `question` or `problem`; `extra_env_info` is the metadata, or else
            all other fields. By default, the first rows of the dataset with the name of the environment.
        answers: texts that a rollout of each row is also answered with in turn, such as the correct moves of a game.
    """

    kind = Kind.ENVIRONMENT
    minimum = 10
    rows: ClassVar[Sequence[Mapping[str, Any]]] = ()
    answers: ClassVar[Sequence[str]] = ()

    @classmethod
    def trial(cls) -> EnvironmentTrial:
        """The environment's section, constructor and rows."""
        registry, component = cls.registry(), cls.registered()
        chosen = {"env_cls": cls.component} if is_path(cls.component) else {"name": cls.component}
        section = section_of(component, EnvironmentConfig, {**chosen, **cls.config})
        make = constructor(section, cls.component, registry)
        return EnvironmentTrial(
            task=cls.component,
            section=section,
            make=make,
            rows=[trial_row(row, "a row") for row in cls.rows] or _rows_of_dataset(cls.component, registry),
            answers=cls.answers,
            max_turns=section.max_rollout_turns or section.turns_needed,
            reads_tool_calls=parses_tool_calls(make),
        )

    @classmethod
    def create(cls) -> EnvironmentChecks:
        trial = cls.trial()

        def make() -> EnvironmentInterface:
            environment = trial.make()
            cls._exits.callback(environment.shutdown)
            return environment

        return EnvironmentChecks(trial, make(), make)

    test_it_is_created_from_its_section = creation("It is created with its config section alone.")

    @promise("`step` scores every text, also empty and unusual ones, and returns an `EnvironmentReturn` with an entry per row.")
    def test_step_returns_one_valid_entry_per_row(self) -> str:
        return self.subject().step()

    @promise("`step` does not change the messages and the metadata that it is passed.", after=_STEP)
    def test_step_does_not_change_its_arguments(self) -> str:
        return self.subject().unchanged_arguments()

    @promise("Two equal calls of `step` have equal results.", after=_STEP)
    def test_equal_calls_have_equal_results(self) -> str:
        return self.subject().repeated_calls()

    @promise("Two instances have equal results, because several workers score the rows of a step.", after=_EQUAL)
    def test_instances_have_equal_results(self) -> str:
        return self.subject().instances()

    @promise("The result of a row does not depend on the other rows of the call.", after=_EQUAL)
    def test_rows_are_independent(self) -> str:
        return self.subject().independence()

    @promise("Metadata, observations and answers can be pickled, because they move between processes.", after=_STEP)
    def test_results_can_be_pickled(self) -> str:
        return self.subject().pickling()

    @promise("`global_post_process_and_metrics` returns the batch, and numbers by name.", after=_STEP)
    def test_metrics_are_numbers(self) -> str:
        return self.subject().metrics()

    @promise("`min_turns` is a positive number, and at most the number of turns that the section allows.")
    def test_min_turns_fits_the_section(self) -> str:
        trial = self.subject().trial
        least = max(type(self.subject().environment).min_turns, trial.section.min_turns)
        if not isinstance(least, int) or least < 1:
            raise Found(f"min_turns is {least!r}.")
        if least > trial.max_turns:
            raise Found(f"min_turns is {least}, but a rollout has at most {trial.max_turns} turns (`max_rollout_turns`).")
        return f"{least} of at most {trial.max_turns} turns"

    @promise("`shutdown` may be called twice, and before any step.")
    def test_shutdown_may_be_called_twice(self) -> None:
        environment = self.subject().make()
        environment.shutdown()
        environment.shutdown()

    @promise("A call of an unknown tool is answered, not an error.", applies=_TOOLS)
    def test_an_unknown_tool_is_answered(self) -> str:
        return self.subject().tool_calls()

    @promise("`close` accepts the name of a session whose `reset` failed or was not called.", applies=_SESSIONS)
    def test_close_accepts_an_unknown_session(self) -> None:
        self.subject().unknown_session()

    @promise("A session that is opened again after `close` starts from the beginning.", applies=_SESSIONS, after=_EQUAL)
    def test_a_closed_session_starts_from_the_beginning(self) -> str:
        return self.subject().reopened_session()


def _rows_of_dataset(name: str, registry: Registry) -> list[TrialRow]:
    """The first rows of the dataset with the name of the environment."""
    if is_path(name) or name not in registry.names("dataset"):
        text = "there are no rows to step with. Set `rows` of the test class: [{'prompt': ..., 'expected_answer': ...}], or"
        raise ConfigError(f"{text} register a dataset {name!r}.")
    component = registry.find("dataset", name)
    records = component.load()(section_of(component, DatasetConfig, {"dataset_name": name}))
    return [trial_row(records[index], f"record {index}") for index in range(min(_NUM_ROWS, len(records)))]
