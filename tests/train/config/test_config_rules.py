"""The rules of configs: each reads only the sections that it declares."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.loader import load_config
from rl_train.config.rules import RULES
from rl_train.config.rules.components import sections_of
from rl_train.config.rules.rule import CheckedConfig, Stage, UnavailableError, Use, unavailable_section

FOLDER = Path(__file__).parents[3] / "examples"
EXAMPLES = [FOLDER / f"{name}.yaml" for name in ("grpo_addition", "ppo_addition", "dpo_addition")]
SECTIONS = ("policy", "value", "teacher", "loss_fn", "cluster", "checkpointing", "logger", "rollout", "profiling")


def without(config, name):
    """The config in which reading a key of a section raises an error."""
    section = getattr(config.run, name)
    unreadable = unavailable_section(type(section), (name,))
    return CheckedConfig(
        run=config.run.model_copy(update={name: unreadable}), registry=config.registry, use=config.use, layout=config.layout
    )


@pytest.fixture(scope="module")
def configs():
    """Each example in several versions: one per section, by its name, in which no key of that section can be read."""
    registry = Registry(discover())
    examples = [
        CheckedConfig(run=loaded.run, registry=registry, use=Use.TRAIN, layout=loaded.layout)
        for loaded in (load_config(path, [], registry=registry, stages=()) for path in EXAMPLES)
    ]
    return [(name, without(each, name)) for each in examples for name in SECTIONS if getattr(each.run, name) is not None]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.stage is not Stage.WRITTEN], ids=lambda rule: rule.name)
def test_a_rule_reads_only_the_sections_that_it_declares(rule, configs):
    declared = {read.partition(".")[0] for read in rule.reads}
    undeclared = set()
    for name, config in configs:
        if name not in declared and "every component" not in declared:
            try:
                list(rule.problems(config))
            except UnavailableError as error:
                undeclared.add(str(error))
    assert undeclared == set()


def test_rules_about_components_do_not_check_disabled_loggers(files, good):
    run = files.load(good + "logger: {loggers: {mlflow: {enabled: false}, tensorboard: {}}}\n").run
    assert [path for path, _ in sections_of(run) if path[0] == "logger"] == [("logger", "loggers", "tensorboard")]
