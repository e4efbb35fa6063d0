"""The tools that the environments of a run offer, by task, and the parsers of the calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.cluster.remote_actor import plain_class
from rl_core.config.diagnostics import dotted
from rl_core.config.schema import EnvironmentConfig
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.records import ToolSpec
from rl_core.plugins.registry import Registry
from rl_core.testing.environments.checks import constructor_config
from rl_train.config.schema import RunConfig
from rl_train.pools.elsewhere import environment_component, environment_elsewhere
from rl_train.tools.parsers import ToolCallParser, choose_parser


@dataclass(frozen=True, kw_only=True)
class TaskTools:
    """Tools and parsers of a run.

    Attributes:
        offered: The functions that environments offer, by task; tasks without any are left out.
        parsers: Parsers of the model's messages, by task; messages of other tasks are not parsed.
    """

    offered: Mapping[str, Sequence[ToolSpec]] = field(default_factory=dict)
    parsers: Mapping[str, ToolCallParser] = field(default_factory=dict)

    def of_record(self, record: Mapping[str, Any]) -> list[Any] | None:
        """The tools that the model is shown for a record: its own if it has some, else those of its task's environment.

        Raises:
            DataError: The record offers a function that the environment of its task does not have.
        """
        record_tools: list[Any] | None = record.get("tools") or None
        offered = self.offered.get(record.get("task_name", ""), ())
        if not offered:
            return record_tools
        if record_tools is None:
            return list(offered)
        known = [tool["function"]["name"] for tool in offered]
        for name in (tool["function"]["name"] for tool in record_tools):
            if name not in known:
                raise DataError(
                    f"the row offers the function {name!r}, but the environment of task {record['task_name']!r} has "
                    f"{', '.join(known)}. Remove it from the row, or set `tools_key: null` to offer those of the environment"
                )
        return record_tools


def tools_of_run(run: RunConfig, registry: Registry, tokenizer: Any) -> TaskTools:
    """The tools of the environments of a config; imports their classes.

    Raises:
        ConfigError: No parser fits the chat template; the error names the section.
    """
    offers = {}
    for task, section in run.env.items():
        try:
            if (elsewhere := environment_elsewhere(task, section, registry)) is not None:
                offers[task] = _Offer(specs=elsewhere.tools, reads_calls=elsewhere.reads_tool_calls, parser=section.tool_parser)
            else:
                found = environment_component(task, section, registry).load()
                offers[task] = _Offer.of_class(plain_class(found), section)
        except ConfigError as error:
            error.key = error.key or dotted(("env", task))
            raise
    return _tools(offers, tokenizer)


def tools_of_instances(environments: Mapping[str, EnvironmentInterface], tokenizer: Any) -> TaskTools:
    """The tools of environments that already exist.

    Raises:
        ConfigError: As `tools_of_run`.
    """
    return _tools({task: _Offer.of_instance(found) for task, found in environments.items()}, tokenizer)


@dataclass(frozen=True, kw_only=True)
class _Offer:
    specs: Sequence[ToolSpec]
    reads_calls: bool
    parser: str | None

    @classmethod
    def of_class(cls, environment_class: Any, section: EnvironmentConfig) -> _Offer:
        if not (isinstance(environment_class, type) and issubclass(environment_class, EnvironmentInterface)):
            raise ConfigError(f"{environment_class!r} is not a subclass of rl_core.interfaces.EnvironmentInterface.")
        return cls(
            specs=environment_class.offered_tools(constructor_config(section)),
            reads_calls=environment_class.reads_tool_calls,
            parser=section.tool_parser,
        )

    @classmethod
    def of_instance(cls, environment: EnvironmentInterface) -> _Offer:
        config = getattr(environment, "config", None)
        return cls(
            specs=type(environment).offered_tools(config),
            reads_calls=environment.reads_tool_calls,
            parser=getattr(config, "tool_parser", None),
        )


def _tools(offers: Mapping[str, _Offer], tokenizer: Any) -> TaskTools:
    parsers = {}
    for task, offer in offers.items():
        if offer.specs or offer.reads_calls or offer.parser is not None:
            try:
                parsers[task] = choose_parser(tokenizer, offer.parser)
            except ConfigError as error:
                error.key = dotted(("env", task, "tool_parser"))
                raise
    return TaskTools(offered={task: offer.specs for task, offer in offers.items() if offer.specs}, parsers=parsers)
