"""Checks the rules of a loaded config that need its classes, models or data."""

from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.rules import RULES
from rl_train.assembly.rules.run_facts import RunFacts
from rl_train.config.loader import LoadedConfig
from rl_train.config.rules.rule import CheckedConfig, RuleReport, Stage, run_rules


def report_of(loaded: LoadedConfig) -> RuleReport:
    """What the rules of the later stages find."""
    checked = CheckedConfig(run=loaded.run, registry=Registry(discover()), layout=loaded.layout)
    return run_rules(RULES, RunFacts.of(checked, located=loaded), Stage.IMPORTED, Stage.DATA)
