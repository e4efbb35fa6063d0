"""Plays rollouts against an environment without a model (`rlcore env play`): a person, a script or a random player answers."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn
from rl_core.interfaces.messages import messages_of
from rl_train.rollouts.environment_checks import step_checked
from rl_train.workbench.sessions import LocalSession
from rl_train.workbench.trial import EnvironmentTrial, TrialRow

Player = Callable[[Sequence[Mapping[str, Any]]], str | None]
"""Returns the next answer to a conversation, or None to stop."""

OnOpen = Callable[[Sequence[Mapping[str, Any]]], None]

REPEATED_TURNS = 20
"""Maximum number of turns of a rollout whose answers are all equal."""
_PIECE = re.compile(r"[A-Za-z]+|-?\d+")


@dataclass(frozen=True, kw_only=True)
class PlayedTurn:
    """One turn of a rollout."""

    answer: str
    rewards: Mapping[str, float]
    """Rewards of this turn by name."""
    scored: bool
    parsed: str | None
    """The answer that the environment extracted."""
    ended: bool
    replies: Sequence[Mapping[str, Any]]
    """What the model would read next; empty if the row has ended."""


def play(
    environment: EnvironmentInterface,
    task: str,
    row: TrialRow,
    player: Player,
    *,
    max_turns: int,
    on_open: OnOpen = lambda messages: None,
) -> Iterator[PlayedTurn]:
    """Yields each turn until the environment ends the rollout, `max_turns` is reached, or the player stops.

    Args:
        environment: scores and replies.
        task: task name, for errors.
        row: the prompt and its metadata.
        player: answers.
        max_turns: maximum number of turns.
        on_open: called with the messages that the environment adds to the prompt.
    """
    session = LocalSession(environment, "play")
    metadata, first = session.open(copy.deepcopy(row.metadata))
    log: list[Any] = [*copy.deepcopy(list(row.messages)), *first]
    try:
        on_open(first)
        yield from _turns(environment, task, log, metadata, player, session, max_turns)
    finally:
        session.close()


def _turns(
    environment: EnvironmentInterface,
    task: str,
    log: list[Any],
    metadata: Any,
    player: Player,
    session: LocalSession,
    max_turns: int,
) -> Iterator[PlayedTurn]:
    for _ in range(max_turns):
        answer = player(log)
        if answer is None:
            return
        log.append({"role": "assistant", "content": answer})
        step_return = step_checked(environment, task, [copy.deepcopy(log)], [session.named(metadata)])
        named = step_return.rewards if isinstance(step_return.rewards, Mapping) else {"reward": step_return.rewards}
        ended = bool(step_return.terminateds[0])
        replies = [] if ended else [*messages_of(step_return.observations[0])]
        log.extend(replies)
        metadata = step_return.metadata[0] if step_return.metadata[0] is not None else metadata
        yield PlayedTurn(
            answer=answer,
            rewards={name: float(values[0]) for name, values in named.items()},
            scored=step_return.scored is None or bool(step_return.scored[0]),
            parsed=step_return.answers[0] if step_return.answers is not None else None,
            ended=ended,
            replies=replies,
        )
        if ended:
            return


@dataclass
class _Rollout:
    session: LocalSession
    answer: str
    metadata: Any
    log: list[Any]
    reward: float | None = 0.0
    ended: bool = False


def repeated_answers(
    environment: EnvironmentInterface, trial: EnvironmentTrial, rows: Sequence[TrialRow], answers: Sequence[str]
) -> list[float | None]:
    """The reward of each of B rollouts in which every turn has the same answer; None if a turn was not scored.

    Args:
        environment: an instance of the environment.
        trial: its task, the weights of its rewards and the maximum number of turns, of which at most `REPEATED_TURNS` are used.
        rows: B prompts with their metadata, which are stepped together.
        answers: B answers.
    """
    rollouts: list[_Rollout] = []
    try:
        for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
            session = LocalSession(environment, f"repeated-{number}")
            metadata, first = session.open(copy.deepcopy(row.metadata))
            rollouts.append(_Rollout(session, answer, metadata, [*copy.deepcopy(list(row.messages)), *first]))
        for _ in range(min(trial.max_turns, REPEATED_TURNS)):
            if active := [each for each in rollouts if not each.ended]:
                _step(environment, trial, active)
    finally:
        for each in rollouts:
            each.session.close()
    return [each.reward for each in rollouts]


def _step(environment: EnvironmentInterface, trial: EnvironmentTrial, rollouts: Sequence[_Rollout]) -> None:
    for each in rollouts:
        each.log.append({"role": "assistant", "content": each.answer})
    metadata = [each.session.named(each.metadata) for each in rollouts]
    step_return = step_checked(environment, trial.task, [copy.deepcopy(each.log) for each in rollouts], metadata)
    for i, (each, rewards) in enumerate(zip(rollouts, rewards_by_row(step_return), strict=True)):
        is_scored = step_return.scored is None or bool(step_return.scored[i])
        each.reward = each.reward + trial.reward_of(rewards) if is_scored and each.reward is not None else None
        each.metadata = each.metadata if step_return.metadata[i] is None else step_return.metadata[i]
        each.ended = bool(step_return.terminateds[i])
        if not each.ended:
            each.log.extend(messages_of(step_return.observations[i]))


def rewards_by_row(step_return: EnvironmentReturn) -> list[dict[str, float]]:
    """The rewards of each row by name; those that are 0.0, as an omitted name is, are left out."""
    named = step_return.rewards if isinstance(step_return.rewards, Mapping) else {"reward": step_return.rewards}
    rows = range(len(step_return.observations))
    return [{name: value for name, values in named.items() if (value := float(values[row]))} for row in rows]


def scripted_player(answers: Sequence[str]) -> Player:
    """A player that gives these answers and then stops."""
    remaining = iter(answers)
    return lambda log: next(remaining, None)


def random_player(seed: int) -> Player:
    """A player that answers with a random word or number of the conversation."""
    draw = random.Random(seed)

    def answer(log: Sequence[Mapping[str, Any]]) -> str:
        pieces = _PIECE.findall(" ".join(str(message["content"]) for message in log if message["role"] != "assistant"))
        return draw.choice(pieces) if pieces else ""

    return answer
