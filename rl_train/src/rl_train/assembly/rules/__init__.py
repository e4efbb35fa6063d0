"""All rules of a config, one page per subject: those of `rl_train.config.rules`, and those of later stages.

The pages here need the classes that a config names, the files of its models (`Stage.IMPORTED`), its tokenizer or its data
(`Stage.DATA`). No rule starts a worker or loads weights.
"""

import logging

from rl_core.config.diagnostics import InvalidConfigError
from rl_train.assembly.rules import classes, model_files, run_data
from rl_train.assembly.rules.run_facts import RunFacts
from rl_train.config import rules as static_rules
from rl_train.config.rules.rule import Stage, rules_in, run_rules

PAGES = (*static_rules.PAGES, classes, model_files, run_data)
RULES = tuple(rule for page in PAGES for rule in rules_in(page))

_log = logging.getLogger("rlcore")


def check_before_start(facts: RunFacts) -> None:
    """Check the rules that need classes, models and data, and log their warnings.

    Raises:
        InvalidConfigError: Lists all problems.
        UserError: The only problem is an error that a rule raised.
    """
    report = run_rules(RULES, facts, Stage.IMPORTED, Stage.DATA)
    for warning in report.warnings:
        _log.warning("%s", warning)
    if len(report.problems) == len(report.errors) == 1:
        raise report.errors[0]
    if report.problems:
        raise InvalidConfigError(report.problems, map(str, report.not_checked))
