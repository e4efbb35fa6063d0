"""Checks an environment without a model (`rlcore check env`): the checks of the conformance kit, turns, and rewards.

What an environment cannot parse can never be learned, so it also counts how many expected answers of the data are rewarded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rl_core.errors import UserError
from rl_core.interfaces.environment import EnvironmentInterface, keeps_sessions
from rl_core.interfaces.records import ToolCall
from rl_core.testing.environments.checks import EnvironmentChecks, EnvironmentTrial
from rl_core.testing.promises import Found
from rl_core.tools.environment import ToolEnvironment
from rl_core.tools.specs import Tool
from rl_train.assembly.preparation import Preparation
from rl_train.data.special_tokens import hidden_tokens
from rl_train.diagnostics.diagnosis import Diagnosis, DiagnosisStatus
from rl_train.rollouts.drivers import describe_hidden
from rl_train.rollouts.environment_pool import EnvironmentPool
from rl_train.rollouts.records import expected_answer
from rl_train.workbench.answers import answer_checks, best_form, check_result
from rl_train.workbench.play import UNDECLARED_TURNS, SampledTrial, play, random_player, rows_of_task, trial_of_run


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
        created = yield from check_result("construction", lambda: f"{_name(make())} was created")
        if created:
            checks = EnvironmentChecks(trial, environments[0], make)
            if (yield from check_result("step", checks.step)):
                yield from _further_checks(trial, checks, environments[0])
    finally:
        for environment in environments:
            environment.shutdown()
            environment.shutdown()  # the interface allows it twice


def hidden_tokens_check(trial: SampledTrial) -> Iterator[Diagnosis]:
    """The special tokens that the environment does not see in completions; nothing without a config."""
    if trial.prepared is None:
        return
    try:
        tokenizer = trial.prepared.tokenizer
        found = describe_hidden(tokenizer, hidden_tokens(tokenizer))
    except UserError as error:  # the environment itself needs no model
        found = f"not checked: {error}"
    yield Diagnosis(status=DiagnosisStatus.NOTE, name="special tokens", found=found)


def _further_checks(
    trial: EnvironmentTrial, checks: EnvironmentChecks, environment: EnvironmentInterface
) -> Iterator[Diagnosis]:
    if isinstance(environment, EnvironmentPool):  # its arguments are copies
        found = f"not checked: runs in {trial.section.python}"
        yield Diagnosis(status=DiagnosisStatus.NOTE, name="metadata and messages", found=found)
    else:
        yield from check_result("metadata and messages", checks.unchanged_arguments)
    yield from check_result("determinism", checks.determinism)
    yield from check_result("independence of rows", checks.independence)
    yield from check_result("pickling", checks.pickling)
    yield from check_result("metrics", checks.metrics)
    if keeps_sessions(type(environment)):
        yield from check_result("sessions", checks.sessions)
    yield from check_result("turns", lambda: _turns(trial, environment), passed=DiagnosisStatus.NOTE)
    if trial.reads_tool_calls:
        yield from check_result("tool calls", checks.tool_calls)
    if isinstance(environment, ToolEnvironment):
        yield from check_result("tools", lambda: _tools(trial, environment))
    yield from answer_checks(trial, environment)


def _tools(trial: EnvironmentTrial, environment: ToolEnvironment) -> str:
    """Calls each tool as the messages of the rows do, or with the values that its parameters name."""
    given = [call for row in trial.rows for message in row.messages for call in message.get("tool_calls") or ()]
    numbers: list[str] = []
    left_out: list[str] = []
    for name, tool in environment.tools.items():
        calls = [call for call in given if call["function"]["name"] == name] or _example_calls(tool)
        results = environment.run_calls(calls)
        if calls and all(result.raised for result in results):
            raise Found(f"the tool {name} raised {results[0].raised} in all {len(calls)} calls: {results[0].content}")
        (numbers if calls else left_out).append(f"{name} ({len(calls)})" if calls else name)
    found = [f"called, with the number of calls: {', '.join(numbers)}"] if numbers else []
    missing = "not called, because neither rows nor the schema (`examples`, `enum`) have arguments: "
    return "; ".join([*found, *([missing + ", ".join(left_out)] if left_out else [])])


def _example_calls(tool: Tool) -> list[ToolCall]:
    """One call with the values that the schema of each required parameter names; none if one names no value."""
    schema = tool.spec["function"].get("parameters", {})
    arguments = {}
    for name in schema.get("required", ()):
        parameter = schema.get("properties", {}).get(name, {})
        values = [
            *parameter.get("examples", ()),
            *parameter.get("enum", ()),
            *(parameter[key] for key in ("const",) if key in parameter),
        ]
        if not values:
            return []
        arguments[name] = values[0]
    return [ToolCall(type="function", function={"name": tool.name, "arguments": arguments})]


def _name(environment: EnvironmentInterface) -> str:
    return environment.pool.worker_class if isinstance(environment, EnvironmentPool) else type(environment).__name__


def _turns(trial: EnvironmentTrial, environment: EnvironmentInterface) -> str:
    turns, ended = 0, 0
    for number, row in enumerate(trial.rows):
        played = list(play(environment, trial.task, row, random_player(number), max_turns=trial.max_turns))
        turns, ended = max(turns, len(played)), ended + played[-1].ended
    declared = f"at most {_turn_count(trial.max_turns)}"
    if trial.section.env_cls is not None and trial.max_turns == UNDECLARED_TURNS:
        declared += " (the class declares no number: a run needs `max_rollout_turns`, else a rollout has one turn)"
    return f"{declared}; with random answers, {ended} of {len(trial.rows)} rollouts ended, after at most {_turn_count(turns)}"


def _turn_count(turns: int) -> str:
    return f"{turns} turn" + ("" if turns == 1 else "s")


@dataclass(frozen=True, kw_only=True)
class GradedAnswers:
    """The expected answers of one task, graded by its environment."""

    task: str
    form: str
    """The text around the answer, `{0}`, in which most of them are rewarded."""
    graded: int
    """Number of rows with an expected answer that were graded."""
    rows_read: int
    """Number of rows in which expected answers were looked for: the first of each dataset."""
    rows: int
    """Number of rows of the task."""
    unrewarded: tuple[str, ...]
    """Expected answers that get no more reward than a wrong one, in any of the usual forms."""
    locations: tuple[str, ...]
    """The location of the row of each of them."""
    unscored: int
    """Number of rows that the environment does not score."""


def grade_expected_answers(prepared: Preparation, *, limit: int) -> Iterator[GradedAnswers]:
    """Grade the expected answers of the first rows of each task that has any.

    Tasks whose environment parses tool calls are left out, because their answers need the tokens of a model.

    Args:
        prepared: The run.
        limit: Maximum number of rows of each task.

    Raises:
        UserError: An environment cannot be created, or fails.
    """
    for task in prepared.config.env:
        first, total = rows_of_task(task, prepared, limit=limit)
        rows = [row for row in first if expected_answer(row.metadata) is not None]
        if not rows or (trial := trial_of_run(task, prepared, rows, total)).reads_tool_calls:
            continue
        expected = [str(expected_answer(row.metadata)) for row in rows]
        environment = trial.make()
        try:
            form, rewards, unscored = best_form(trial, environment, rows, expected)
        finally:
            environment.shutdown()
        unrewarded = [row for row in range(len(rows)) if row not in rewards and row not in unscored]
        yield GradedAnswers(
            task=task,
            form=form,
            graded=len(rows),
            rows_read=len(first),
            rows=total,
            unrewarded=tuple(expected[row] for row in unrewarded),
            locations=tuple(rows[row].location for row in unrewarded),
            unscored=len(unscored),
        )
