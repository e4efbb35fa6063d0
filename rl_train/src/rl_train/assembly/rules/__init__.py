"""All rules of a config, one page per subject: those of `rl_train.config.rules`, and those of later stages.

The pages here need the classes that a config names and the files of its models (`Stage.IMPORTED`), or its data (`Stage.DATA`).
No rule starts a worker or loads weights.
"""

import logging

from rl_core.config.diagnostics import InvalidConfigError
from rl_train.assembly.rules import later_stages
from rl_train.assembly.rules.run_facts import RunFacts
from rl_train.config import rules as static_rules
from rl_train.config.rules.rule import Stage, rules_in, run_rules

PAGES = (*static_rules.PAGES, later_stages)
RULES = tuple(rule for page in PAGES for rule in rules_in(page))

_log = logging.getLogger("rlcore")


def check_before_start(facts: RunFacts, *stages: Stage) -> None:
    """Check the rules of some stages, and log their warnings.

    Args:
        facts: What the rules read.
        stages: The stages; those that need classes, models and data by default.

    Raises:
        InvalidConfigError: Lists all problems.
        UserError: The only problem is an error that a rule raised.
    """
    report = run_rules(RULES, facts, *(stages or (Stage.IMPORTED, Stage.DATA)))
    for warning in report.warnings:
        _log.warning("%s", warning)
    if len(report.problems) == len(report.errors) == 1:
        raise report.errors[0]
    if report.problems:
        raise InvalidConfigError(report.problems, map(str, report.not_checked))
