"""The environment `tools`: the model calls tools, and its final answer is compared with the expected one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from threading import Lock
from typing import Any, ClassVar

from rl_core.config.schema import ToolEnvironmentConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError
from rl_core.interfaces.environment import Conversation, EnvironmentReturn
from rl_core.interfaces.records import ToolSpec
from rl_core.plugins.component import did_you_mean, is_path
from rl_core.plugins.import_path import resolve
from rl_core.tools.environment import ToolEnvironment
from rl_core.tools.specs import Tool
from rl_envs.config import ToolsEnvironmentConfig
from rl_envs.math.environment import MathEnvironment, Outcome
from rl_envs.tools.calculator import calculator
from rl_envs.tools.mcp_servers import add_tools, list_servers
from rl_envs.tools.python import SandboxedPython

BUILT_IN = ("calculator", "python")


class ToolsEnvironment(ToolEnvironment):
    r"""Reward 1.0 if the answer after the tool calls equals the expected one, compared as by the environment `math`.

    Each row's metadata contains `expected_answer` (or `ground_truth`). A rollout that still calls tools after
    `max_tool_turns`, or ends without an answer, gets 0.0.

    Args:
        config: `ToolsEnvironmentConfig`, a dict of its keys, or None for its defaults.

    Raises:
        ConfigError: A tool does not exist, a function cannot be a tool, or an MCP server does not start.
        SandboxUnavailableError: The tool `python` is listed, and no isolation level works that `sandbox.require` allows.
    """

    config_class: ClassVar[type[ToolEnvironmentConfig]] = ToolsEnvironmentConfig
    config: ToolsEnvironmentConfig

    def __init__(self, config: ToolsEnvironmentConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._servers = list_servers(self.config.mcp_servers)
        self._math = MathEnvironment({"require_box": self.config.require_box, "timeout_s": self.config.grading_timeout_s})
        self._grading = Lock()
        owners = [getattr(tool.function, "__self__", None) for tool in self.tools.values()]
        self._sandboxes = [owner for owner in owners if isinstance(owner, SandboxedPython)]
        try:
            for sandbox in self._sandboxes:
                sandbox.start()
            for server in self._servers:
                add_tools(self.tools, server.start())
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def offered_tools(cls, config: Any = None) -> list[ToolSpec]:
        """The functions that the model is shown. MCP servers are started, asked for their tools, and ended."""
        section = cls._read(config)
        assert isinstance(section, ToolsEnvironmentConfig)
        tools = {tool.name: tool for tool in map(Tool.of, cls.functions_of(section))}
        with ExitStack() as ended:
            for server in [ended.enter_context(closing(server)) for server in list_servers(section.mcp_servers)]:
                add_tools(tools, server.start())
        return [tool.spec for tool in tools.values()]

    @classmethod
    def functions_of(cls, config: ToolsEnvironmentConfig) -> Sequence[Callable[..., Any]]:
        """The functions of `tools`."""
        return [_function(name, config) for name in config.tools]

    def finish(self, message_log_batch: list[Conversation], metadata: list[Any]) -> EnvironmentReturn:
        """Grade B answers; every row ends."""
        # A message that still calls tools is not an answer, even with a box: it is graded as an empty one.
        answers: list[Conversation] = [
            [*log[:-1], {**log[-1], "content": ""}] if log[-1].get("tool_calls") else log for log in message_log_batch
        ]
        with self._grading:
            return self._math.step(answers, metadata)

    def close(self, session: str) -> None:
        """End what the tools keep for a rollout."""
        for sandbox in self._sandboxes:
            sandbox.end(session)
        for server in self._servers:
            server.end(session)

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """`accuracy`, `answered_frac`, and the metrics of tool calls."""
        batch, metrics = super().global_post_process_and_metrics(batch)
        outcomes = [info.get("grading") if isinstance(info, Mapping) else None for info in batch["extra_env_info"]]
        answered = [outcome for outcome in outcomes if outcome not in (None, Outcome.NO_ANSWER)]
        return batch, {
            "accuracy": outcomes.count(Outcome.RIGHT) / len(outcomes),
            "answered_frac": len(answered) / len(outcomes),
            **metrics,
        }

    def shutdown(self) -> None:
        for sandbox in self._sandboxes:
            sandbox.close()
        for server in self._servers:
            server.close()
        self._math.shutdown()


def _function(name: str, config: ToolsEnvironmentConfig) -> Callable[..., Any]:
    if name == "calculator":
        return calculator
    if name == "python":
        return SandboxedPython(config.sandbox).python
    if not is_path(name):
        hint = did_you_mean(name, [*BUILT_IN])
        raise ConfigError(f"tools: unknown tool {name!r}.{hint} Use {', '.join(BUILT_IN)}, or the path of a function.")
    function: Callable[..., Any] = resolve(name, key="tools")
    return function
