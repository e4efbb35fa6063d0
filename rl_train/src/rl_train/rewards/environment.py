"""The environment `function`: scores the completion of each row with plain functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.environments import Score, ScorerEnvironment
from rl_core.errors import ConfigError, DataError
from rl_core.event_loop import EventLoopThread
from rl_core.interfaces.environment import Conversation
from rl_core.interfaces.records import plain_text
from rl_core.plugins.import_path import resolve
from rl_train.rewards.config import FunctionEnvironmentConfig
from rl_train.rewards.functions import RewardFunction, Rewards, Row, combine, reward_function


class FunctionEnvironment(ScorerEnvironment):
    """Ends every rollout after its first turn, with the named rewards of its functions.

    A row to which no function applies is not scored.

    Args:
        config: names the functions; None if they are given.
        functions: functions of this process, used instead of those of the config.

    Attributes:
        as_messages: whether functions of a batch get lists of messages and not texts.

    Raises:
        ConfigError: a function does not exist, or cannot be called with keywords.
    """

    reads_token_ids = True

    def __init__(
        self, config: FunctionEnvironmentConfig | None = None, *, functions: Sequence[RewardFunction] | None = None
    ) -> None:
        self.functions = list(functions) if config is None else load_functions(config)  # type: ignore[arg-type]
        self.as_messages = config is not None and config.completion_format == "messages"
        self._correct_above = None if config is None else config.correct_above
        self._loop = EventLoopThread("reward functions") if any(function.is_async for function in self.functions) else None

    def score_batch(self, message_log_batch: list[Conversation], metadata: list[Any]) -> list[Score]:
        """Score B completions, the messages of the assistant after each prompt.

        Returns:
            Named rewards; a row without any is not scored.

        Raises:
            DataError: the metadata of a row is not a mapping.
            RewardFunctionError: a function raised.
            RLCoreError: a function returned something that is not a reward.
        """
        rows = [row_of(log, info) for log, info in zip(message_log_batch, metadata, strict=True)]
        return [Score(rewards or {}, scored=rewards is not None) for rewards in self._score(rows)]

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`accuracy`, the fraction of rewards above `correct_above`, if that is set."""
        if self._correct_above is None:
            return batch, {}
        return batch, {"accuracy": float((batch["rewards"] > self._correct_above).float().mean())}

    def shutdown(self) -> None:
        if self._loop is not None:
            self._loop.close()

    def _score(self, rows: Sequence[Row]) -> list[Rewards | None]:
        """The rewards of each row by all functions. Async functions run meanwhile in their own thread.

        The others run in this one: timeouts by signals, which math libraries use, only work in the main thread.
        """
        settings = {"as_messages": self.as_messages}
        started = [
            self._loop.start(function.score_async(rows, **settings)) if function.is_async and self._loop is not None else None
            for function in self.functions
        ]
        found = [
            function.score(rows, **settings) if running is None else running.result()
            for function, running in zip(self.functions, started, strict=True)
        ]
        return [combine([scores[i] for scores in found], self.functions) for i in range(len(rows))]


def load_functions(config: FunctionEnvironmentConfig) -> list[RewardFunction]:
    """The functions of a section.

    Raises:
        ConfigError: a function does not exist, or cannot be called with keywords; its `key` is relative to the section.
    """
    made = []
    for name, path in config.functions.items():
        key = ".".join(map(str, config.key_of(name)))
        try:
            made.append(reward_function(resolve(path, key=key), name=name, label=path))
        except ConfigError as error:
            error.key = key
            raise
    return made


def named_functions(given: Any) -> list[RewardFunction]:
    """Functions passed in Python: one, a list of them, or a mapping from the names of their rewards.

    Raises:
        ConfigError: an entry is not a function, or two have the same name.
    """
    if isinstance(given, Mapping):
        named: list[tuple[str, Callable[..., Any]]] = list(given.items())
    else:
        listed = list(given) if isinstance(given, list | tuple) else [given]
        named = [(getattr(call, "__name__", type(call).__name__), call) for call in listed]
    if not named:
        raise ConfigError("`reward_fns` is empty: pass at least one function.")
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"`reward_fns` has several functions named {', '.join(twice)}: pass a dict with a name for each.")
    return [reward_function(call, name=name, label=f"reward function {name}") for name, call in named]


def row_of(log: Sequence[Mapping[str, Any]], info: Any) -> Row:
    """A conversation and its metadata as a row.

    Raises:
        DataError: the metadata is not a mapping.
    """
    if info is not None and not isinstance(info, Mapping):
        raise DataError(f"The metadata of a row is a {type(info).__name__}: reward functions need a mapping of its fields.")
    *prompt, answer = log
    answer = dict(answer)
    tokens = answer.pop("token_ids", ())
    return Row(
        prompt=plain_text(prompt[-1]["content"]) if prompt else "",
        completion=str(answer["content"]),
        prompt_messages=prompt,
        messages=[*prompt, answer],
        completion_ids=list(tokens),
        fields=dict(info or {}),
    )
