"""Reward functions: how they are called, and checks of what they accept and return.

A function with a parameter `completions` (or `prompts`) scores a batch: it gets lists and returns a list, as in TRL. Any other
function scores one row. All arguments are passed by keyword, and only those that the function accepts.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.errors import ConfigError, UserError
from rl_core.event_loop import finished
from rl_core.testing.outputs.reserved_names import reserved_reward
from rl_train.errors import describe_raised

Rewards = dict[str, float]
"""The rewards of one row by name."""

ROW_ARGUMENTS = ("prompt", "completion", "messages", "completion_ids")
"""Arguments of a function of one row besides the row's own fields: two texts, the whole conversation, sampled tokens."""
BATCH_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments of a function of a batch besides the fields of the rows: lists of texts, or of lists of messages, and of tokens."""
_ONLY_IN_TRL = ("environments", "log_extra", "log_metric", "trainer_state")
_EXPECTED = "Return a finite number, a dict of such numbers by name, or None for a row that must not be scored."


class RewardFunctionError(Exception):
    """A reward function raised; names the function and the line. The step is repeated, since the reason may be temporary."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A conversation to score."""

    prompt: str
    """Content of the last message before the answer."""
    completion: str
    """The model's text."""
    prompt_messages: Sequence[Mapping[str, Any]]
    """The messages before the answer."""
    messages: Sequence[Mapping[str, Any]]
    """The whole conversation."""
    completion_ids: list[int]
    """The sampled tokens, including the end token; empty for a text that was not sampled, as in `rlcore check env`."""
    fields: Mapping[str, Any]
    """The row's metadata, such as `expected_answer`."""


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A function and its reward's name.

    Attributes:
        name: name of the reward if the function returns a number.
        label: how errors name the function.
        call: the function.
        is_batched: whether one call scores several rows.
        is_async: whether a call returns an awaitable.
        required: names of parameters without a default.
        accepted: names of all parameters; None if it accepts any (`**kwargs`).
    """

    name: str
    label: str
    call: Callable[..., Any]
    is_batched: bool
    is_async: bool
    required: frozenset[str]
    accepted: frozenset[str] | None

    def check_fields(self, fields: Mapping[str, Any]) -> None:
        """Check that a row has what the function requires, and nothing that has the name of another argument.

        Raises:
            ConfigError: a parameter is missing, or a field of the row has the name of an argument.
        """
        arguments = BATCH_ARGUMENTS if self.is_batched else ROW_ARGUMENTS
        if hidden := sorted(set(arguments) & set(fields)):
            raise ConfigError(
                f"The rows have the {_fields(hidden)}, which {self.label} would get instead of its argument of that name. "
                "Rename the field, or remove it from `env_keys` of the dataset."
            )
        missing = sorted(self.required - set(arguments) - set(fields))
        if missing:
            has = ", ".join([*arguments, *sorted(fields)])
            remedy = (
                "Rename the parameter, give it a default, or name the field of the data in `env_keys` of the dataset, such as "
            )
            remedy += f"`env_keys: [{', '.join(missing)}]` (`output_key` for expected_answer)."
            if of_trl := sorted({*_ONLY_IN_TRL} & {*missing}):
                remedy = f"Only TRL passes {', '.join(of_trl)}: give such parameters a default."
            raise ConfigError(f"{self.label} requires {', '.join(map(repr, missing))}, but only gets {has}. {remedy}")

    def score(self, rows: Sequence[Row], *, as_messages: bool) -> list[Rewards | None]:
        """The rewards of each row by a function that is not async; None if the function does not apply.

        Args:
            rows: B rows.
            as_messages: whether a function of a batch gets lists of messages and not texts.

        Raises:
            ConfigError: a row lacks a field that the function requires.
            RewardFunctionError: the function raised.
            UserError: it returned something else.
        """
        returned = []
        for arguments in self._calls(rows, as_messages=as_messages):
            try:
                returned.append(finished(self.call(**arguments)))
            except (Exception, SystemExit) as error:
                raise self._failure(error) from error
        return self._results(returned, rows)

    async def score_async(self, rows: Sequence[Row], *, as_messages: bool) -> list[Rewards | None]:
        """As `score`, for an async function; the calls run concurrently."""
        try:
            found = await asyncio.gather(*(self.call(**arguments) for arguments in self._calls(rows, as_messages=as_messages)))
        except Exception as error:
            raise self._failure(error) from error
        return self._results(found, rows)

    def _calls(self, rows: Sequence[Row], *, as_messages: bool) -> list[dict[str, Any]]:
        """The arguments of each call: one for all rows, or one per row."""
        for row in rows:
            self.check_fields(row.fields)
        if self.is_batched:
            return [self._accepted(_columns(rows, as_messages=as_messages))]
        values = ((row.prompt, row.completion, list(row.messages), row.completion_ids) for row in rows)
        given = (dict(zip(ROW_ARGUMENTS, each, strict=True)) for each in values)
        return [self._accepted({**own, **row.fields}) for own, row in zip(given, rows, strict=True)]

    def _accepted(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if self.accepted is None or name in self.accepted}

    def _failure(self, error: BaseException) -> RewardFunctionError:
        return RewardFunctionError(f"{self.label} raised {describe_raised(error, self.call)}")

    def _results(self, returned: Sequence[Any], rows: Sequence[Row]) -> list[Rewards | None]:
        found = returned[0] if self.is_batched else returned
        values = found.tolist() if hasattr(found, "tolist") else found
        if not isinstance(values, list | tuple) or len(values) != len(rows):
            size = f" of {len(values)} values" if isinstance(values, list | tuple) else ""
            raise UserError(
                f"{self.label} was called with {len(rows)} completions and returned {type(found).__name__}{size}. Return a "
                "list with one number, dict or None per completion."
            )
        labels = (f"{self.label}, called with the completion {_shown(row.completion)}," for row in rows)
        return [read_rewards(value, name=self.name, label=label) for value, label in zip(values, labels, strict=True)]


def read_rewards(value: Any, *, name: str, label: str) -> Rewards | None:
    """What a function or an agent returned for a row, as named rewards; None if the row has no reward.

    Args:
        value: what was returned.
        name: name of a reward that is only a number.
        label: how errors name the function.

    Raises:
        UserError: it is not a finite number, a dict of such numbers, or None.
    """
    given = value if isinstance(value, Mapping) else {name: value}
    made = {name: _number(number, label) for name, number in given.items() if number is not None}
    if wrong := [name for name in made if not isinstance(name, str)]:
        raise UserError(f"{label} returned a reward named {wrong[0]!r}. Names of rewards must be strings.")
    if (problem := reserved_reward(made)) is not None:
        raise UserError(f"{label} returned a reward with a reserved name: {problem}.")
    return made or None


def _number(value: Any, label: str) -> float:
    number = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value  # NumPy and PyTorch
    if not isinstance(number, numbers.Real) or not math.isfinite(number):
        raise UserError(f"{label} returned {_shown(value)} ({type(value).__name__}) as a reward. {_EXPECTED}")
    return float(number)


def reward_function(call: Any, *, name: str, label: str) -> RewardFunction:
    """A function, inspected.

    Args:
        call: the function.
        name: name of its reward.
        label: how errors name it.

    Raises:
        ConfigError: it is not callable, or cannot be called with keywords.
    """
    if (problem := reserved_reward([name])) is not None:
        raise ConfigError(f"{label}: {problem} (`reward_fns` can map other names to functions).")
    if not callable(call) or inspect.isclass(call):
        kind = "a class" if inspect.isclass(call) else f"a {type(call).__name__}"
        raise ConfigError(f"{label} is {kind}, not a function. Give a function, or an object with a `__call__` method.")
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{label} has no readable signature ({error}). Wrap it in a Python function.") from error
    if any(one.kind is one.POSITIONAL_ONLY for one in parameters):
        raise ConfigError(f"{label} has positional-only parameters, but reward functions are called with keywords.")
    named = {one.name: one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    is_batched = bool(named.keys() & {"prompts", "completions"})
    if not takes_all and not named.keys() & {"completion", "completions", "messages"}:
        raise ConfigError(
            f"{label}({', '.join(named)}) does not take the completion. Add a parameter: `completion` (the text of one row), "
            "`messages` (the conversation of one row), or `completions` (all rows at once)."
        )
    return RewardFunction(
        name=name,
        label=label,
        call=call,
        is_batched=is_batched,
        is_async=inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__),
        required=frozenset(n for n, one in named.items() if one.default is one.empty),
        accepted=None if takes_all else frozenset(named),
    )


def combine(found: Sequence[Rewards | None], functions: Sequence[RewardFunction]) -> Rewards | None:
    """The rewards that several functions gave one row; None if no function applies to it.

    Raises:
        UserError: two functions returned a reward of the same name.
    """
    made: Rewards = {}
    for rewards, function in zip(found, functions, strict=True):
        for name, value in (rewards or {}).items():
            if name in made:
                raise UserError(f"{function.label} returned a reward {name!r}, but another function did so too. Rename one.")
            made[name] = value
    return made or None


def _columns(rows: Sequence[Row], *, as_messages: bool) -> dict[str, list[Any]]:
    """The arguments of a function of a batch: one list per field that any row has, None for rows without it."""
    made: dict[str, list[Any]] = {
        "prompts": [list(row.prompt_messages) if as_messages else row.prompt for row in rows],
        "completions": [
            [dict(message) for message in row.messages[len(row.prompt_messages) :]] if as_messages else row.completion
            for row in rows
        ],
        "completion_ids": [row.completion_ids for row in rows],
    }
    for name in dict.fromkeys(name for row in rows for name in row.fields):
        made[name] = [row.fields.get(name) for row in rows]
    return made


def _fields(names: Sequence[str]) -> str:
    return f"field{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
