"""Every rule that can be checked without importing what the config names, one page per subject.

A rule is a function with a stage, the keys that it reads, the uses that it applies to, and its text (`rule.Rule`). Rules that
need the classes, models or data of a run are in `rl_train.assembly.rules`, which has the list of all rules.
"""

from rl_train.config.rules import components, models, ranking, rollouts, run
from rl_train.config.rules.rule import rules_in

PAGES = (run, components, models, rollouts, ranking)
RULES = tuple(rule for page in PAGES for rule in rules_in(page))
