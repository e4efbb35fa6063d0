"""Checks an environment without a model (`rlcore check env`): the checks of the conformance kit, turns, and rewards."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.errors import UserError
from rl_core.interfaces.environment import EnvironmentInterface, keeps_sessions
from rl_core.testing.environments.checks import EnvironmentChecks
from rl_core.testing.environments.trial import EnvironmentTrial
from rl_train.data.decoding import hidden_tokens
from rl_train.diagnostics.diagnosis import Diagnosis, DiagnosisStatus
from rl_train.rollouts.drivers import describe_hidden
from rl_train.rollouts.environment_pool import EnvironmentPool
from rl_train.workbench.answers import answer_checks
from rl_train.workbench.play import play, random_player
from rl_train.workbench.results import check_result
from rl_train.workbench.trial import UNDECLARED_TURNS, SampledTrial


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
    yield from answer_checks(trial, environment)


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
