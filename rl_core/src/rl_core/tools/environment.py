"""An environment whose model calls Python functions before it answers."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from rl_core.config.schema import ToolEnvironmentConfig
from rl_core.config.validator import read_section
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.environments.scorer import StepResult, environment_return, step_results
from rl_core.errors import ConfigError
from rl_core.interfaces.environment import SESSION_KEY, Conversation, EnvironmentInterface, EnvironmentReturn
from rl_core.interfaces.records import Message, PartsMessage, ToolCall, ToolSpec
from rl_core.tools.runner import CallProblem, CallResult, CallRunner
from rl_core.tools.specs import Tool

_log = logging.getLogger("rlcore.tools")
_STATE = "tool_use"
_MANY_RAISED = 10
"""Number of equal exceptions from which a tool is reported."""
PENALTY = "invalid_calls"
"""Name of the reward that contains the penalties of invalid calls."""


class ToolEnvironment(EnvironmentInterface):
    """Runs the tool calls of the model and lets the subclass score the final answer.

    A subclass lists its functions in `functions`, or returns them from `functions_of`, and scores answers in `finish`. The
    functions are offered to the model in every row of the task, or those of them that the row's own `tools` name. All calls of
    a turn, and of all rows of a batch, run concurrently; each result is one message of the role `tool`. The state is in the
    metadata of the row, under `tool_use`.

    Args:
        config: A section of the class `config_class`, a dict of its keys, or None for its defaults.

    Raises:
        ConfigError: A function cannot be a tool, or two have the same name.
    """

    min_turns: ClassVar[int] = 2
    reads_tool_calls: ClassVar[bool] = True
    config_class: ClassVar[type[ToolEnvironmentConfig]] = ToolEnvironmentConfig
    functions: ClassVar[Sequence[Callable[..., Any]]] = ()
    """The tools; each is a function as described in `rl_core.tools.specs.Tool.of`."""

    def __init__(self, config: ToolEnvironmentConfig | Mapping[str, Any] | None = None) -> None:
        self.config = self._read(config)
        self.tools = _by_name(self.functions_of(self.config), type(self).__name__)
        self._ran: Counter[tuple[str, str]] = Counter()  # by tool and exception; all calls of a tool have no exception
        self._reported: set[tuple[str, str]] = set()
        self._runner = CallRunner(
            tools=self.tools,
            timeout_s=self.config.call_timeout_s,
            max_concurrent=self.config.max_concurrent_calls,
            max_chars=self.config.max_result_chars,
            total_s=self.config.step_timeout_s / 2,
        )

    @classmethod
    def functions_of(cls, config: Any) -> Sequence[Callable[..., Any]]:
        """The tool functions of an environment with this config."""
        return cls.functions

    @classmethod
    def offered_tools(cls, config: Any = None) -> list[ToolSpec]:
        """The functions that the model is shown, from the tools of a section of `env`."""
        return [tool.spec for tool in _by_name(cls.functions_of(cls._read(config)), cls.__name__).values()]

    @abstractmethod
    def finish(self, message_log_batch: list[Conversation], metadata: list[Any]) -> EnvironmentReturn:
        """Score conversations whose last message calls no tool, as `EnvironmentInterface.step`; usually all of them end.

        Conversations that still call tools after `max_tool_turns` are included; they should get no reward for an answer.
        """

    def step(self, message_log_batch: list[Conversation], metadata: list[Any]) -> EnvironmentReturn:
        """Run the calls of the rows that make some, and score the others."""
        states = [_state(info) for info in metadata]
        calls = [list(log[-1].get("tool_calls") or []) for log in message_log_batch]
        calling = [row for row, own in enumerate(calls) if own and states[row]["turns"] < self.config.max_tool_turns]
        infos = [metadata[row] for row in calling for _ in calls[row]]
        sessions = [info.get(SESSION_KEY) if isinstance(info, Mapping) else None for info in infos]
        results = iter(self.run_calls([call for row in calling for call in calls[row]], sessions))
        rows = {
            row: self._called(calls[row], [next(results) for _ in calls[row]], metadata[row], states[row]) for row in calling
        }
        if ended := [row for row in range(len(calls)) if row not in rows]:
            final = self.finish([message_log_batch[row] for row in ended], [_without_state(metadata[row]) for row in ended])
            rows |= {row: _finished(result, states[row]) for row, result in zip(ended, step_results(final), strict=True)}
        return environment_return([rows[row] for row in range(len(calls))])

    def run_calls(self, calls: Sequence[ToolCall], sessions: Sequence[str | None] | None = None) -> list[CallResult]:
        """As `CallRunner.run`; warns once of a tool that raises the same exception in most of its calls."""
        results = self._runner.run(calls, sessions)
        for name, result in zip((call["function"]["name"] for call in calls), results, strict=True):
            self._ran.update({(name, ""), (name, result.raised)} if name in self.tools else ())
            count, total = self._ran[name, result.raised], self._ran[name, ""]
            if count >= _MANY_RAISED and count > total / 2 and result.raised and (name, result.raised) not in self._reported:
                self._reported.add((name, result.raised))
                what = f"the tool {name} raised {result.raised} in {count} of its {total} calls"
                _log.warning("%s: %s, the last time: %s", type(self).__name__, what, result.content)
        return results

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`tool_calls`, calls per row; `tool_use_frac`, rows with calls; `invalid_call_frac`, and counts by kind of problem."""
        states = [_state(info) for info in batch["extra_env_info"]]
        num_calls = sum(state["calls"] for state in states)
        problems: Counter[str] = Counter()
        for state in states:
            problems.update(state["problems"])
        metrics: dict[str, float | int] = {
            "tool_calls": num_calls / len(states),
            "tool_use_frac": sum(state["calls"] > 0 for state in states) / len(states),
            "invalid_call_frac": sum(problems.values()) / num_calls if num_calls else 0.0,
        }
        return batch, metrics | {f"calls_{problem.value}": problems[problem.value] for problem in CallProblem}

    @classmethod
    def _read(cls, config: Any) -> ToolEnvironmentConfig:
        section: ToolEnvironmentConfig = read_section(cls.config_class, config, who=cls.__name__)
        return section

    def _called(
        self, calls: Sequence[ToolCall], results: Sequence[CallResult], info: Any, state: Mapping[str, Any]
    ) -> StepResult:
        problems = [result.problem.value for result in results if result.problem is not None]
        after = {
            "turns": state["turns"] + 1,
            "calls": state["calls"] + len(calls),
            "problems": dict(Counter(state["problems"]) + Counter(problems)),
        }
        messages: list[Message | PartsMessage] = [result.message(call) for call, result in zip(calls, results, strict=True)]
        penalty = self.config.invalid_call_penalty
        rewards = {PENALTY: -penalty * len(problems)} if penalty and problems else {}
        broken = next((result.content for result in results if result.is_unavailable), None)
        if broken is not None:
            _log.warning("%s: a row has failed, because a tool is unavailable: %s", type(self).__name__, broken)
        return StepResult(
            observation=messages,
            metadata={**(info or {}), _STATE: after},
            rewards=rewards,
            terminated=broken is not None,
            failure=broken,
        )


def _by_name(functions: Sequence[Callable[..., Any]], who: str) -> dict[str, Tool]:
    tools: dict[str, Tool] = {}
    for tool in map(Tool.of, functions):
        if tool.name in tools:
            raise ConfigError(f"{who} has two tools with the name {tool.name!r}: rename one of the functions.")
        tools[tool.name] = tool
    return tools


def _state(info: Any) -> Mapping[str, Any]:
    state = info.get(_STATE) if isinstance(info, Mapping) else None
    return state or {"turns": 0, "calls": 0, "problems": {}}


def _without_state(info: Any) -> Any:
    return {key: value for key, value in info.items() if key != _STATE} if isinstance(info, Mapping) else info


def _finished(result: StepResult, state: Mapping[str, Any]) -> StepResult:
    """A result of `finish`, with the state of the tools in its metadata."""
    info = result.metadata
    return replace(result, metadata={**info, _STATE: dict(state)}) if isinstance(info, Mapping) else result
