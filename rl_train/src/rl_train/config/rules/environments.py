"""Environments, agents and their rollouts: turns, segments, tool calls and scored rows."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.diagnostics import Problem
from rl_core.config.schema import EnvironmentConfig
from rl_core.config.source_tree import KeyPath
from rl_core.plugins.component import Kind, did_you_mean, is_path
from rl_core.plugins.import_path import missing_target
from rl_train.config.rules.rule import TRAINING, CheckedConfig, Stage, rule
from rl_train.config.schema import RunConfig
from rl_train.config.static_attribute import static_attribute

OWN_PARSER = "response_template"
"""Name of the tokenizer's own parser of responses."""
PARSER_NAMES = (OWN_PARSER, "hermes", "mistral", "llama3")
_HISTORY: KeyPath = ("rollout", "history")


def each_task(config: CheckedConfig) -> Iterator[tuple[str, EnvironmentConfig]]:
    """The environments of a config, for rules that check each of them."""
    yield from config.run.env.items()


@rule("env", "algorithm", each=each_task)
def rollouts_have_enough_turns(config: CheckedConfig, task: str, section: EnvironmentConfig) -> Iterator[Problem]:
    """A rollout may have the turns without which its environment gives no reward, if the class states them literally."""
    stated = None if section.env_cls is None or section.python is not None else static_attribute(section.env_cls, "min_turns")
    yield from too_few_turns(config.run, task, stated if isinstance(stated, int) else section.min_turns)


@rule("env", "algorithm", each=each_task, stage=Stage.IMPORTED)
def rollouts_have_enough_turns_for_the_class(config: CheckedConfig, task: str, section: EnvironmentConfig) -> Iterator[Problem]:
    """A rollout may have the turns without which its environment gives no reward, also if they are inherited or computed."""
    if section.python is not None:
        return  # `environment_classes_keep_their_contract` asks its interpreter
    environment_class = config.load(Kind.ENVIRONMENT, section.env_cls or section.name or task)
    yield from too_few_turns(config.run, task, max(section.min_turns, getattr(environment_class, "min_turns", 1)))


def too_few_turns(run: RunConfig, task: str, needed: int) -> Iterator[Problem]:
    """The key that limits the turns of a task below what its environment needs."""
    allowed, section = run.max_turns[task], run.env[task]
    if allowed >= needed:
        return
    own = ("env", task, "max_rollout_turns")
    asked = run.algorithm.runtime_needs.max_turns
    if section.max_rollout_turns is not None or asked is None:
        path: tuple[str, ...] = own if section.max_rollout_turns is not None else ("env", task)
    else:
        path = (run.algorithm_name, "max_rollout_turns")
    yield Problem(
        path,
        f"rollouts of task {task!r} have at most {allowed} {'turn' if allowed == 1 else 'turns'}, but environment "
        f"{section.env_cls or section.name or task} needs {needed} to give a reward. Set {'.'.join(own)} to {needed} or more.",
    )


@rule("rollout.history", "env", "algorithm", applies_to=TRAINING)
def history_is_only_rendered_again_for_later_turns(config: CheckedConfig) -> Iterator[Problem]:
    """`rollout.history: template` is only set if rollouts have several turns."""
    run = config.run
    is_single = max(run.max_turns.values(), default=1) == 1
    if run.algorithm.runtime_needs.rollouts is not None and run.rollout.history == "template" and is_single:
        yield Problem(_HISTORY, "rollouts have one turn, so no history is rendered again and the key has no effect: remove it.")


@rule("rollout.history", "env", "algorithm", applies_to=TRAINING)
def algorithm_supports_segments(config: CheckedConfig) -> Iterator[Problem]:
    """The algorithm supports rollouts with several segments, if the config has any."""
    run = config.run
    source, rollouts = _source_of_segments(run), run.algorithm.runtime_needs.rollouts
    if source is not None and rollouts is not None and not rollouts.accepts_segments:
        key, setting = source
        yield Problem(
            key,
            f"{setting} can divide a rollout into several segments, which {run.algorithm_name} does not support: it computes "
            "advantages from the sequence of a rollout's tokens. Use grpo, or remove the key.",
        )


@rule("rollout.history", "env", "algorithm", "loss_fn", applies_to=TRAINING)
def loss_supports_segments(config: CheckedConfig) -> Iterator[Problem]:
    """The loss does not count sequences, if rollouts can have several segments."""
    run = config.run
    source, counted = _source_of_segments(run), run.loss_fn.sequence_level_key
    if source is not None and counted is not None and run.algorithm.runtime_needs.rollouts is not None:
        yield Problem(
            ("loss_fn", counted),
            f"{source[1]} can divide a rollout into several segments, and this loss would count each of them as a rollout. Use "
            "a mean over tokens, as in clipped_pg, dapo and cispo with their defaults.",
        )


def _source_of_segments(run: RunConfig) -> tuple[KeyPath, str] | None:
    """The key that can divide rollouts into several segments, and what it is."""
    if run.rollout.history == "template":
        return _HISTORY, "rollout.history: template"
    task = next((task for task, section in run.env.items() if section.agent is not None), None)
    return None if task is None else (("env", task, "agent"), "an agent")


@rule("rollout.min_scored", "algorithm", applies_to=TRAINING)
def groups_have_the_scored_rows(config: CheckedConfig) -> Iterator[Problem]:
    """The minimum number of scored rows is not larger than a group."""
    rollouts, needed = config.run.algorithm.runtime_needs.rollouts, config.run.rollout.min_scored
    if needed is not None and rollouts is not None and needed > rollouts.samples_per_prompt:
        yield Problem(
            ("rollout", "min_scored"),
            f"{needed} scored rows are more than the {rollouts.samples_per_prompt} samples of a group, so every group would be "
            f"replaced. Set it to {rollouts.samples_per_prompt} or less.",
        )


@rule("env", each=each_task)
def agent_can_be_imported(config: CheckedConfig, task: str, section: EnvironmentConfig) -> Iterator[Problem]:
    """The agent of a task is a function that exists, and a plugin provides the endpoint that it samples from."""
    path, key = section.agent, ("env", task, "agent")
    if path is None:
        return
    if not is_path(path):
        yield Problem(key, f"{path!r} is not the dotted path of a function: write it in full, such as my_agent.{path}.")
    elif section.python is None and (problem := missing_target(path)) is not None:
        yield Problem(key, f"cannot import {path!r}: {problem}")
    elif not config.registry.names(Kind.MODEL_SERVER):
        yield Problem(key, "agents need a local endpoint, which rl-serve provides: install it (docs/installation.md).")


@rule("env", "cluster.backend", each=each_task)
def another_interpreter_needs_ray(config: CheckedConfig, task: str, section: EnvironmentConfig) -> Iterator[Problem]:
    """`env.<task>.python` is only set if workers are separate processes."""
    if section.python is not None and config.run.cluster.backend == "in_process":
        yield Problem(("env", task, "python"), "workers with their own interpreter need `cluster.backend: ray`.")


@rule("env", each=each_task)
def tool_parser_exists(config: CheckedConfig, task: str, section: EnvironmentConfig) -> Iterator[Problem]:
    """The parser of tool calls of a task is a built-in one or a class that exists."""
    name, key = section.tool_parser, ("env", task, "tool_parser")
    if name is None or name in PARSER_NAMES:
        return
    if not is_path(name):
        hint = did_you_mean(name, [*PARSER_NAMES])
        names = ", ".join(PARSER_NAMES)
        yield Problem(key, f"unknown parser {name!r}.{hint} Use {names}, or the dotted path of a class.")
    elif (problem := missing_target(name)) is not None:
        yield Problem(key, f"{name} cannot be imported: {problem}")
