"""Plays rollouts against an environment without a model (`rlcore env play`): a person, a script or a random player answers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.messages import ToolCall, messages_of
from rl_core.testing.environments.local_rollouts import LocalRollouts
from rl_core.testing.environments.trial import EnvironmentTrial, TrialRow
from rl_train.tools.parsers import read_call

Player = Callable[[Sequence[Mapping[str, Any]]], str | None]
"""Returns the next answer to a conversation, or None to stop."""

OnOpen = Callable[[Sequence[Mapping[str, Any]]], None]

REPEATED_TURNS = 20
"""Maximum number of turns of a rollout whose answers are all equal."""
_CALL = re.compile(r"^/call[ \t]+(\S+)[ \t]*(.*)$", re.MULTILINE)
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
    has_tools: bool = False,
) -> Iterator[PlayedTurn]:
    """Yields each turn until the environment ends the rollout, `max_turns` is reached, or the player stops.

    Args:
        environment: scores and replies.
        task: task name, for errors.
        row: the prompt and its metadata.
        player: answers.
        max_turns: maximum number of turns.
        on_open: called with the messages that the environment adds to the prompt.
        has_tools: whether lines `/call NAME ARGUMENTS` of an answer are tool calls; the arguments are a JSON object.
    """
    with LocalRollouts(environment, task, [row], session="play") as rollouts:
        on_open(rollouts.logs[0][len(row.messages) :])
        for _ in range(max_turns):
            if rollouts.ended[0] or (answer := player(rollouts.logs[0])) is None:
                return
            text, calls = _with_calls(answer) if has_tools else (answer, [])
            result = rollouts.answer({0: text}, **({"tool_calls": calls} if calls else {}))[0]
            yield PlayedTurn(
                answer=answer,
                rewards=result.rewards,
                scored=result.scored,
                parsed=result.answer,
                ended=result.terminated,
                replies=[] if result.terminated else messages_of(result.observation),
            )


def _with_calls(answer: str) -> tuple[str, list[ToolCall]]:
    """The text of an answer, and its tool calls."""
    calls: list[ToolCall] = [
        {**read_call({"name": name, "arguments": text or "{}"}), "id": f"call_{number}"}
        for number, (name, text) in enumerate(_CALL.findall(answer))
    ]
    return _CALL.sub("", answer).strip(), calls


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
    rewards: list[float | None] = [0.0] * len(rows)
    with LocalRollouts(environment, trial.task, rows, session="repeated") as rollouts:
        for _ in range(min(trial.max_turns, REPEATED_TURNS)):
            active = [row for row, ended in enumerate(rollouts.ended) if not ended]
            for row, result in rollouts.answer({row: answers[row] for row in active}).items():
                if (earlier := rewards[row]) is not None:
                    rewards[row] = earlier + trial.reward_of(result.rewards) if result.scored else None
    return rewards


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
